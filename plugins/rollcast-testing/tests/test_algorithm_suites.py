"""The suites for advantages and policy losses: they accept what is right and catch what is not."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import (
    REWARD_COMPONENT,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutput,
    advantage,
    advantages,
    policy_loss,
    policy_losses,
)
from rollcast_testing import AdvantageSuite, PolicyLossSuite

pytest_plugins = ["pytester"]


@advantage(compares_samples=True)
def centred(inputs: AdvantageInputs) -> AdvantageOutputs:
    scores = torch.where(inputs.response_mask != 0, inputs.token_level_rewards, 0.0).sum(-1)
    return AdvantageOutputs.from_scores(scores - inputs.group_mean(scores), inputs.response_mask)


@advantage(needs={"values"})
def one_step(inputs: AdvantageInputs) -> AdvantageOutputs:
    chosen = inputs.response_mask != 0
    rewards = torch.where(chosen, inputs.token_level_rewards, 0.0).float()
    return AdvantageOutputs(rewards - torch.where(chosen, inputs.values.float(), 0.0), rewards)


@advantage()
def plain(inputs: AdvantageInputs) -> AdvantageOutputs:
    rewards = torch.where(inputs.response_mask != 0, inputs.token_level_rewards, 0.0).float()
    return AdvantageOutputs(rewards, rewards.clone())


def reinforce(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """The policy gradient by importance sampling, with a bounded ratio."""
    chosen = inputs.response_mask != 0
    log_ratio = inputs.log_probs.float() - inputs.old_log_probs.float()
    log_ratio = torch.where(chosen, log_ratio, 0.0).clamp(-20, 20)
    losses = -torch.where(chosen, inputs.advantages.float(), 0.0) * log_ratio.exp()
    return PolicyLossOutput(losses, {"kl": -log_ratio.detach()})


def broken_laws(suite: AdvantageSuite | PolicyLossSuite, part: Callable[..., Any]) -> set[str]:
    """The laws of ``suite`` that ``part`` breaks, by their tests' names."""
    broken = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)(part)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):
                broken.add(name.removeprefix("test_"))
    return broken


def with_outputs(change: Callable[[AdvantageInputs, Tensor], Tensor]) -> AdvantageEstimator:
    """``plain`` with its advantages changed."""

    @advantage()
    def changed(inputs: AdvantageInputs) -> AdvantageOutputs:
        out = plain(inputs)
        return AdvantageOutputs(change(inputs, out.advantages), out.returns)

    return changed


