"""From generated rows to samples, and from samples to scores."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward,
    build_reward_manager,
)
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["GeneratedSamples", "RewardScorer", "Scored", "summarize"]

#: Columns of a generated batch that samples are made of.
_READ = (
    *("prompts", "responses", "response_mask", "finished", "turn_ids"),
    *("ground_truth", "data_source", "extra_info"),
)


class Scored:
    """The results of a batch, in row order.

    Args:
        samples: what was scored.
        results: one a sample.
        max_score: the score of a correct answer, where a result does not say itself.
    """

    def __init__(self, samples: Sequence[RewardSample], results: Sequence[RewardResult], max_score: float) -> None:
        self.samples = samples
        self.results = results
        self.scores = torch.tensor([result.score for result in results], dtype=torch.float32)
        self.correct = [
            result.correct if result.correct is not None else result.score >= max_score for result in results
        ]

        #: Weight of the results in ``scores``, if something was added to them (a reward model's score).
        self.rule_weight = 1.0
        #: Rows (bool ``[B]``) that stay in the batch.
        self.kept = torch.tensor([not result.dropped for result in results], dtype=torch.bool)

    @property
    def accuracy(self) -> float:
        """Share of correct samples among those that are kept."""
        kept = [correct for correct, result in zip(self.correct, self.results, strict=True) if not result.dropped]
        return sum(kept) / max(len(kept), 1)

    def token_level_scores(self, response_mask: Jagged) -> Jagged:
        """Return the scores at their tokens, float32, with the rows of the mask.

        Where a result has scores per token, they stand at the tokens under the mask; the rest of a row's score stands
        at its last token under the mask, or at its first token if none is. A row without tokens keeps no score.
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
        """Mean, largest and smallest score and the mean of every extra number, and how many samples are bad."""
        scores = self.scores[self.kept]
        if not len(scores):
            return {}
        values = {
            f"{prefix}/mean": float(scores.mean()),
            f"{prefix}/max": float(scores.max()),
            f"{prefix}/min": float(scores.min()),
            f"{prefix}/errors": float(sum(bool(result.error) for result in self.results)),
        }
        for name in sorted({name for result in self.results for name in result.extra}):
            given = [result.extra[name] for result in self.results if name in result.extra]
            values[f"{prefix}/{name}"] = sum(given) / len(given)
        return values

    def components(self) -> dict[str, torch.Tensor]:
        """The extra numbers that every result has, float32 ``[B]`` each, by name."""
        names = set.intersection(*(set(result.extra) for result in self.results)) if self.results else set()
        return {
            name: torch.tensor([float(result.extra[name]) for result in self.results], dtype=torch.float32)
            for name in sorted(names)
        }

    def as_rows(self) -> list[dict[str, Any]]:
        """Samples for ``samples.jsonl``."""
        return [
            {
                **result.extra,
                "prompt": sample.prompt,
                "response": sample.response,
                "ground_truth": sample.ground_truth,
                "data_source": sample.data_source,
                "finished": sample.finished,
                "score": result.score,
                "correct": bool(correct),
                **({"error": result.error} if result.error else {}),
            }
            for sample, result, correct in zip(self.samples, self.results, self.correct, strict=True)
        ]


class GeneratedSamples(Sequence[RewardSample]):
    """The rows of a generated batch as samples, decoded when they are asked for.

    Args:
        batch: Jagged ``prompts``, ``responses`` and ``response_mask``, and jagged ``turn_ids`` if turns are known;
            ``finished`` bool ``[B]``; object columns ``ground_truth``, ``data_source`` and ``extra_info`` if there are
            any.
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
        #: The prompt that was decoded last; the samples of a prompt follow each other.
        self._prompt: tuple[array[int], str] = (array("i"), "")
        columns = batch.non_tensor_batch
        self._truths, self._sources, self._extras = (
            columns.get(name) for name in ("ground_truth", "data_source", "extra_info")
        )

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
        return RewardSample(
            prompt=self._prompt_text(row),
            response=self._text(ids),
            ground_truth=None if self._truths is None else self._truths[row],
            data_source="" if self._sources is None else self._sources[row] or "",
            finished=bool(self._finished[row]),
            response_ids=ids,
            extra_info={} if self._extras is None else self._extras[row] or {},
            turn_ids=() if self._turns is None else self._turns[row],
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
    """Rows of integers as arrays, cut out of one flat array when they are asked for."""

    values: array[int]
    bounds: list[int]

    @classmethod
    def of(cls, column: Jagged) -> _Ids:
        return cls(array("i", column.values.to("cpu", torch.int32).numpy().tobytes()), column.offsets.tolist())

    def __getitem__(self, row: int) -> array[int]:
        return self.values[self.bounds[row] : self.bounds[row + 1]]


class RewardScorer:
    """Decodes responses and applies the run's reward.

    Args:
        name, options: of the reward.
        manager: name of the reward manager.
        tokenizer: the model's.
        settings: what becomes of bad samples, and the limits; None for the contract's defaults.
        manager_options: of the manager.

    Raises:
        ConfigError: the reward or the manager does not take these options.
    """

    def __init__(
        self,
        name: str,
        manager: str,
        options: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        settings: RewardSettings | None = None,
        manager_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self.reward: BaseReward = build_reward(name, options)
        except TypeError as error:
            raise ConfigError(f"reward.reward_kwargs do not fit reward {name!r}: {error}") from error
        self._manager: BaseRewardManager = build_reward_manager(manager, self.reward, settings, manager_options)
        self._tokenizer = tokenizer

    def score(self, batch: DataProto) -> Scored:
        """Score every row of a generated batch.

        Raises:
            RewardError: the reward failed on a sample, and the settings do not bear it.
        """
        read = [name for name in _READ if name in batch]
        samples = GeneratedSamples(batch.local(read), self._tokenizer)
        return Scored(samples, self._manager(samples), self.reward.max_score)

    def close(self) -> None:
        """Release the manager's processes and threads."""
        self._manager.close()


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A validation's metrics from its :meth:`Scored.as_rows`, by source too where there are several."""

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
