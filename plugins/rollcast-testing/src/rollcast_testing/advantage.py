"""The conformance suite of advantage estimators, a class of pytest tests to inherit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import (
    REWARD_COMPONENT,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
    advantages,
    needs_of,
)
from rollcast_testing.checks import require

__all__ = ["AdvantageSuite"]

_OUTPUTS = ("advantages", "returns")
_TENSORS = ("token_level_rewards", "response_mask", "group_ids")


class AdvantageSuite:
    """Conformance tests of one advantage estimator.

    Set :attr:`name`, or override the fixture :meth:`estimator` with the function itself::

        class TestMyEstimator(AdvantageSuite):
            name = "my_estimator"

    Values are compared with the tolerances :attr:`rtol` and :attr:`atol`, because sums may be computed in any order. To
    test with your own inputs, override :meth:`inputs`.
    """

    #: Name of the estimator in ``rollcast.advantages``.
    name: ClassVar[str] = ""
    #: Keys of ``algorithm.adv_kwargs`` for the tests.
    options: ClassVar[Mapping[str, Any]] = {}
    #: True if the estimator supports a prompt with only one sample; if False, it must raise a ValueError that mentions
    #: the group.
    single_row_groups: ClassVar[bool] = True
    #: True if the results of a prompt's rows depend on other prompts, for example because advantages are whitened over
    #: the batch.
    mixes_groups: ClassVar[bool] = False
    #: Hand-computed examples: inputs and expected advantages, ``[B, T]``.
    examples: ClassVar[Sequence[tuple[AdvantageInputs, Sequence[Sequence[float]]]]] = ()
    #: For a column of your own that the estimator declares: a function from a generator to a tensor for six rows,
    #: ``[6]`` or ``[6, 7]``. Without one, the column is drawn from a normal distribution, ``[6, 7]``.
    columns: ClassVar[Mapping[str, Callable[[torch.Generator], Tensor]]] = {}
    #: Rewards of all tokens with which the advantages must be finite; leave out what the estimator refuses.
    constant_rewards: ClassVar[Sequence[float]] = (0.0, 0.1, 10.1, -3.0)
    rtol: ClassVar[float] = 1e-4
    atol: ClassVar[float] = 1e-5

    @pytest.fixture
    def estimator(self) -> AdvantageEstimator:
        """Return the estimator under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `estimator`")
        return advantages.get(self.name, requested_by=f"{type(self).__name__}.name")

    def test_groups_at_a_time_are_the_whole_batch(self, estimator: AdvantageEstimator) -> None:
        """Check that the results of a ``by_group`` estimator do not depend on other groups, whitened or not."""
        needs = needs_of(estimator)
        if not needs.by_group:
            pytest.skip("the estimator is called with the whole batch")
        whole = self.inputs(estimator)
        scores = (whole.token_level_rewards.double() * whole.response_mask).sum(-1)
        unwhitened = replace(whole, whiten=not needs.whitens, batch_scores=scores)
        expected = estimator(unwhitened)
        for group in sorted(set(whole.group_ids.tolist())):
            rows = whole.group_ids == group
            longest = int((whole.response_mask[rows] != 0).nonzero()[:, 1].max()) + 1
            arguments = {
                name: column[rows][:, :longest] if column.dim() > 1 else column[rows]
                for name, column in whole.columns.items()
            }
            part = replace(
                unwhitened,
                token_level_rewards=whole.token_level_rewards[rows][:, :longest],
                response_mask=whole.response_mask[rows][:, :longest],
                group_ids=torch.zeros(int(rows.sum()), dtype=torch.int64),
                columns=arguments,
            )
            result = estimator(part)
            for name in _OUTPUTS:
                left, right = getattr(result, name), getattr(expected, name)[rows][:, :longest]
                same = torch.allclose(left, right, rtol=1e-6, atol=1e-6)
                assert same, f"{name} of a group depend on other groups, though the estimator declares by_group"

    def inputs(self, estimator: AdvantageEstimator, seed: int = 0) -> AdvantageInputs:
        """Build inputs of three prompts with two samples each: ragged responses, one with a gap, one full."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([7, 3, 5, 1, 6, 2])
        mask = (torch.arange(7) < lengths.unsqueeze(-1)).long()
        mask[2, 1:3] = 0  # a tool's answer inside a response
        columns: dict[str, Tensor] = {}
        for name in sorted(needs_of(estimator).columns):
            columns |= self._draw(name, generator)
        return AdvantageInputs(
            token_level_rewards=torch.randn(6, 7, generator=generator) * mask,
            response_mask=mask,
            group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
            gamma=0.9,
            lam=0.8,
            options=copy.deepcopy(dict(self.options)),
            columns=columns,
        )

    def _draw(self, name: str, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw a column for the suite's inputs, or two columns for a prefix, by name."""
        if name.endswith("/"):
            return {name + part: torch.randn(6, generator=generator) for part in ("accuracy", "format")}
        draw = self.columns.get(name, _DRAWS.get(name))
        return {name: torch.randn(6, 7, generator=generator) if draw is None else draw(generator)}

    def test_agrees_with_its_examples(self, estimator: AdvantageEstimator) -> None:
        if not self.examples:
            pytest.skip("the suite has no examples")
        for number, (inputs, worked_out) in enumerate(self.examples):
            out = estimator(inputs)
            expected = AdvantageOutputs(torch.tensor(worked_out), out.returns)
            self._require_close(out, expected, f"example {number} gives what was worked out by hand")

    def test_gives_float32_of_the_masks_shape(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        out = estimator(inputs)
        require(isinstance(out, AdvantageOutputs), f"gives AdvantageOutputs, not {type(out).__name__}")
        for name, tensor in _outputs(out).items():
            require(tensor.shape == inputs.response_mask.shape, f"{name} has the mask's shape, not {tensor.shape}")
            require(tensor.dtype == torch.float32, f"{name} are float32, not {tensor.dtype}")
            require(not tensor.requires_grad, f"{name} carry no gradient")

    def test_gives_finite_numbers(self, estimator: AdvantageEstimator) -> None:
        _require_finite(estimator(self.inputs(estimator)), "on ordinary inputs")

    def test_is_zero_under_the_mask(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        for name, tensor in _outputs(estimator(inputs)).items():
            require(bool((tensor[inputs.response_mask == 0] == 0).all()), f"{name} are zero where the mask is zero")

    def test_ignores_what_is_under_the_mask(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        expected = estimator(inputs)
        for garbage in (1e30, float("inf"), float("nan")):
            dirty = _fill_masked(inputs, garbage)
            self._require_close(estimator(dirty), expected, f"{garbage} under the mask changes nothing")

    def test_ignores_right_padding(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        out = estimator(_map_tokens(inputs, lambda tensor: torch.nn.functional.pad(tensor, (0, 5))))
        width = inputs.response_mask.shape[1]
        cut = AdvantageOutputs(out.advantages[:, :width], out.returns[:, :width])
        self._require_close(cut, estimator(inputs), "further padding on the right changes nothing")

    def test_ignores_the_masks_dtype(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        expected = estimator(inputs)
        for dtype in (torch.bool, torch.float32):
            other = replace(inputs, response_mask=inputs.response_mask.to(dtype))
            self._require_close(estimator(other), expected, f"a {dtype} mask means the same as an int64 one")

    def test_takes_other_dtypes(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            other = _map_floats(inputs, dtype)
            out = estimator(other)
            for name, tensor in _outputs(out).items():
                require(tensor.dtype == torch.float32, f"{name} are float32 for {dtype}, not {tensor.dtype}")
            expected, wide = _outputs(out), _outputs(estimator(_map_floats(other, torch.float32)))
            for name in _OUTPUTS:
                close = torch.allclose(expected[name], wide[name], rtol=0.05, atol=0.05)
                require(close, f"{name} for {dtype} are those of the same numbers in float32")

    def test_follows_a_permutation_of_rows(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        order = torch.tensor([4, 0, 3, 5, 1, 2])
        out = estimator(_take_rows(inputs, order))
        expected = estimator(inputs)
        moved = AdvantageOutputs(expected.advantages[order], expected.returns[order])
        self._require_close(out, moved, "permuted rows give permuted results")

    def test_ignores_the_order_of_group_ids(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        renamed = replace(inputs, group_ids=torch.tensor([2, 0, 1])[inputs.group_ids])
        self._require_close(estimator(renamed), estimator(inputs), "a group's number means nothing")

    def test_does_not_mix_groups(self, estimator: AdvantageEstimator) -> None:
        # What makes the advantages the same however many prompts are in a batch, on however many ranks.
        if self.mixes_groups:
            pytest.skip("mixes_groups is True")
        inputs = self.inputs(estimator)
        whole = estimator(inputs)
        for group in range(int(inputs.group_ids.max()) + 1):
            rows = (inputs.group_ids == group).nonzero().squeeze(-1)
            alone = replace(_take_rows(inputs, rows), group_ids=torch.zeros_like(rows))
            expected = AdvantageOutputs(whole.advantages[rows], whole.returns[rows])
            self._require_close(estimator(alone), expected, "a group alone gives what it gives in a batch")

    def test_is_deterministic(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        first, second = _outputs(estimator(inputs)), _outputs(estimator(inputs))
        require(all(torch.equal(first[name], second[name]) for name in _OUTPUTS), "the same inputs give the same bits")

    def test_leaves_its_inputs_alone(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        before = copy.deepcopy(inputs)
        estimator(inputs)
        for item in fields(AdvantageInputs):
            require(
                _same(getattr(before, item.name), getattr(inputs, item.name)), f"inputs.{item.name} is not modified"
            )

    def test_is_finite_for_constant_rewards(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        for reward in self.constant_rewards:
            constant = torch.full_like(inputs.token_level_rewards, reward) * inputs.response_mask
            _require_finite(
                estimator(replace(inputs, token_level_rewards=constant)), f"for the reward {reward} everywhere"
            )

    def test_a_rounding_error_is_no_difference(self, estimator: AdvantageEstimator) -> None:
        """Check that scores that differ in the last bit of float32 have nearly the advantages of equal scores.

        An estimator that divides by a spread as small as a rounding error trains on the error. The bound leaves room
        for GRPO's 1e-6 in the denominator.
        """
        inputs = self.inputs(estimator)
        last = inputs.response_mask.cumsum(-1).argmax(-1, keepdim=True)
        equal = torch.full((len(last), 1), 0.6)
        rounded = torch.where(torch.arange(len(last)).unsqueeze(-1) % 2 == 0, equal, equal.nextafter(torch.ones(1)))
        empty = torch.zeros_like(inputs.token_level_rewards)
        actual, expected = (
            _outputs(estimator(replace(inputs, token_level_rewards=empty.scatter(1, last, scores))))["advantages"]
            for scores in (rounded, equal)
        )
        most = float((actual - expected).detach().abs().max())
        require(most < 0.1, f"the last bit of a reward changes advantages by less than 0.1, not by {most:g}")

    def test_takes_groups_of_one_row(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        alone = replace(inputs, group_ids=torch.arange(len(inputs.group_ids)))
        if self.single_row_groups:
            _require_finite(estimator(alone), "for groups of one row")
        else:
            with pytest.raises(ValueError, match="group"):
                estimator(alone)

    def test_takes_rows_without_tokens(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        mask = inputs.response_mask.clone()
        mask[1] = 0
        for name, empty in (("one row", mask), ("any row", torch.zeros_like(mask))):
            out = estimator(replace(inputs, response_mask=empty))
            _require_finite(out, f"with no token in {name}")
            for tensor in _outputs(out).values():
                require(bool((tensor[empty == 0] == 0).all()), f"with no token in {name}, zero where the mask is zero")

    def test_takes_an_empty_batch(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        empty = _take_rows(inputs, torch.arange(0))
        for name, tensor in _outputs(estimator(empty)).items():
            require(tensor.shape == empty.response_mask.shape, f"{name} of no rows are {empty.response_mask.shape}")

    def test_says_honestly_which_columns_it_needs(self, estimator: AdvantageEstimator) -> None:
        for name in sorted(needs_of(estimator).columns):
            one, other, without = self._variants(estimator, name)
            law = f"declared with needs={{{name!r}}}, so {name} changes something"
            require(not self._close(estimator(one), estimator(other)), law)
            with pytest.raises(ValueError, match=re.escape(name)):
                estimator(without)

    def test_says_honestly_which_columns_it_can_do_without(self, estimator: AdvantageEstimator) -> None:
        for name in sorted(needs_of(estimator).optional):
            one, other, without = self._variants(estimator, name)
            _require_finite(estimator(without), f"without the optional column {name}")
            law = f"declared with optional={{{name!r}}}, so {name} changes something"
            require(not self._close(estimator(one), estimator(other)), law)

    def test_reads_no_column_that_it_does_not_declare(self, estimator: AdvantageEstimator) -> None:
        needs = needs_of(estimator)
        for name in (*_DRAWS, REWARD_COMPONENT):
            if name not in needs.columns | needs.optional:
                one, _, without = self._variants(estimator, name)
                law = f"declared without {name}, so {name} changes nothing"
                self._require_close(estimator(one), estimator(without), law)

    def test_says_honestly_whether_it_compares_samples(self, estimator: AdvantageEstimator) -> None:
        inputs = self.inputs(estimator)
        regrouped = replace(inputs, group_ids=torch.tensor([0, 1, 2, 0, 1, 2]))
        if needs_of(estimator).compares_samples:
            changed = not self._close(estimator(regrouped), estimator(inputs))
            require(changed, "declared with compares_samples, so another grouping changes something")
        else:
            law = "declared without compares_samples, so group_ids change nothing"
            self._require_close(estimator(regrouped), estimator(inputs), law)

    def _variants(self, estimator: AdvantageEstimator, name: str) -> tuple[AdvantageInputs, ...]:
        """Return the suite's inputs with one column drawn in two ways, and without it."""
        inputs = self.inputs(estimator)
        one, other = (inputs.with_columns(self._draw(name, _seeded(seed))) for seed in (1, 2))
        remaining = {key: column for key, column in inputs.columns.items() if not _is_named(key, name)}
        return one, other, replace(inputs, columns=remaining)

    def _close(self, actual: AdvantageOutputs, expected: AdvantageOutputs) -> bool:
        pairs = [(_outputs(actual)[name], _outputs(expected)[name]) for name in _OUTPUTS]
        return all(torch.allclose(one, other, rtol=self.rtol, atol=self.atol) for one, other in pairs)

    def _require_close(self, actual: AdvantageOutputs, expected: AdvantageOutputs, law: str) -> None:
        __tracebackhide__ = True
        for name in _OUTPUTS:
            torch.testing.assert_close(
                _outputs(actual)[name],
                _outputs(expected)[name],
                rtol=self.rtol,
                atol=self.atol,
                check_dtype=False,
                msg=lambda text, name=name: f"failed check: {law}; {name} differ.\n{text}",  # type: ignore[misc]
            )


def _require_finite(out: AdvantageOutputs, when: str) -> None:
    __tracebackhide__ = True
    for name, tensor in _outputs(out).items():
        require(bool(tensor.isfinite().all()), f"{name} are finite {when}")


def _outputs(out: AdvantageOutputs) -> dict[str, Tensor]:
    return {"advantages": out.advantages, "returns": out.returns}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _is_named(column: str, name: str) -> bool:
    return column.startswith(name) if name.endswith("/") else column == name


#: Generators of the contract's columns that are not drawn from a normal distribution, for the suite's inputs.
_DRAWS: Mapping[str, Callable[[torch.Generator], Tensor]] = {
    "values": lambda generator: torch.randn(6, 7, generator=generator),
    "old_log_probs": lambda generator: -2 * torch.rand(6, 7, generator=generator) - 0.1,
    "ref_log_prob": lambda generator: -2 * torch.rand(6, 7, generator=generator) - 0.1,
    "sum_pi_squared": lambda generator: 0.8 + 0.2 * torch.rand(6, 7, generator=generator),
    "rollout_is_weights": lambda generator: 0.5 + torch.rand(6, 7, generator=generator),
    "reward_baselines": lambda generator: torch.randn(6, generator=generator),
    "turn_ids": lambda generator: torch.randint(0, 2, (6, 7), generator=generator).cumsum(-1).int(),
    "anchor_ids": lambda generator: torch.randint(0, 2, (6, 7), generator=generator),
}


def _map(
    inputs: AdvantageInputs, change: Callable[[Tensor], Tensor], chosen: Callable[[str, Tensor], bool]
) -> AdvantageInputs:
    """Return ``inputs`` with ``change`` applied to the tensors that ``chosen`` accepts by name and value."""
    own = {name: getattr(inputs, name) for name in _TENSORS}
    changed: dict[str, Any] = {name: change(tensor) for name, tensor in own.items() if chosen(name, tensor)}
    columns = {name: change(column) if chosen(name, column) else column for name, column in inputs.columns.items()}
    return replace(inputs, columns=columns, **changed)


def _map_tokens(inputs: AdvantageInputs, change: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    """Return ``inputs`` with ``change`` applied to every ``[B, T]`` tensor."""
    shape = inputs.response_mask.shape
    return _map(inputs, change, lambda _, tensor: tensor.shape[:2] == shape)


def _take_rows(inputs: AdvantageInputs, rows: Tensor) -> AdvantageInputs:
    """Return the rows with these indices."""
    return _map(inputs, lambda tensor: tensor[rows], lambda *_: True)


def _map_floats(inputs: AdvantageInputs, dtype: torch.dtype) -> AdvantageInputs:
    """Return ``inputs`` with every float tensor in ``dtype``."""
    return _map(inputs, lambda tensor: tensor.to(dtype), lambda _, tensor: tensor.is_floating_point())


def _fill_masked(inputs: AdvantageInputs, garbage: float) -> AdvantageInputs:
    hidden = inputs.response_mask == 0

    def is_hidden(name: str, tensor: Tensor) -> bool:
        return name != "response_mask" and tensor.shape == hidden.shape and tensor.is_floating_point()

    return _map(inputs, lambda tensor: tensor.masked_fill(hidden, garbage), is_hidden)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        return torch.equal(old, new)
    if isinstance(old, Mapping):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    return bool(old == new)
