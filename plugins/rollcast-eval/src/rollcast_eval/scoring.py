"""From generated rows to samples, and from samples to scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from rollcast.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RewardScorer", "Scored", "summarize"]


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

    def token_level_scores(self, response_mask: torch.Tensor) -> torch.Tensor:
        """Return the scores at their tokens under the mask ``[B, T]``, float32 ``[B, T]``.

        Where a result has scores per token, they stand at the tokens; the rest of a row's score stands at its
        last token, for a row without tokens at its first position, where no token will see it.
        """
        scores = torch.zeros(response_mask.shape, dtype=torch.float32)
        positions = torch.arange(response_mask.shape[1])
        last = positions.where(response_mask != 0, 0).amax(-1)
        rest = self.scores.clone()
        for row, result in enumerate(self.results):
            if result.token_scores is not None:
                placed = self.rule_weight * torch.tensor(result.token_scores, dtype=torch.float32)
                scores[row, (response_mask[row] != 0).nonzero().squeeze(-1)] = placed
                rest[row] -= placed.sum()
        scores[torch.arange(len(scores)), last] += rest
        return scores

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
        samples = self._samples(batch)
        return Scored(samples, self._manager(samples), self.reward.max_score)

    def close(self) -> None:
        """Release the manager's processes and threads."""
        self._manager.close()

    def _samples(self, batch: DataProto) -> list[RewardSample]:
        def text(ids: torch.Tensor, mask: torch.Tensor) -> tuple[list[list[int]], list[str]]:
            kept = [
                [token for token, keep in zip(row, flags, strict=True) if keep]
                for row, flags in zip(ids.tolist(), mask.tolist(), strict=True)
            ]
            return kept, self._tokenizer.batch_decode(kept, skip_special_tokens=True)

        width = batch["prompts"].shape[1]
        _, prompts = text(batch["prompts"], batch["attention_mask"][:, :width])
        ids, responses = text(batch["responses"], batch["response_mask"])
        finished = batch["finished"].tolist()
        columns = batch.non_tensor_batch
        count = len(batch)

        def column(name: str, default: Any) -> Sequence[Any]:
            return list(columns[name]) if name in columns else [default] * count

        rows = zip(
            prompts,
            responses,
            ids,
            finished,
            column("ground_truth", None),
            column("data_source", ""),
            column("extra_info", None),
            self._turns(batch),
            strict=True,
        )
        return [
            RewardSample(prompt, response, truth, source or "", bool(done), tokens, extra or {}, turns)
            for prompt, response, tokens, done, truth, source, extra, turns in rows
        ]

    def _turns(self, batch: DataProto) -> list[list[int]]:
        """Turns of each row's chosen tokens, from the column ``turn_ids`` int ``[B, T]``; empty lists without it."""
        if "turn_ids" not in batch:
            return [[] for _ in range(len(batch))]
        pairs = zip(batch["turn_ids"], batch["response_mask"], strict=True)
        return [turns[mask != 0].tolist() for turns, mask in pairs]


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
