"""Columns that estimators and losses declare and read by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollcast.contracts.algorithm import (
    AdvantageInputs,
    AdvantageOutputs,
    Needs,
    PolicyLossInputs,
    PolicyLossOutput,
    advantage,
    advantages,
    kl_penalties,
    kl_penalty,
    loss_aggregations,
    needs_of,
    policy_loss,
    policy_losses,
    prepare_policy_loss,
    try_estimator,
    try_kl_penalty,
    try_loss_aggregation,
    try_policy_loss,
)
from rollcast.errors import ColumnError, PluginTypeError

ONES = torch.ones(2, 3)


def inputs(**columns: torch.Tensor) -> AdvantageInputs:
    return AdvantageInputs(ONES, ONES, torch.arange(2), columns=columns)


@pytest.mark.parametrize(
    "name", ["values", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "reward_baselines"]
)
def test_a_documented_column_has_a_property(name: str) -> None:
    column = torch.rand(2, 3)
    assert getattr(inputs(**{name: column}), name) is column
    with pytest.raises(ColumnError, match=rf"has no column '{name}'; it has: other\. Declare .* needs=\{{'{name}'\}}"):
        getattr(inputs(other=ONES), name)


def test_components_of_the_reward_are_the_columns_of_a_prefix() -> None:
    given = inputs(**{"reward_component/a": ONES, "reward_component/b": 2 * ONES, "values": ONES})
    assert {name: float(column[0, 0]) for name, column in given.reward_components.items()} == {"a": 1.0, "b": 2.0}
    assert given.columns_of("reward_component/").keys() == {"a", "b"}
    with pytest.raises(ColumnError, match="no column 'reward_component/'"):
        _ = inputs(values=ONES).reward_components


def test_columns_are_added_to_a_copy() -> None:
    first = inputs(values=ONES)
    second = first.with_columns({"values": 2 * ONES, "mine": ONES})
    assert float(first.values[0, 0]) == 1.0
    assert sorted(second.columns) == ["mine", "values"]
    assert float(second.values[0, 0]) == 2.0
    assert second.group_ids is first.group_ids


def test_needs_are_declared_and_select_columns() -> None:
    @advantage(needs={"values", "mine/"}, optional=["weights"], compares_samples=True)
    def estimator(given: AdvantageInputs) -> AdvantageOutputs:
        return AdvantageOutputs(given.values, given.values)

    assert needs_of(estimator) == Needs(frozenset({"values", "mine/"}), frozenset({"weights"}), True)
    batch = dict.fromkeys(("values", "mine/a", "mine/b", "weights", "mine", "others"), ONES)
    assert sorted(needs_of(estimator).select(batch)) == ["mine/a", "mine/b", "values", "weights"]
    assert Needs().select(batch) == {}
    assert needs_of(len) == Needs()


def test_needs_are_names() -> None:
    with pytest.raises(TypeError, match=r"needs is 'values'; it has to be a set of column names, such as \{'values'\}"):
        advantage(needs="values")
    with pytest.raises(TypeError, match="optional is"):
        policy_loss(optional=[""])


def test_a_policy_loss_declares_columns_and_a_preparation() -> None:
    @policy_loss(needs={"trust"}, prepare=lambda given: {"mean": given.column("trust").mean().expand(2, 3)})
    def trusting(given: PolicyLossInputs) -> PolicyLossOutput:
        return PolicyLossOutput(given.prepared["mean"])

    @policy_loss(needs={"trust"})
    def unprepared(given: PolicyLossInputs) -> PolicyLossOutput:
        return PolicyLossOutput(given.column("trust"))

    given = PolicyLossInputs(ONES, ONES, ONES, ONES, columns={"trust": 3 * ONES})
    assert needs_of(trusting).columns == {"trust"}
    assert float(prepare_policy_loss(trusting, given)["mean"][1, 2]) == 3.0
    assert prepare_policy_loss(unprepared, given) == {}
    assert prepare_policy_loss(len, given) == {}  # type: ignore[arg-type]


def _sums(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs.from_scores(inputs.token_level_rewards.sum(-1), inputs.response_mask)


def _mistyped(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs.from_scores(inputs.token_rewards.sum(-1), inputs.response_mask)  # type: ignore[attr-defined]


def _bare(inputs: AdvantageInputs) -> Any:
    return inputs.token_level_rewards


def _narrow(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(inputs.token_level_rewards.sum(-1), inputs.token_level_rewards.sum(-1))


def _needs_option(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs.from_scores(
        inputs.token_level_rewards.sum(-1) * inputs.options["scale"], inputs.response_mask
    )


@advantage(needs={"values"})
def _with_values(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(inputs.token_level_rewards - inputs.values, inputs.token_level_rewards)


@advantage(needs={"a_column_of_a_stranger"})
def _with_stranger(inputs: AdvantageInputs) -> AdvantageOutputs:
    raise AssertionError("what the column holds is not known, so it must not be called")


@pytest.mark.parametrize("estimator", [_sums, _with_values, _with_stranger])
def test_an_estimator_that_works_passes_its_trial(estimator: Any) -> None:
    before = torch.random.get_rng_state()
    try_estimator(estimator, "mine")
    try_estimator(estimator, "mine", samples=1)
    assert advantages.probe is not None
    assert advantages.probe(estimator) is None
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (_mistyped, "mine fails on a small batch: AttributeError: .*token_rewards"),
        (_bare, "mine returned a Tensor, not an AdvantageOutputs"),
        (_narrow, r"advantages that are torch.float32 \[8\] .* have to be float32 \[8, 4\]"),
    ],
)
def test_a_mistake_of_an_estimator_is_found_on_a_small_batch(estimator: Any, words: str) -> None:
    with pytest.raises(PluginTypeError, match=words):
        try_estimator(estimator, "mine")
    assert advantages.probe is not None
    assert "does not work: the estimator" in str(advantages.probe(estimator))


def test_an_estimator_may_need_an_option_that_only_a_run_has() -> None:
    assert advantages.probe is not None
    assert advantages.probe(_needs_option) is None
    try_estimator(_needs_option, "mine", options={"scale": 2.0})
    with pytest.raises(PluginTypeError, match="KeyError: 'scale'"):
        try_estimator(_needs_option, "mine")


def _undeclared(inputs: Any) -> AdvantageOutputs:
    return AdvantageOutputs.from_scores(inputs.column("turn_ids").sum(-1), inputs.response_mask)


def test_an_undeclared_column_is_found_on_a_small_batch() -> None:
    with pytest.raises(PluginTypeError, match=r"mine reads a column that it does not declare: .*'turn_ids'"):
        try_estimator(_undeclared, "mine")
    assert advantages.probe is not None
    assert "does not declare" in str(advantages.probe(_undeclared))


def _surrogate(inputs: PolicyLossInputs) -> PolicyLossOutput:
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return PolicyLossOutput(-inputs.advantages * ratio, {"ratio": ratio.detach()})


@policy_loss(needs={"values"}, prepare=lambda given: {"mean": given.values.mean().expand(given.advantages.shape)})
def _prepared(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(_surrogate(inputs).losses * inputs.prepared["mean"])


@policy_loss(needs={"a_column_of_a_stranger"})
def _strange_loss(inputs: PolicyLossInputs) -> PolicyLossOutput:
    raise AssertionError("what the column holds is not known, so it must not be called")


def _with_option(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(_surrogate(inputs).losses * inputs.options["scale"])


@pytest.mark.parametrize("loss", [_surrogate, _prepared, _strange_loss])
def test_a_policy_loss_that_works_passes_its_trial(loss: Any) -> None:
    try_policy_loss(loss, "mine")
    assert policy_losses.probe is not None
    assert policy_losses.probe(loss) is None


def _with_checked_option(inputs: PolicyLossInputs) -> PolicyLossOutput:
    options = {"scale": None, **inputs.options}
    if options["scale"] is None:
        raise ValueError("needs a scale")
    return PolicyLossOutput(_surrogate(inputs).losses * options["scale"])


def _mistyped_with_options(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(inputs.log_prob * dict(inputs.options).get("scale", 1.0))  # type: ignore[attr-defined]


def test_a_policy_loss_may_need_an_option_that_only_a_run_has() -> None:
    assert policy_losses.probe is not None
    assert policy_losses.probe(_with_option) is None
    assert policy_losses.probe(_with_checked_option) is None
    assert "AttributeError" in str(policy_losses.probe(_mistyped_with_options))
    try_policy_loss(_with_option, "mine", options={"scale": 2.0})
    with pytest.raises(PluginTypeError, match="KeyError: 'scale'"):
        try_policy_loss(_with_option, "mine")


def _not_finite(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(inputs.log_probs.log())


def _steep(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput((inputs.log_probs - inputs.log_probs.detach()).abs().sqrt())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda inputs: inputs.log_prob, "mine fails on a small batch: AttributeError: .*log_prob"),
        (lambda inputs: inputs.log_probs, "mine returned a Tensor, not a PolicyLossOutput"),
        (lambda inputs: PolicyLossOutput(inputs.log_probs.sum(-1)), r"losses that are torch.float32 \[6\]"),
        (lambda inputs: PolicyLossOutput(inputs.log_probs * inputs.values), "does not declare: .*'values'"),
        (_not_finite, "mine returned losses with NaN or infinity"),
        (_steep, "values whose gradient is with NaN or infinity"),
        (lambda inputs: PolicyLossOutput(inputs.log_probs, {"kl": inputs.log_probs.mean()}), "the metric 'kl'"),
        (lambda inputs: PolicyLossOutput(inputs.log_probs, [1]), "metrics that are a list, not a mapping"),
    ],
)
def test_a_mistake_of_a_policy_loss_is_found_on_a_small_batch(loss: Any, words: str) -> None:
    with pytest.raises(PluginTypeError, match=words):
        try_policy_loss(loss, "mine")
    assert policy_losses.probe is not None
    assert "does not work: the policy loss" in str(policy_losses.probe(loss))


@pytest.mark.parametrize(
    ("aggregation", "words"),
    [
        (lambda losses, mask, counts: losses.sum() / counts.token, "AttributeError: .*token"),
        (
            lambda losses, mask, counts: (losses * mask).sum(-1),
            r"returned torch.float32 \[6\]; it has to be one number",
        ),
        (lambda losses, mask, counts: float(losses.detach().sum()), "returned a float; it has to be one number"),
        (lambda losses, mask, counts: losses.detach().sum(), "without a gradient"),
        (lambda losses, mask, counts: losses.sum() / 0.0, "a loss with NaN or infinity"),
    ],
)
def test_a_mistake_of_an_aggregation_is_found_on_a_small_batch(aggregation: Any, words: str) -> None:
    with pytest.raises(PluginTypeError, match=words):
        try_loss_aggregation(aggregation, "mine")
    assert loss_aggregations.probe is not None
    assert "does not work: the loss aggregation" in str(loss_aggregations.probe(aggregation))


@pytest.mark.parametrize(
    ("penalty", "words"),
    [
        (lambda log_probs, ref: log_probs.sub(reff=ref), "mine fails on a small batch: TypeError"),
        (lambda log_probs, ref: (log_probs - ref).mean(), r"an estimate that are torch.float32 \[\]"),
        (lambda log_probs, ref: log_probs > ref, "an estimate that are torch.bool"),
        (lambda log_probs, ref: (log_probs - ref).log(), "an estimate with NaN or infinity"),
        (kl_penalty(needs_vocabulary=True)(lambda log_probs, ref: log_probs - ref), r"torch.float32 \[6, 4, 5\]"),
    ],
)
def test_a_mistake_of_a_kl_penalty_is_found_on_a_small_batch(penalty: Any, words: str) -> None:
    with pytest.raises(PluginTypeError, match=words):
        try_kl_penalty(penalty, "mine")
    assert kl_penalties.probe is not None
    assert "does not work: the KL penalty" in str(kl_penalties.probe(penalty))


def test_aggregations_and_penalties_that_work_pass_their_trial() -> None:
    try_loss_aggregation(lambda losses, mask, counts: (losses * mask).sum() / counts.tokens, "mine")
    try_kl_penalty(lambda log_probs, ref: log_probs - ref, "mine")

    @kl_penalty(needs_vocabulary=True)
    def exact(log_probs: Any, ref: Any) -> Any:
        return (log_probs.exp() * (log_probs - ref)).sum(-1)

    try_kl_penalty(exact, "mine")
