"""Conversion of generated rows to samples, and of samples to scores."""

from __future__ import annotations

import bisect
import logging
import math
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import torch

from rollcast.contracts.reward import (
    MAX_REWARD,
    BaseReward,
    BaseRewardManager,
    Judge,
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward,
    build_reward_manager,
    finite_number,
)
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_rewards.policy import Failure, Outcomes, reward_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollcast_rewards.schemas import RewardConfig

__all__ = ["GeneratedSamples", "RewardScorer", "RewardSetup", "RolloutRows", "Scored", "summarize"]

logger = logging.getLogger(__name__)

#: Object column with results that are already known.
RESULTS = "reward_results"
#: Columns of a generated batch from which samples are built.
_READ = (
    *("prompts", "responses", "response_mask", "finished", "turn_ids"),
    *("ground_truth", "data_source", "extra_info", "messages", "raw_prompt"),
)
#: Key of ``meta_info`` with the completed steps and all steps of the run.
_PROGRESS = "reward_progress"
#: Names in the rows of ``samples.jsonl``, besides those that rewards add.
_ROW = ("prompt", "response", "ground_truth", "data_source", "finished", "score", "correct", "error", "index", "sample")
#: Columns of rollouts that environments may have scored.
_OF_ROLLOUTS = (
    *("rollout_index", "is_final", "is_scored"),
    *("environment_scores", "rollout_failed", "reward_components", "reward_error"),
)


