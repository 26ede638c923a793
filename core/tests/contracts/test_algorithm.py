"""Columns that estimators and losses declare and read by name."""

from __future__ import annotations

import pytest
import torch

from rollcast.contracts.algorithm import (
    AdvantageInputs,
    AdvantageOutputs,
    Needs,
    PolicyLossInputs,
    PolicyLossOutput,
    advantage,
    check_columns,
    check_options,
    check_type,
    needs_of,
    policy_loss,
    prepare_policy_loss,
)
from rollcast.errors import ColumnError, ConfigError, PluginTypeError

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

    columns, optional = frozenset({"values", "mine/"}), frozenset({"weights"})
    assert needs_of(estimator) == Needs(columns, optional, compares_samples=True, options=frozenset())
    batch = dict.fromkeys(("values", "mine/a", "mine/b", "weights", "mine", "others"), ONES)
    assert sorted(needs_of(estimator).select(batch)) == ["mine/a", "mine/b", "values", "weights"]
    assert Needs().select(batch) == {}
    assert needs_of(len) == Needs()


def test_needs_are_names() -> None:
    with pytest.raises(TypeError, match=r"needs is 'values'; it has to be a set of names, such as \{'values'\}"):
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


@policy_loss(options={"tau_pos", "tau_neg"})
def _gated(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(-inputs.advantages * inputs.log_probs)


def test_options_that_a_function_does_not_declare_are_refused() -> None:
    check_options(_gated, {"tau_pos": 1.0}, "actor.policy_loss_kwargs")
    with pytest.raises(ConfigError, match=r"actor\.policy_loss_kwargs\.tau_poz is set, .*_gated has .*mean 'tau_pos'"):
        check_options(_gated, {"tau_poz": 1.0}, "actor.policy_loss_kwargs")
    bare = advantage()(lambda given: given)
    with pytest.raises(ConfigError, match="its options: none"):
        check_options(bare, {"beta": 1}, "algorithm.adv_kwargs")
    check_options(len, {"beta": 1}, "algorithm.adv_kwargs")  # without a declaration, any
    check_options(advantage(options=None)(lambda given: given), {"beta": 1}, "algorithm.adv_kwargs")


def test_what_a_plugin_returns_is_checked() -> None:
    check_columns(_gated, {"losses": torch.zeros(2, 3)}, ONES)
    check_type(_gated, AdvantageOutputs(ONES, ONES), AdvantageOutputs)
    narrow = r"_gated returned losses that are torch\.float32 \[2\] .* have to be float32 \[2, 3\]"
    with pytest.raises(PluginTypeError, match=narrow):
        check_columns(_gated, {"losses": torch.zeros(2)}, ONES)
    with pytest.raises(PluginTypeError, match="the metric kl that are a float"):
        check_columns(_gated, {"losses": ONES, "values of the metric kl": 1.0}, ONES)
    with pytest.raises(PluginTypeError, match=r"losses that are torch\.bool"):
        check_columns(_gated, {"losses": ONES > 0}, ONES)
    with pytest.raises(PluginTypeError, match="returned a Tensor, not an instance of AdvantageOutputs"):
        check_type(_gated, ONES, AdvantageOutputs)
