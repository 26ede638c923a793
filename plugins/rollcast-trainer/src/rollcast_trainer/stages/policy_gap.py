"""The gap between the sampling policy and the policy in training: when it is measured and how it is corrected."""

from __future__ import annotations

from rollcast.protocol import DataProto
from rollcast_algorithms.schemas import AlgorithmConfig, RolloutCorrectionConfig
from rollcast_serving.requests import configured_sampling, cut_keys
from rollcast_serving.weight_sync import weight_syncs
from rollcast_trainer.batch.columns import POLICY_GAP
from rollcast_trainer.run.training_run import TrainingRun

__all__ = ["KEPT", "acts", "correction_columns", "correction_of", "log_prob_metrics", "rollout_log_probs_serve"]

KEPT = "kept_mask"
"""Jagged column: the response mask without the tokens that the correction rejected."""


def correction_of(run: TrainingRun) -> RolloutCorrectionConfig:
    """Return the run's correction; if rollouts may be older than their step, it weights their tokens by default."""
    config: AlgorithmConfig = run.section("algorithm", AlgorithmConfig)
    return config.rollout_correction.resolved(is_stale=run.max_staleness > 0)


def acts(config: RolloutCorrectionConfig) -> bool:
    """Return True if the configuration asks for weights, for rejection, or for steps without a pass for old
    log-probs.
    """
    asked = (config.rollout_is, config.rollout_rs, config.rollout_token_veto_threshold)
    return config.bypass_mode or any(value is not None for value in asked)


def correction_columns(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Return the columns that the correction adds for the update."""
    if not acts(config):
        return ()
    return (KEPT, *(["rollout_is_weights"] if config.rollout_is is not None else []))


def rollout_log_probs_serve(run: TrainingRun) -> bool:
    """Return True if the rollout's log-probs equal the policy's, so that they can serve as ``old_log_probs``.

    This holds if the rollout shares the actor's weights in its process, samples at the temperature of the update, and
    does not truncate the distribution.
    """
    task, rollout = run.task, run.task.rollout
    if task.actor.log_prob_check_rows < 0 or acts(correction_of(run)):
        return False
    same_process = bool(weight_syncs.get(rollout.weight_sync).capabilities.same_process)
    return same_process and rollout.temperature > 0 and not cut_keys(configured_sampling(rollout, 1))


def log_prob_metrics(tokens: int, output: DataProto) -> dict[str, float]:
    """Return the mean entropy, and the maximum and mean gap between the log-probs of rollout and actor.

    Args:
        tokens: number of masked-in tokens.
        output: columns ``POLICY_GAP`` of the actor's pass.
    """
    found = output.local(POLICY_GAP)
    entropy, total, largest = (found[name] for name in POLICY_GAP)
    return {
        "actor/entropy": float(entropy.sum()) / max(tokens, 1),
        "rollout/logprob_gap_max": float(largest.max()) if len(largest) else 0.0,
        "rollout/logprob_gap_mean": float(total.sum()) / max(tokens, 1),
    }
