"""Scoring saved trajectories with a config's reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollcast import build_section
from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.storage import NodeCopies
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_agents.assembly import assemble_trajectories
from rollcast_agents.records import Record
from rollcast_agents.training.manager import scoring_columns
from rollcast_data.schemas import DataConfig
from rollcast_data.tokenizer import load_tokenizer
from rollcast_rewards.schemas import RewardConfig
from rollcast_rewards.scoring import RewardScorer, RewardSetup, Scored

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["rescore"]

_TASK = ("ground_truth", "data_source", "extra_info")


def rescore(records: Sequence[Record], config: DictConfig) -> tuple[list[Record], dict[str, float]]:
    """Score saved trajectories with ``reward.*``; the tokenizer is that of ``model.path``.

    Returns:
        The records with new scores, and figures: ``rollouts``, ``accuracy``, mean ``score``, mean ``score_before`` and
            the number of rollouts whose score ``changed``.

    Raises:
        RewardError: the reward failed on a trajectory, and the settings do not tolerate failures.
    """
    scored = _score(records, config)
    totals = scored.rollout_scores.tolist()
    rescored = [replace(record, score=total) for record, total in zip(records, totals, strict=True)]
    final = scored.final.nonzero().flatten().tolist()
    before = [records[row].score for row in final]
    known = [score for score in before if score is not None]
    changed = sum(old is not None and abs(old - totals[row]) > 1e-6 for row, old in zip(final, before, strict=True))
    figures = {
        "rollouts": float(len(final)),
        "accuracy": scored.accuracy,
        "score": sum(totals[row] for row in final) / len(final),
        **({"score_before": sum(known) / len(known)} if known else {}),
        "changed": float(changed),
    }
    return rescored, figures


def _score(records: Sequence[Record], config: DictConfig) -> Scored:
    reward: RewardConfig = build_section(RewardConfig, config.reward, "reward")
    data: DataConfig = build_section(DataConfig, config.data, "data")
    model: ModelConfig = build_section(ModelConfig, config.model, "model")
    copies = NodeCopies()
    model = copies.place(model, "model")
    copies.make()
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    scorer = RewardScorer(RewardSetup.of(reward, data.max_response_length), tokenizer)
    if scorer.uses_judge:
        raise ConfigError(
            f"reward.name={reward.name} needs a judge, which only a run serves; choose a reward without one"
        )
    try:
        return scorer.score(_batch(records))
    finally:
        scorer.close()


def _batch(records: Sequence[Record]) -> DataProto:
    """Return the rows of the records, in the form that the reward stage receives."""
    trajectories = [record.trajectory for record in records]
    task: dict[str, list[Any]] = {name: [record.task.get(name) for record in records] for name in _TASK}
    return assemble_trajectories(trajectories).with_columns(scoring_columns(trajectories) | task)