def normalised_without_epsilon(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
    count = (inputs.response_mask != 0).sum()
    mean = advantages.sum() / count
    centred_by_mean = (advantages - mean) * (inputs.response_mask != 0)
    return centred_by_mean / (centred_by_mean.square().sum() / count).sqrt()


@advantage(compares_samples=True)
def multiplying_by_the_mask(inputs: AdvantageInputs) -> AdvantageOutputs:
    scores = (inputs.token_level_rewards * inputs.response_mask).sum(-1)
    return AdvantageOutputs.from_scores(scores - inputs.group_mean(scores), inputs.response_mask)


@advantage(compares_samples=True)
def dividing_by_any_spread(inputs: AdvantageInputs) -> AdvantageOutputs:
    scores = torch.where(inputs.response_mask != 0, inputs.token_level_rewards, 0.0).double().sum(-1)
    deviation = scores - inputs.group_mean(scores)
    std = inputs.group_mean(deviation.square()).sqrt()
    return AdvantageOutputs.from_scores(torch.where(std > 0, deviation / std, 0.0), inputs.response_mask)


@advantage(compares_samples=True)
def std_of_one(inputs: AdvantageInputs) -> AdvantageOutputs:
    scores = torch.where(inputs.response_mask != 0, inputs.token_level_rewards, 0.0).sum(-1)
    sizes = inputs.group_sizes()
    deviation = scores - inputs.group_mean(scores)
    std = (inputs.group_mean(deviation.square()) * sizes / (sizes - 1)).sqrt() + 1e-6
    return AdvantageOutputs.from_scores(deviation / std, inputs.response_mask)


@advantage()
def in_place(inputs: AdvantageInputs) -> AdvantageOutputs:
    rewards = inputs.token_level_rewards.mul_(inputs.response_mask)
    rewards = rewards.nan_to_num_(0.0, 0.0, 0.0)
    inputs.token_level_rewards.add_(inputs.response_mask)
    return AdvantageOutputs(rewards.clone(), rewards.clone())


@advantage()
def secretly_grouped(inputs: AdvantageInputs) -> AdvantageOutputs:
    return centred(inputs)


@advantage()
def secretly_valued(inputs: AdvantageInputs) -> AdvantageOutputs:
    return one_step(inputs)


@advantage(needs={"values"}, compares_samples=True)
def needing_too_much(inputs: AdvantageInputs) -> AdvantageOutputs:
    return plain(inputs)


@advantage()
def position_in_the_batch(inputs: AdvantageInputs) -> AdvantageOutputs:
    out = plain(inputs)
    return AdvantageOutputs(out.advantages * torch.arange(len(out.advantages)).unsqueeze(-1), out.returns)


@advantage(compares_samples=True)
def by_group_number(inputs: AdvantageInputs) -> AdvantageOutputs:
    out = plain(inputs)
    return AdvantageOutputs(out.advantages * inputs.group_ids.unsqueeze(-1), out.returns)


@advantage(needs={REWARD_COMPONENT, "reward_baselines"})
def of_components(inputs: AdvantageInputs) -> AdvantageOutputs:
    total = sum(inputs.reward_components.values(), -inputs.reward_baselines).float()
    return AdvantageOutputs.from_scores(total, inputs.response_mask)


@advantage()
def secretly_weighing(inputs: AdvantageInputs) -> AdvantageOutputs:
    out = plain(inputs)
    scale = inputs.columns.get("sum_pi_squared", 1.0)
    return AdvantageOutputs(out.advantages * scale, out.returns)


@advantage(needs={"old_log_probs"})
def crashing_without(inputs: AdvantageInputs) -> AdvantageOutputs:
    out = plain(inputs)
    return AdvantageOutputs(out.advantages * inputs.columns["old_log_probs"].exp(), out.returns)


@advantage(needs={"old_log_probs"})
def ignoring_a_need(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(plain(inputs).advantages + 0 * inputs.old_log_probs, plain(inputs).returns)


@advantage(optional={"rollout_is_weights"})
def needing_an_option(inputs: AdvantageInputs) -> AdvantageOutputs:
    weights = torch.where(inputs.response_mask != 0, inputs.rollout_is_weights.float(), 0.0)
    return AdvantageOutputs(plain(inputs).advantages * weights, plain(inputs).returns)


@advantage(needs={"surprise"}, optional={"rollout_is_weights"})
def with_a_strangers_column(inputs: AdvantageInputs) -> AdvantageOutputs:
    chosen, out = inputs.response_mask != 0, plain(inputs)
    bonus = torch.where(chosen, inputs.column("surprise").float(), 0.0)
    weights = inputs.columns.get("rollout_is_weights", torch.ones_like(bonus))
    return AdvantageOutputs((out.advantages + bonus) * torch.where(chosen, weights.float(), 0.0), out.returns)


@advantage(by_group=True)
def looking_over_the_group(inputs: AdvantageInputs) -> AdvantageOutputs:
    out, chosen = plain(inputs), inputs.response_mask != 0
    mean = out.advantages[chosen].mean() if bool(chosen.any()) else torch.zeros(())
    return AdvantageOutputs(torch.where(chosen, out.advantages - mean, 0.0), out.returns)


@pytest.mark.parametrize("estimator", [centred, one_step, plain, of_components, with_a_strangers_column])
def test_right_estimators_pass(estimator: AdvantageEstimator) -> None:
    assert broken_laws(AdvantageSuite(), estimator) == set()


@pytest.mark.parametrize(
    ("estimator", "law"),
    [
        (with_outputs(lambda _, adv: adv.double()), "gives_float32_of_the_masks_shape"),
        (with_outputs(lambda _, adv: adv[:, :-1]), "gives_float32_of_the_masks_shape"),
        (with_outputs(lambda _, adv: adv.clone().requires_grad_()), "gives_float32_of_the_masks_shape"),
        (with_outputs(lambda _, adv: adv + 1), "is_zero_under_the_mask"),
        (with_outputs(lambda _, adv: adv / 0), "gives_finite_numbers"),
        (with_outputs(lambda i, adv: i.token_level_rewards * i.response_mask), "ignores_what_is_under_the_mask"),
        (with_outputs(lambda _, adv: adv / adv.shape[1]), "ignores_right_padding"),
        (
            with_outputs(lambda i, adv: torch.where(i.response_mask == 1, adv, 0) * ~i.response_mask),
            "ignores_the_masks_dtype",
        ),
        (with_outputs(lambda _, adv: adv * random.random()), "is_deterministic"),
        (with_outputs(normalised_without_epsilon), "is_finite_for_constant_rewards"),
        (with_outputs(normalised_without_epsilon), "takes_rows_without_tokens"),
        (with_outputs(lambda _, adv: adv / adv.abs().max()), "takes_an_empty_batch"),
        (dividing_by_any_spread, "a_rounding_error_is_no_difference"),
        (multiplying_by_the_mask, "ignores_what_is_under_the_mask"),
        (std_of_one, "takes_groups_of_one_row"),
        (in_place, "leaves_its_inputs_alone"),
        (secretly_grouped, "says_honestly_whether_it_compares_samples"),
        (secretly_valued, "gives_finite_numbers"),
        (needing_too_much, "says_honestly_whether_it_compares_samples"),
        (secretly_weighing, "reads_no_column_that_it_does_not_declare"),
        (crashing_without, "says_honestly_which_columns_it_needs"),
        (ignoring_a_need, "says_honestly_which_columns_it_needs"),
        (needing_an_option, "says_honestly_which_columns_it_can_do_without"),
        (with_outputs(lambda _, adv: adv - adv.mean()), "does_not_mix_groups"),
        (with_outputs(lambda i, adv: adv.to(i.token_level_rewards.dtype)), "takes_other_dtypes"),
        (needing_too_much, "says_honestly_which_columns_it_needs"),
        (position_in_the_batch, "follows_a_permutation_of_rows"),
        (by_group_number, "ignores_the_order_of_group_ids"),
        (looking_over_the_group, "groups_at_a_time_are_the_whole_batch"),
    ],
)
def test_wrong_estimators_fail(estimator: AdvantageEstimator, law: str) -> None:
    assert law in broken_laws(AdvantageSuite(), estimator)


def test_every_advantage_law_is_broken_by_something_above() -> None:
    marks = test_wrong_estimators_fail.pytestmark  # type: ignore[attr-defined]
    assert {law for _, law in marks[0].args[1]} == laws_of(AdvantageSuite) - {"agrees_with_its_examples"}


def test_examples_of_an_estimator_are_checked() -> None:
    inputs = AdvantageInputs(
        torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]), torch.zeros(2).long()
    )

    class Right(AdvantageSuite):
        examples = ((inputs, [[-0.5, -0.5], [0.5, 0.0]]),)

    class Wrong(AdvantageSuite):
        examples = ((inputs, [[-0.5, -0.5], [0.6, 0.0]]),)

    assert broken_laws(Right(), centred) == set()
    assert broken_laws(Wrong(), centred) == {"agrees_with_its_examples"}


