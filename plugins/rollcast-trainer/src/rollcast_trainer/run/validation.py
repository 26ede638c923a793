"""Validation: generate, score and summarize the validation prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rollcast.protocol import DataProto
from rollcast_rewards.scoring import Scored, summarize
from rollcast_rewards.statistics import answer_extractor, pick_samples, summarize_samples
from rollcast_trainer.run.run import Run

__all__ = ["validate"]


def validate(run: Run, batches: Sequence[DataProto]) -> dict[str, float]:
    """Generate and score the validation prompts, call ``on_validation_end``, and return the metrics.

    Args:
        run: the started run.
        batches: validation prompts, collated.
    """
    settings, step = run.settings, run.completed
    sampling, repeats = run.sampling(validation=True), settings.rollout.val_kwargs.n
    run.seeds.begin(f"validation {step}")
    scored: list[Scored] = []
    for batch in batches:
        prompts = batch.repeat(repeats, interleave=True) if repeats > 1 else batch
        scored.append(run.scorer.score(run.generate(prompts, sampling)))
    rows = [row for part in scored for row in part.as_rows()]
    extract = answer_extractor(run.scorer.reward)
    metrics = {**summarize_samples(rows, max(repeats, 1), extract, settings.trainer.seed), **summarize(rows)}
    logged = pick_samples(rows, settings.trainer.log_val_generations)
    run.hook.on_validation_end(trainer=run.trainer, step=step, metrics=metrics, samples=logged)
    return metrics