class Scored:
    """The results of a batch, in row order.

    A rollout of several rows counts once in metrics and in :meth:`as_rows`, by its final row.

    Args:
        samples: scored samples.
        results: one result per sample.
        max_score: score of a correct answer, for results that do not say whether the answer is correct.
        rollouts: rows that belong to one rollout; None if each row is a rollout.
    """

    def __init__(
        self,
        samples: Sequence[RewardSample],
        results: Sequence[RewardResult],
        max_score: float,
        rollouts: RolloutRows | None = None,
    ) -> None:
        self.samples = samples
        self.results = results
        self.scores = torch.tensor([result.score for result in results], dtype=torch.float32)
        self._rollouts = rollouts or RolloutRows(torch.arange(len(results)), torch.ones(len(results), dtype=torch.bool))
        totals = self.rollout_scores.tolist()
        correct = torch.tensor(
            [
                total >= max_score if result.correct is None else bool(result.correct)
                for result, total in zip(results, totals, strict=True)
            ],
            dtype=torch.bool,
        )
        #: True for rows of a rollout with a correct answer.
        self.correct: list[bool] = self._rollouts.of_final(correct).tolist()

        #: Weight of the results in ``scores``, if something was added to them (a reward model's score).
        self.rule_weight = 1.0
        #: Rows (bool ``[B]``) that stay in the batch.
        self.kept = self._rollouts.of_final(torch.tensor([not result.dropped for result in results], dtype=torch.bool))

    @property
    def rollout_scores(self) -> torch.Tensor:
        """Sum of the scores of each row's rollout, float32 ``[B]``."""
        return self._rollouts.sums(self.scores)

    def of_rollouts(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of the final row of each row's rollout, ``[B]``."""
        return self._rollouts.of_final(values)

    def of_any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return True for each row of a rollout with a True row, bool ``[B]``."""
        return self._rollouts.sums(flags.int()) > 0

    @property
    def final(self) -> torch.Tensor:
        """Mask of the final row of each rollout, bool ``[B]``."""
        return self._rollouts.final

    @property
    def accuracy(self) -> float:
        """Share of correct rollouts among the kept ones."""
        chosen = torch.tensor(self.correct, dtype=torch.bool)[self.kept & self.final]
        return float(chosen.float().mean()) if len(chosen) else 0.0

    def token_level_scores(self, response_mask: Jagged) -> Jagged:
        """Return the scores at their tokens, float32, with the rows of the mask.

        Where a result has scores per token, they are placed at the tokens under the mask; the rest of a row's score
        is placed at its last token under the mask, or at its first token if none is. A row without tokens loses its
        score.
        """
        inside = response_mask.values.bool()
        scores = torch.zeros(len(inside), dtype=torch.float32)
        rest = self.scores.clone()
        for row, result in enumerate(self.results):
            if result.token_scores is not None:
                start, stop = response_mask.offsets[row : row + 2].tolist()
                placed = self.rule_weight * torch.tensor(result.token_scores, dtype=torch.float32)
                scores[start:stop][inside[start:stop]] = placed
                rest[row] -= placed.sum()
        last = response_mask.offsets[:-1].clone()
        chosen = inside.nonzero().squeeze(-1)
        last.scatter_reduce_(0, response_mask.rows[chosen], chosen, "amax")
        present = response_mask.lengths > 0
        scores[last[present]] += rest[present]
        return response_mask.with_values(scores)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return mean, largest and smallest score, the mean of every extra number, and the number of bad samples."""
        counted = self.kept & self.final
        scores = self.rollout_scores[counted]
        if not len(scores):
            return {}
        values = {
            f"{prefix}/mean": float(scores.mean()),
            f"{prefix}/max": float(scores.max()),
            f"{prefix}/min": float(scores.min()),
            f"{prefix}/errors": float(sum(bool(result.error) for result in self.results)),
        }
        for name in sorted({name for result in self.results for name in result.extra}):
            present = [value for result in self.results if (value := result.extra.get(name)) is not None]
            if present:
                values[f"{prefix}/{name}"] = sum(present) / len(present)
        return values

    def components(self) -> dict[str, torch.Tensor]:
        """Return the extra numbers of final rows: name → float32 ``[B]``; 0 on other rows.

        NaN marks a row whose result has no such number. A bad sample that counts as zero has the components 0.
        """
        final = [result for result, is_final in zip(self.results, self.final.tolist(), strict=True) if is_final]
        names = sorted({name for result in final for name in result.extra})
        columns = {
            name: torch.tensor([_component(result, name) for result in self.results], dtype=torch.float32)
            for name in names
        }
        return {name: torch.where(self.final, values, 0.0) for name, values in columns.items()}

    def as_rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``samples.jsonl``; a reward's column with a name of ours begins with ``column/``."""
        return [
            {
                **{name: value for name, value in result.columns.items() if name not in _ROW},
                **{f"column/{name}": value for name, value in result.columns.items() if name in _ROW},
                **result.extra,
                "prompt": sample.prompt,
                "response": sample.response,
                "ground_truth": sample.ground_truth,
                "data_source": sample.data_source,
                "finished": sample.finished,
                "score": total,
                "correct": bool(correct),
                **({"error": result.error} if result.error else {}),
            }
            for sample, result, correct, total, is_final in zip(
                self.samples, self.results, self.correct, self._totals(), self.final.tolist(), strict=True
            )
            if is_final
        ]

    def _totals(self) -> list[float]:
        """Return the score of each row's rollout; a rollout of one row keeps its result's own, in double precision."""
        if bool(self.final.all()):
            return [result.score for result in self.results]
        return list(self.rollout_scores.tolist())


def _component(result: RewardResult, name: str) -> float:
    value = result.extra.get(name)
    if value is None:
        return 0.0 if result.error and not result.dropped else math.nan
    return value


@dataclass(frozen=True)
class RolloutRows:
    """Rows that belong to one rollout.

    Attributes:
        index: rollout of each row, int64 ``[B]``.
        final: the row (bool ``[B]``) with the answer; one of each rollout.
    """

    index: torch.Tensor
    final: torch.Tensor

    @classmethod
    def of(cls, batch: DataProto) -> RolloutRows | None:
        """Read ``rollout_index`` and ``is_final``; None for a batch without them."""
        if "rollout_index" not in batch:
            return None
        return cls(batch["rollout_index"].unique(return_inverse=True)[1], batch["is_final"])

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row's rollout, ``[B]``."""
        count = int(self.index.max()) + 1 if len(self.index) else 0
        return torch.zeros(count, dtype=values.dtype).scatter_add_(0, self.index, values)[self.index]

    def of_final(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of the final row of each row's rollout, ``[B]``."""
        count = int(self.index.max()) + 1 if len(self.index) else 0
        column = torch.zeros(count, dtype=values.dtype)
        column[self.index[self.final]] = values[self.final]
        return column[self.index]


class GeneratedSamples(Sequence[RewardSample]):
    """The rows of a generated batch as samples, decoded on access.

    Args:
        batch: Jagged ``prompts``, ``responses`` and ``response_mask``, and jagged ``turn_ids`` if turns are known;
            ``finished`` bool ``[B]``; object columns ``ground_truth``, ``data_source``, ``extra_info`` and
            ``raw_prompt`` if there are any. With the object column ``messages``, the conversations, a sample's response
            is that of its last turn, and its ``extra_info`` has them as ``messages``.
        tokenizer: The model's.
    """

    def __init__(self, batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._prompts = _Ids.of(Jagged.of(batch["prompts"], "prompts"))
        responses, mask = Jagged.of(batch["responses"], "responses"), Jagged.of(batch["response_mask"], "response_mask")
        inside = mask.values.bool()
        chosen = Jagged.from_lengths(responses.values[inside], mask.with_values(inside).sums())
        self._responses = _Ids.of(chosen)
        self._turns: _Ids | None = None
        if "turn_ids" in batch:
            self._turns = _Ids.of(chosen.with_values(Jagged.of(batch["turn_ids"], "turn_ids").values[inside]))
        self._finished: list[bool] = batch["finished"].tolist()
        #: Cache of the last decoded prompt, because the samples of a prompt are adjacent.
        self._prompt: tuple[array[int], str] = (array("i"), "")
        columns = batch.non_tensor_batch
        self._truths, self._sources, self._extras, self._messages = (
            columns.get(name) for name in ("ground_truth", "data_source", "extra_info", "messages")
        )
        self._raw_prompts = columns.get("raw_prompt")
        self._step, self._total_steps = batch.meta_info.get(_PROGRESS, (0, 0))

    def __len__(self) -> int:
        return len(self._finished)

    @overload
    def __getitem__(self, index: int) -> RewardSample: ...

    @overload
    def __getitem__(self, index: slice) -> list[RewardSample]: ...

    def __getitem__(self, index: int | slice) -> RewardSample | list[RewardSample]:
        """Return a sample, or a list of them.

        Raises:
            IndexError: there is no such sample.
        """
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        ids = self._responses[row]
        turns: Sequence[int] = () if self._turns is None else self._turns[row]
        extra = {} if self._extras is None else self._extras[row] or {}
        answer = ids
        if self._messages is not None:
            extra = {**extra, "messages": self._messages[row]}
            answer = ids[bisect.bisect_left(turns, turns[-1]) :] if len(turns) else ids
        return RewardSample(
            prompt=self._prompt_text(row),
            response=self._text(answer),
            ground_truth=None if self._truths is None else self._truths[row],
            data_source="" if self._sources is None else self._sources[row] or "",
            finished=bool(self._finished[row]),
            response_ids=ids,
            extra_info=extra,
            turn_ids=turns,
            raw_prompt=None if self._raw_prompts is None else self._raw_prompts[row],
            step=self._step,
            total_steps=self._total_steps,
        )

    def _prompt_text(self, row: int) -> str:
        ids = self._prompts[row]
        if ids != self._prompt[0] or not ids:
            self._prompt = ids, self._text(ids)
        return self._prompt[1]

    def _text(self, ids: array[int]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))


@dataclass(frozen=True)
class _Ids:
    """Rows of integers, sliced from one flat array on access."""

    values: array[int]
    bounds: list[int]

    @classmethod
    def of(cls, column: Jagged) -> _Ids:
        return cls(array("i", column.values.to("cpu", torch.int32).numpy().tobytes()), column.offsets.tolist())

    def __getitem__(self, row: int) -> array[int]:
        return self.values[self.bounds[row] : self.bounds[row + 1]]


@dataclass(frozen=True)
class RewardSetup:
    """A reward and its manager with their options, from the config's ``reward`` section.

    Attributes:
        name, options: name and options of the reward.
        manager, manager_options: name and options of the reward manager.
        settings: treatment of bad samples, and limits.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    manager: str = "naive"
    manager_options: Mapping[str, Any] = field(default_factory=dict)
    settings: RewardSettings = field(default_factory=RewardSettings)

    @classmethod
    def of(cls, config: RewardConfig, max_response_length: int | None) -> RewardSetup:
        """Return the setup of a section, for responses of at most this many tokens."""
        settings = RewardSettings(config.on_error, config.max_bad_share, config.timeout_s, max_response_length)
        return cls(config.name, config.reward_kwargs, config.reward_manager, config.reward_manager_kwargs, settings)


class RewardScorer:
    """Scorer that decodes responses and applies the run's reward.

    Args:
        setup: reward and manager.
        tokenizer: tokenizer of the model.

    Raises:
        ConfigError: the reward or the manager has no such option, or the reward asks a judge and the manager cannot
            await it.
    """

    def __init__(self, setup: RewardSetup, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            self.reward: BaseReward = build_reward(setup.name, setup.options)
        except TypeError as error:
            raise ConfigError(f"reward.reward_kwargs do not fit reward {setup.name!r}: {error}") from error
        self._manager: BaseRewardManager = build_reward_manager(
            setup.manager, self.reward, setup.settings, setup.manager_options
        )
        if self.reward.uses_judge and not (self.reward.is_async and self._manager.is_concurrent):
            raise ConfigError(
                f"reward.name={setup.name} asks the judge, whose replies are awaited in this process: its score has to "
                f"be async, and reward.reward_manager={setup.manager} has to await it, as naive, batch and remote do"
            )
        self._settings = setup.settings
        self._tokenizer = tokenizer
        self._is_closed = False
        #: Managers have workers and state; rollouts that are scored as they end come from other threads.
        self._turn: AbstractContextManager[Any] = nullcontext() if self._manager.is_concurrent else threading.Lock()
        self._wait_for: Callable[[Callable[[], Sequence[RewardResult]]], Sequence[RewardResult]] = _call
        self._take_judge_metrics: Callable[[], dict[str, float]] = dict
        self._score_elsewhere: Callable[[DataProto], Sequence[RewardResult]] | None = None
        self._progress: Callable[[], tuple[int, int]] | None = None

    @property
    def uses_judge(self) -> bool:
        """True if the reward queries a judge, which :meth:`bind_judge` must set before the first sample."""
        return self.reward.uses_judge

    def bind_judge(
        self,
        judge: Judge,
        wait_for: Callable[[Callable[[], Sequence[RewardResult]]], Sequence[RewardResult]],
        take_metrics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Set the run's judge.

        Args:
            judge: judge whose replicas are started.
            wait_for: function that runs a call in another thread and returns its result; used by :meth:`score`, so
                that the trainer's thread can restart replicas of the judge meanwhile.
            take_metrics: function that returns the judge's metrics since the last call.
        """
        self.reward.bind_judge(judge)
        self._wait_for, self._take_judge_metrics = wait_for, take_metrics

    def score_by(self, score_elsewhere: Callable[[DataProto], Sequence[RewardResult]]) -> None:
        """Delegate the scoring of rows to a function from now on.

        Args:
            score_elsewhere: function that returns a result for each row of the columns from which samples are built;
                several threads may call it at once.
        """
        self._score_elsewhere = score_elsewhere

    def follow(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Pass the progress of a training run to samples.

        Args:
            progress: function that returns the numbers of completed steps and of all steps.
        """
        self._progress = progress

    def take_metrics(self) -> dict[str, float]:
        """Return the judge's metrics since the last call; empty without a judge."""
        return self._take_judge_metrics()

    def score(self, batch: DataProto, model_scores: torch.Tensor | None = None, rule_weight: float = 1.0) -> Scored:
        """Score every rollout of a generated batch that :meth:`scored` has not scored yet.

        Args:
            batch: generated rows.
            model_scores: further score of each row, ``[B]``, which is added.
            rule_weight: weight of the reward's own scores in the sum.

        Raises:
            RewardError: a sample is bad, and the settings do not allow it.
        """
        rows = self._local(batch)
        samples = GeneratedSamples(rows, self._tokenizer)
        results: Sequence[RewardResult]
        if RESULTS in batch:
            # Read only this column, so that columns on workers stay there.
            results = list(batch.local([RESULTS]).non_tensor_batch[RESULTS])
        else:
            results = self._wait_for(lambda: self._checked(rows, samples, self._results(rows, samples)))
        if model_scores is None:
            return Scored(samples, results, self.reward.max_score, RolloutRows.of(rows))
        problems = {
            row: problem
            for row, score in enumerate(model_scores.tolist())
            if (problem := _problem("the reward model's score", RewardResult(score)))
        }
        checked = self._with_bad(rows, samples, results, problems)
        scored = Scored(samples, checked, self.reward.max_score, RolloutRows.of(rows))
        bad = scored.of_any(torch.tensor([bool(result.error) for result in checked], dtype=torch.bool))
        scored.rule_weight = rule_weight
        scored.scores = (model_scores + rule_weight * scored.scores).masked_fill(bad, 0.0)
        return scored

    def scored(self, batch: DataProto) -> DataProto:
        """Score the rows and return the batch with the results, so that :meth:`score` does not compute them again.

        Several threads may call it at once; they take turns unless the reward is asynchronous.
        """
        rows = self._local(batch)
        samples = GeneratedSamples(rows, self._tokenizer)
        return batch.with_columns({RESULTS: list(self._checked(rows, samples, self._results(rows, samples)))})

    def _local(self, batch: DataProto) -> DataProto:
        """Fetch the columns of a batch that are needed for results, and add the run's progress."""
        rows = batch.local([name for name in (*_READ, *_OF_ROLLOUTS) if name in batch])
        if self._progress is not None:
            rows.meta_info[_PROGRESS] = self._progress()
        return rows

    def _results(self, batch: DataProto, samples: Sequence[RewardSample]) -> Sequence[RewardResult]:
        """Return a result for each row.

        Where rows have ``rollout_index``, the rewards in ``environment_scores`` stay at their tokens, and the reward's
        score of the final row is added for rollouts that no environment has scored (``is_scored``). A failed rollout
        (``rollout_failed``) has the score 0.

        Raises:
            RewardError: the reward failed on a sample, and the settings do not allow it.
        """
        if self._score_elsewhere is not None:
            return self._score_elsewhere(batch)
        rollouts = RolloutRows.of(batch)
        if rollouts is None:
            return self._scores_of(samples)
        scored = batch["is_scored"].bool()
        results, answered = _given_results(batch), rollouts.final & scored.logical_not()
        if bool(scored.any()):
            # An environment that scores had no turn to do so; the reward function is not meant for its rollouts.
            answered &= batch["finished"].bool()
        if "rollout_failed" in batch:
            answered &= batch["rollout_failed"].logical_not()
        rows = answered.nonzero().flatten().tolist()
        for row, result in zip(rows, self._scores_of([samples[row] for row in rows]), strict=True):
            results[row] = result if result.error else _with_rewards(result, results[row], self.reward.max_score)
        return results

    def _checked(
        self, batch: DataProto, samples: Sequence[RewardSample], results: Sequence[RewardResult]
    ) -> Sequence[RewardResult]:
        """Return the results with every number finite; every score that enters training passes here.

        A rollout is bad if a number of one of its rows is not finite or exceeds ``MAX_REWARD``, if its row in the
        object column ``reward_error`` says so, or if the reward failed on its final row. All rows of a bad rollout
        score 0.

        Raises:
            RewardError: a rollout is bad, and the settings do not allow it.
        """
        errors = batch.non_tensor_batch.get("reward_error", [""] * len(results))
        problems = {
            row: problem
            for row, (result, error) in enumerate(zip(results, errors, strict=True))
            if (problem := error or ("" if result.error else _problem("score", result)))
        }
        if any(result.error for result in results) and (rollouts := RolloutRows.of(batch)) is not None:
            failed = rollouts.sums(torch.tensor([bool(result.error) for result in results]).int()).tolist()
            results = [
                RewardResult(0.0, correct=False) if count and not result.error else result
                for result, count in zip(results, failed, strict=True)
            ]
        return self._with_bad(batch, samples, results, problems)

    def _with_bad(
        self,
        batch: DataProto,
        samples: Sequence[RewardSample],
        results: Sequence[RewardResult],
        problems: Mapping[int, str],
    ) -> Sequence[RewardResult]:
        """Return the results with the policy applied to the rollouts of the rows in ``problems``."""
        if not problems:
            return results
        rollouts = RolloutRows.of(batch)
        if rollouts is None:
            rollouts = RolloutRows(torch.arange(len(results)), torch.ones(len(results), dtype=torch.bool))
        index = rollouts.index.tolist()
        finals = {index[row]: row for row in rollouts.final.nonzero().flatten().tolist()}
        by_rollout: dict[int, str] = {}
        for row, problem in problems.items():
            by_rollout.setdefault(index[row], problem)
        heads = [finals.get(rollout, index.index(rollout)) for rollout in dict.fromkeys(index)]
        before = sum(bool(results[row].error) and index[row] not in by_rollout for row in heads)
        outcomes = Outcomes(reward_name(self.reward), [samples[row] for row in heads], self._settings, before)
        for place, row in enumerate(heads):
            found_problem = by_rollout.get(index[row])
            outcomes.add(place, results[row] if found_problem is None else Failure("value", found_problem))
        merged = [
            RewardResult(0.0, correct=False) if index[row] in by_rollout else entry for row, entry in enumerate(results)
        ]
        for row, result in zip(heads, outcomes.results(), strict=True):
            merged[row] = result
        return merged

    def _scores_of(self, samples: Sequence[RewardSample]) -> Sequence[RewardResult]:
        if not samples:
            return []
        with self._turn:
            return self._manager(samples)

    def close(self) -> None:
        """Release the manager's processes and threads, then what the reward holds; may be called again.

        A reward that fails here is reported and stops nothing: all samples are scored.
        """
        self._manager.close()
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.reward.close()
        except Exception as error:  # noqa: BLE001 -- a stranger's; the run is over and must not end with it
            logger.warning("reward %s: close failed: %s: %s", self.reward.name, type(error).__name__, error)


def _call(function: Callable[[], Sequence[RewardResult]]) -> Sequence[RewardResult]:
    return function()


def _problem(name: str, result: RewardResult) -> str:
    """Return the reason why a result cannot enter training; empty for a finite one."""
    try:
        finite_number(name, result.score)
        for label, value in result.extra.items():
            if value is not None:
                finite_number(label, value)
        for value in result.token_scores or ():
            if not abs(value) <= MAX_REWARD:
                finite_number("a token's score", value)
    except ValueError as problem:
        return str(problem)
    return ""


def _given_results(batch: DataProto) -> list[RewardResult]:
    """Return the rewards stored in the rows as results; those of a failed rollout are 0.

    Args:
        batch: Jagged ``environment_scores`` and ``response_mask``, and optionally ``rollout_failed`` bool ``[B]`` and
            the object column ``reward_components``.
    """
    mask, rewards = Jagged.of(batch["response_mask"]), Jagged.of(batch["environment_scores"])
    bounds = mask.offsets.tolist()
    failed = batch["rollout_failed"].tolist() if "rollout_failed" in batch else [False] * len(batch)
    components = batch.non_tensor_batch.get("reward_components", [{}] * len(batch))
    results = []
    for row, has_failed in enumerate(failed):
        if has_failed:
            results.append(RewardResult(0.0, correct=False))
            continue
        own = slice(bounds[row], bounds[row + 1])
        scores = rewards.values[own][mask.values[own].bool()].tolist()
        results.append(RewardResult(sum(scores), extra=components[row] or {}, token_scores=scores))
    return results


def _with_rewards(result: RewardResult, rollout_result: RewardResult, max_score: float) -> RewardResult:
    """Add the rewards that tools and environments assigned during the rollout to the reward function's result.

    The added rewards do not affect whether the answer counts as correct.
    """
    correct = result.score >= max_score if result.correct is None else result.correct
    rewards = rollout_result.token_scores or ()
    scores = result.token_scores if result.token_scores is not None else [0.0] * len(rewards)
    total = [one + other for one, other in zip(scores, rewards, strict=True)]
    extra = {**rollout_result.extra, **result.extra}
    return replace(result, score=result.score + rollout_result.score, correct=correct, token_scores=total, extra=extra)


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a validation from :meth:`Scored.as_rows`, also by source if there are several."""

    def mean(chosen: Sequence[Mapping[str, Any]], key: str) -> float:
        return sum(float(row[key]) for row in chosen) / max(len(chosen), 1)

    metrics = {
        "val/accuracy": mean(rows, "correct"),
        "val/reward": mean(rows, "score"),
        "val/samples": float(len(rows)),
    }
    sources = sorted({str(row["data_source"]) for row in rows})
    if len(sources) > 1:
        for source in sources:
            metrics[f"val/accuracy/{source}"] = mean([row for row in rows if row["data_source"] == source], "correct")
    return metrics