def test_an_estimator_may_look_at_the_whole_batch() -> None:
    class Suite(AdvantageSuite):
        mixes_groups = True

    def over_the_batch(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
        chosen = inputs.response_mask != 0
        return torch.where(chosen, advantages - advantages.sum() / chosen.sum().clamp(min=1), 0.0)

    assert broken_laws(Suite(), with_outputs(over_the_batch)) == set()
    assert broken_laws(AdvantageSuite(), with_outputs(over_the_batch)) == {"does_not_mix_groups"}


def test_an_estimator_may_refuse_groups_of_one_row() -> None:
    class Suite(AdvantageSuite):
        single_row_groups = False

    @advantage(compares_samples=True)
    def refusing(inputs: AdvantageInputs) -> AdvantageOutputs:
        if (inputs.group_sizes() == 1).any():
            raise ValueError("a group has only one row")
        return centred(inputs)

    assert broken_laws(Suite(), refusing) == set()
    assert broken_laws(AdvantageSuite(), refusing) == {"takes_groups_of_one_row"}
    assert broken_laws(Suite(), centred) == {"takes_groups_of_one_row"}


def test_options_reach_the_estimator() -> None:
    class Suite(AdvantageSuite):
        options = {"scale": 2.0}  # noqa: RUF012

    @advantage()
    def scaled(inputs: AdvantageInputs) -> AdvantageOutputs:
        out = plain(inputs)
        return AdvantageOutputs(out.advantages * inputs.options["scale"], out.returns)

    assert broken_laws(Suite(), scaled) == set()
    not_asked = {
        *("says_honestly_which_columns_it_needs", "says_honestly_which_columns_it_can_do_without"),
        *("agrees_with_its_examples", "groups_at_a_time_are_the_whole_batch"),
    }
    assert broken_laws(AdvantageSuite(), scaled) == laws_of(AdvantageSuite) - not_asked


def with_losses(change: Callable[[PolicyLossInputs, Tensor], Tensor]) -> PolicyLoss:
    def changed(inputs: PolicyLossInputs) -> PolicyLossOutput:
        out = reinforce(inputs)
        return replace(out, losses=change(inputs, out.losses))

    return changed


def with_metric(metric: Callable[[PolicyLossInputs, Tensor], Tensor]) -> PolicyLoss:
    def changed(inputs: PolicyLossInputs) -> PolicyLossOutput:
        out = reinforce(inputs)
        return replace(out, metrics={"odd": metric(inputs, out.losses)})

    return changed


def unbounded(inputs: PolicyLossInputs) -> PolicyLossOutput:
    chosen = inputs.response_mask != 0
    ratio = torch.where(chosen, inputs.log_probs.float() - inputs.old_log_probs.float(), 0.0).exp()
    return PolicyLossOutput(-torch.where(chosen, inputs.advantages.float(), 0.0) * ratio)


def masked_too_late(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Right losses, but the gradient of what is masked is 0 times infinity."""
    ratio = (inputs.log_probs.float() - inputs.old_log_probs.float()).clamp(-1e9, 20).exp()
    return PolicyLossOutput(torch.where(inputs.response_mask != 0, -inputs.advantages.float() * ratio, 0.0))


def whitening(inputs: PolicyLossInputs) -> PolicyLossOutput:
    chosen = inputs.response_mask != 0
    mean = torch.where(chosen, inputs.advantages, 0.0).sum() / chosen.sum().clamp(min=1)
    return reinforce(replace(inputs, advantages=inputs.advantages - mean))


def changing_its_inputs(inputs: PolicyLossInputs) -> PolicyLossOutput:
    inputs.advantages.mul_(2)
    return reinforce(inputs)


def length_normalised(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Divides by the row's length, unprotected, where the gradient passes."""
    chosen = inputs.response_mask != 0
    log_ratio = inputs.log_probs.float() - inputs.old_log_probs.float()
    log_ratio = (log_ratio * chosen).sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True)
    return PolicyLossOutput(torch.where(chosen, -inputs.advantages * log_ratio.exp(), 0.0))


def in_the_inputs_precision(inputs: PolicyLossInputs) -> PolicyLossOutput:
    chosen = inputs.response_mask != 0
    log_ratio = torch.where(chosen, inputs.log_probs - inputs.old_log_probs, 0.0).clamp(-20, 20)
    losses = -torch.where(chosen, inputs.advantages * 1e5, 0.0) * log_ratio.exp() / 1e5
    return PolicyLossOutput(losses, {"kl": -log_ratio.detach()})


@policy_loss(needs={"trust"})
def with_a_column(inputs: PolicyLossInputs) -> PolicyLossOutput:
    out, chosen = reinforce(inputs), inputs.response_mask != 0
    return replace(out, losses=out.losses * torch.where(chosen, inputs.column("trust").float(), 1.0))


@policy_loss(needs={"trust"})
def without_its_column(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return reinforce(inputs)


def test_a_right_loss_passes() -> None:
    class Suite(PolicyLossSuite):
        on_policy_gradient = False
        columns = {"trust": lambda generator: torch.rand(5, 7, generator=generator)}  # noqa: RUF012

    assert broken_laws(PolicyLossSuite(), reinforce) == set()
    assert broken_laws(Suite(), with_a_column) == set()


@pytest.mark.parametrize(
    ("loss", "law"),
    [
        (with_losses(lambda _, losses: losses.sum()), "gives_a_float32_loss_per_token"),
        (with_losses(lambda _, losses: losses.double()), "gives_a_float32_loss_per_token"),
        (with_losses(lambda _, losses: losses.detach()), "gives_a_float32_loss_per_token"),
        (with_metric(lambda _, losses: losses.detach().mean()), "gives_metrics_per_token_without_gradient"),
        (with_metric(lambda _, losses: losses), "gives_metrics_per_token_without_gradient"),
        (with_metric(lambda _, losses: losses > 0), "gives_metrics_per_token_without_gradient"),
        (with_metric(lambda _, losses: losses.detach() / 0), "gives_metrics_per_token_without_gradient"),
        (masked_too_late, "ignores_what_is_under_the_mask"),
        (with_losses(lambda i, losses: losses + i.log_probs.mean()), "sends_no_gradient_under_the_mask"),
        (with_losses(lambda _, losses: losses / losses.shape[1]), "ignores_right_padding"),
        (with_losses(lambda i, losses: losses * ~i.response_mask), "ignores_the_masks_dtype"),
        (whitening, "does_not_mix_rows"),
        (
            with_losses(lambda _, losses: losses * torch.arange(len(losses)).unsqueeze(-1)),
            "follows_a_permutation_of_rows",
        ),
        (with_losses(lambda _, losses: -losses), "has_the_policy_gradient_on_policy"),
        (unbounded, "is_finite_at_extreme_ratios"),
        (in_the_inputs_precision, "takes_half_precision"),
        (length_normalised, "takes_rows_without_tokens"),
        (with_losses(lambda _, losses: losses * random.random()), "is_deterministic"),
        (changing_its_inputs, "leaves_its_inputs_alone"),
        (without_its_column, "says_honestly_which_columns_it_needs"),
    ],
)
def test_wrong_losses_fail(loss: PolicyLoss, law: str) -> None:
    assert law in broken_laws(PolicyLossSuite(), loss)


def test_every_policy_loss_law_is_broken_by_something_above() -> None:
    marks = test_wrong_losses_fail.pytestmark  # type: ignore[attr-defined]
    assert {law for _, law in marks[0].args[1]} == laws_of(PolicyLossSuite) - {"agrees_with_its_examples"}


def test_examples_of_a_loss_are_checked() -> None:
    inputs = PolicyLossInputs(
        torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -9.0]]), torch.tensor([[2.0, 5.0]]), torch.tensor([[1, 0]])
    )

    class Right(PolicyLossSuite):
        examples = ((inputs, [[-2.0, 0.0]]),)

    class Wrong(PolicyLossSuite):
        examples = ((inputs, [[2.0, 0.0]]),)

    assert broken_laws(Right(), reinforce) == set()
    assert broken_laws(Wrong(), reinforce) == {"agrees_with_its_examples"}


