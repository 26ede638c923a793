"""The stage that estimates advantages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rollcast.contracts.algorithm import (
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
    advantages,
    check_columns,
    check_options,
    check_type,
    needs_of,
)
from rollcast.contracts.engine import engines
from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.advantages import WHITEN_EPSILON
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.batch.mini_batches import without_advantage
from rollcast_trainer.batch.rollouts import FINAL, ROLLOUT, JoinedRollouts, rollouts_of
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import TrainingStage
from rollcast_trainer.stages.policy_gap import correction_of

__all__ = ["Advantage", "estimate_advantages", "estimate_rollout_advantages"]

#: Padded positions per chunk that an estimator receives; a smaller batch is one chunk.
CHUNK_TOKENS = 1 << 16

#: Columns that identify the rows of a rollout and their order.
_ROLLOUT = (ROLLOUT, FINAL, "turn_ids")

#: Columns that only some engines can compute: column → config section of the role, and the capability.
_CAPABILITIES = {"sum_pi_squared": ("actor", "sum_pi_squared"), "values": ("critic", "value_model")}


class Advantage(TrainingStage):
    """Stage that writes ``advantages`` and ``returns``, jagged float32, with the estimator
    ``algorithm.adv_estimator``.
    """

    phase: ClassVar[str] = "advantage"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        algorithm: AlgorithmConfig = settings.section("algorithm", AlgorithmConfig)
        name = algorithm.adv_estimator
        estimator = advantages.get(name)
        needs = needs_of(estimator)
        if needs.compares_samples and settings.rollout.n < 2:
            raise ConfigError(
                f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, "
                f"but rollout.n is {settings.rollout.n}; set rollout.n to 2 or more"
            )
        for column, (section, capability) in _CAPABILITIES.items():
            engine = settings.role_engine(section).name
            if column in needs.columns and not getattr(engines.get(engine).capabilities, capability):
                raise CapabilityError(
                    f"algorithm.adv_estimator={name} needs {column}, which {section}.engine.name={engine} lacks"
                )
        check_options(estimator, algorithm.adv_kwargs, "algorithm.adv_kwargs")
        weights = ["rollout_is_weights"] if correction_of(settings).rollout_is is not None else []
        return StageSpec(
            reads=("token_level_rewards", "response_mask", "uid", *sorted(needs.columns), *weights),
            optional=("old_log_probs", *_ROLLOUT, *sorted(needs.optional)),
            writes=("advantages", "returns"),
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._algorithm: AlgorithmConfig = run.section("algorithm", AlgorithmConfig)
        self._estimator = advantages.get(self._algorithm.adv_estimator)

    def __call__(self, batch: DataProto) -> DataProto:
        values = [name for name in ("values",) if name in batch]
        names = needs_of(self._estimator).select(dict.fromkeys(batch.keys()))
        rollouts = [name for name in ("uid", ROLLOUT, "turn_ids", FINAL) if name in batch]
        read = batch.local(dict.fromkeys(["token_level_rewards", "response_mask", *names, *values, *rollouts]))
        advantages, returns = estimate_rollout_advantages(self._estimator, read, self._algorithm)
        result = batch.with_columns({"advantages": advantages, "returns": returns})
        self.run.record({"actor/zero_advantage_rows": float(without_advantage(result).float().mean())})
        if values:
            inside = Jagged.of(read["response_mask"]).values.bool()
            targets = returns.values[inside]
            left = (targets - Jagged.of(read["values"]).values[inside]).var()
            self.run.record({"critic/explained_variance": float(1 - left / targets.var().clamp(min=1e-8))})
        self.run.emit_batch(self.run.hook.on_batch_after_advantage, result)
        return result


def estimate_rollout_advantages(
    estimator: AdvantageEstimator, batch: DataProto, algorithm: AlgorithmConfig, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Jagged, Jagged]:
    """Return ``advantages`` and ``returns`` of a batch in which rollouts may have several rows.

    The estimator receives one row per rollout, so that baselines, lengths and discounts refer to whole rollouts.

    Args:
        batch: ``uid``, ``rollout_index`` if rollouts have several rows, and the columns of :func:`estimate_advantages`.
        algorithm, chunk_tokens: see :func:`estimate_advantages`.
    """
    names = ["token_level_rewards", "response_mask", *needs_of(estimator).select(dict.fromkeys(batch.keys()))]
    columns = {name: batch[name] for name in dict.fromkeys(names)}
    rollouts = rollouts_of(batch)
    if rollouts is None:
        return estimate_advantages(estimator, columns, batch["uid"], algorithm, chunk_tokens)
    mask = Jagged.of(batch["response_mask"], "response_mask")
    turns = Jagged.of(batch["turn_ids"], "turn_ids") if "turn_ids" in batch else None
    final = batch[FINAL] if FINAL in batch else None  # noqa: SIM401 - a batch has no get with a default
    joined = JoinedRollouts.of(rollouts, mask, turns, final)
    columns = {name: joined.join(column) for name, column in columns.items()}
    result = estimate_advantages(estimator, columns, joined.join(batch["uid"]), algorithm, chunk_tokens)
    return joined.split(result[0], mask), joined.split(result[1], mask)


def estimate_advantages(
    estimator: AdvantageEstimator,
    columns: Mapping[str, torch.Tensor],
    group_ids: torch.Tensor,
    algorithm: AlgorithmConfig,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Jagged, Jagged]:
    """Return ``advantages`` and ``returns`` of a batch, in the row layout of ``response_mask``.

    An estimator that declares ``by_group`` receives whole groups of at most ``chunk_tokens`` padded positions at a
    time, or a single larger group; whitening then covers the whole batch and equals the estimator's own up to rounding.
    A row without any masked-in token, such as a failed rollout that was kept, does not enter the baseline of its group.

    Args:
        columns: ``token_level_rewards``, ``response_mask`` and the columns that the estimator declares; jagged or
            ``[B]``.
        group_ids: group of each row, int64 ``[B]``.
        algorithm: discounts and options.
        chunk_tokens: padded positions per chunk.
    """
    needs = needs_of(estimator)
    mask = Jagged.of(columns["response_mask"], "response_mask")
    rows = (mask.sums() > 0).nonzero().flatten()
    if 0 < len(rows) < len(group_ids):
        chosen = {name: _rows_of(column, rows) for name, column in columns.items()}
        some = estimate_advantages(estimator, chosen, group_ids[rows], algorithm, chunk_tokens)
        places = mask.positions(rows).values
        wide = [torch.zeros(len(mask.values)).index_copy_(0, places, column.values) for column in some]
        return mask.with_values(wide[0]), mask.with_values(wide[1])
    whitens_here = needs.by_group and needs.whitens
    order, bounds = _chunks(group_ids, mask.lengths, chunk_tokens if needs.by_group else None)
    flat = {name: Jagged.of(column) for name, column in columns.items() if column.layout == torch.jagged}
    rewards = Jagged.of(columns["token_level_rewards"]).values.double().masked_fill(mask.values.logical_not(), 0.0)
    scores = mask.with_values(rewards).sums() if len(bounds) > 2 else None
    estimates: list[torch.Tensor] = []
    total = square = 0.0
    for start, stop in itertools.pairwise(bounds):
        rows = order[start:stop]
        picked = mask.positions(rows)
        cut = {name: picked.with_values(column.values[picked.values]).pad() for name, column in flat.items()}
        part = {name: column[rows] for name, column in columns.items() if name not in flat} | cut
        output: Any = estimator(
            AdvantageInputs(
                token_level_rewards=cut["token_level_rewards"],
                response_mask=cut["response_mask"].long(),
                group_ids=torch.unique(group_ids[rows], return_inverse=True)[1],
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                options=algorithm.adv_kwargs,
                columns=needs.select(part),
                whiten=not whitens_here,
                batch_scores=scores,
            )
        )
        check_type(estimator, output, AdvantageOutputs)
        returned = {"advantages": output.advantages, "returns": output.returns}
        check_columns(estimator, returned, cut["response_mask"])
        # Most outcome estimators return the same tensor for advantages and returns; it is then whitened once for both.
        parts = (output.advantages,) if output.returns is output.advantages else (output.advantages, output.returns)
        estimates = estimates or [torch.zeros(len(mask.values)) for _ in parts]
        for target, padded in zip(estimates, parts, strict=True):
            target[picked.values] = padded[picked.rows, picked.places]
        if whitens_here:
            total += float(output.advantages.sum(dtype=torch.float64))
            square += float(output.advantages.double().square_().sum())
    if whitens_here and estimates:
        _whiten(estimates[0], mask.values, total, square)
    estimates = estimates or [torch.zeros(0)]
    return mask.with_values(estimates[0]), mask.with_values(estimates[-1])


def _rows_of(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return Jagged.of(column).take(rows).column() if column.layout == torch.jagged else column[rows]


def _whiten(values: torch.Tensor, mask: torch.Tensor, total: float, square: float) -> None:
    """Scale the masked-in values to mean 0 and sample variance 1 in place; the others become 0.

    Args:
        total, square: sum of the values, and sum of their squares.
    """
    count = int(mask.count_nonzero())
    mean = total / max(count, 1)
    variance = max(square - count * mean * mean, 0.0) / max(count - 1, 1)
    # logical_not, because comparing bools with a number takes eight bytes per element.
    values.sub_(mean).mul_((variance + WHITEN_EPSILON) ** -0.5).masked_fill_(mask.logical_not(), 0.0)


def _chunks(groups: torch.Tensor, lengths: torch.Tensor, limit: int | None) -> tuple[torch.Tensor, list[int]]:
    """Return an order of the rows in which groups are contiguous, and the chunk bounds in it."""
    if limit is None or not len(groups):
        return torch.arange(len(groups)), [0, len(groups)]
    order = groups.argsort(stable=True)
    sizes = groups.bincount()
    sizes = sizes[sizes > 0]
    widest = torch.zeros(len(sizes), dtype=torch.int64)
    places = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    widest.scatter_reduce_(0, places, lengths[order], "amax")
    bounds, rows, width = [0], 0, 0
    for size, wide in zip(sizes.tolist(), widest.tolist(), strict=True):
        width = max(width, wide)
        if rows and (rows + size) * width > limit:
            bounds.append(bounds[-1] + rows)
            rows, width = 0, wide
        rows += size
    return order, [*bounds, bounds[-1] + rows]