def centre_of_the_batch(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    chosen = inputs.response_mask != 0
    advantages = torch.where(chosen, inputs.advantages.float(), 0.0)
    mean = advantages.sum() / chosen.sum().clamp(min=1)
    return {"centred": torch.where(chosen, advantages - mean, 0.0)}


@policy_loss(prepare=centre_of_the_batch)
def with_a_preparation(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return reinforce(replace(inputs, advantages=inputs.prepared["centred"]))


@policy_loss(prepare=lambda inputs: {"first": torch.zeros_like(inputs.advantages) + inputs.advantages[0, 0]})
def with_a_partial_preparation(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return reinforce(replace(inputs, advantages=inputs.advantages - inputs.prepared["first"]))


def test_a_loss_may_prepare_columns_from_the_whole_batch() -> None:
    class Suite(PolicyLossSuite):
        on_policy_gradient = False

    assert broken_laws(Suite(), with_a_preparation) == set()
    # The first row is another one after a permutation.
    assert "follows_a_permutation_of_rows" in broken_laws(Suite(), with_a_partial_preparation)


def test_a_loss_may_have_another_gradient_on_policy() -> None:
    class Suite(PolicyLossSuite):
        on_policy_gradient = False

    doubled = with_losses(lambda _, losses: 2 * losses)
    assert broken_laws(Suite(), doubled) == set()
    assert broken_laws(PolicyLossSuite(), doubled) == {"has_the_policy_gradient_on_policy"}


def laws_of(suite: type) -> set[str]:
    return {name.removeprefix("test_") for name in dir(suite) if name.startswith("test_")}


def test_authors_write_an_empty_subclass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from rollcast_testing import AdvantageSuite, PolicyLossSuite

        class TestRight(AdvantageSuite):
            name = "suite_right"

        class TestWrong(AdvantageSuite):
            name = "suite_wrong"

        class TestAbsent(AdvantageSuite):
            name = "suite_absent"

        class TestNameless(AdvantageSuite):
            pass

        class TestLoss(PolicyLossSuite):
            name = "suite_loss"
            on_policy_gradient = False
        """
    )
    wrong = with_outputs(lambda _, adv: adv + 1)
    with (
        advantages.temporarily("suite_right", centred),
        advantages.temporarily("suite_wrong", wrong),
        policy_losses.temporarily("suite_loss", reinforce),
    ):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    wrong_laws = len(broken_laws(AdvantageSuite(), wrong))
    count, losses = len(laws_of(AdvantageSuite)), len(laws_of(PolicyLossSuite))
    result.assert_outcomes(
        # Of each suite the examples are skipped, of estimators the calls by group, of the loss its gradient on policy.
        passed=(count - 2) + (count - 2 - wrong_laws) + (losses - 2),
        failed=wrong_laws,
        errors=2 * count,
        skipped=6,
    )
    result.stdout.fnmatch_lines_random(
        [
            "*failed check: advantages are zero where the mask is zero*",
            "*no plugin 'suite_absent' in rollcast.advantages*",
            "*It was asked for by: TestAbsent.name*",
            "*TestNameless must set `name` or override the fixture `estimator`*",
        ]
    )


def test_importing_the_kit_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['ray'] = sys.modules['pytest'] = None\n"
        "import rollcast_testing\n"
        "assert 'AdvantageSuite' in dir(rollcast_testing)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_names_are_attribute_errors() -> None:
    import rollcast_testing

    with pytest.raises(AttributeError, match="has no attribute 'AdvantagesSuite'"):
        rollcast_testing.AdvantagesSuite  # noqa: B018
