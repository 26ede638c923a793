"""The gap between the sampling policy and the policy in training: when it is measured and how it is corrected."""

from __future__ import annotations

from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.schemas import AlgorithmConfig, RolloutCorrectionConfig
from rollcast_serving.contracts.weight_sync import weight_syncs
from rollcast_serving.requests import configured_sampling, cut_keys
from rollcast_trainer.batch.columns import POLICY_GAP
from rollcast_trainer.run.settings import RunSettings

__all__ = [
    "KEPT",
    "acts",
    "correction_columns",
    "correction_of",
    "log_prob_metrics",
    "precision_differs",
    "rollout_log_probs_serve",
    "routes_of",
]

KEPT = "kept_mask"
"""Jagged column: the response mask without the tokens that the correction rejected."""


def correction_of(settings: RunSettings) -> RolloutCorrectionConfig:
    """Return the run's correction; by default it weights tokens that may be older than their step, or that the rollout
    samples in another precision than the actor's.
    """
    config: AlgorithmConfig = settings.section("algorithm", AlgorithmConfig)
    return config.rollout_correction.resolved(is_off_policy=settings.max_staleness > 0 or precision_differs(settings))


def precision_differs(settings: RunSettings) -> bool:
    """Return True if the configuration says that replicas compute in another precision than the actor.

    A dtype that only the engine or the model's folder knows does not count. Stages are chosen before a run writes or
    trains its first model, and a resumed run must choose the same.
    """
    if not settings.uses_replicas:
        return False
    # vLLM and SGLang both call their own option so.
    engine_option = getattr(settings.rollout, "engine_kwargs", {}).get("quantization")
    if settings.rollout.quantization is not None or engine_option is not None:
        return True
    if not hasattr(settings.rollout, "dtype"):
        return False
    return settings.rollout_dtype not in (None, settings.engine_class.compute_dtype(settings.engine))


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


def rollout_log_probs_serve(settings: RunSettings) -> bool:
    """Return True if the rollout's log-probs equal the policy's, so that they can serve as ``old_log_probs``.

    This holds if the rollout shares the actor's weights in its process, samples at the temperature of the update, and
    does not truncate the distribution.
    """
    rollout = settings.rollout
    if settings.actor.log_prob_check_rows < 0 or acts(correction_of(settings)):
        return False
    if settings.actor.router_replay.mode == "R2":
        return False  # the pass for old log-probs also records the experts to replay
    same_process = bool(weight_syncs.get(rollout.weight_sync).capabilities.same_process)
    return same_process and rollout.temperature > 0 and not cut_keys(configured_sampling(rollout, 1))


def routes_of(settings: RunSettings) -> str:
    """Return the name of the recorder of the experts that the run replays: ``rollout``, ``actor``, or "" for none.

    Raises:
        ConfigError: the keys of the replay do not fit together; the message names them.
        CapabilityError: the rollout cannot record the experts, or the engine cannot replay them.
    """
    mode, records = settings.actor.router_replay.mode, settings.rollout.enable_rollout_routing_replay
    if records and not settings.rollout_class.capabilities.routing_replay:
        raise CapabilityError(
            f"rollout.enable_rollout_routing_replay is true, but rollout.name={settings.rollout.name} cannot record "
            "the experts of its tokens (capabilities.routing_replay); use rollout=hf, sglang or vllm, or "
            "actor.router_replay.mode=R2"
        )
    if mode != "disabled" and not settings.engine_class.capabilities.routing_replay:
        raise CapabilityError(
            f"actor.router_replay.mode is {mode}, but engine={settings.engine.name} cannot replay the experts of a "
            "mixture (capabilities.routing_replay); set it to disabled, or use engine=fsdp or engine=megatron"
        )
    if mode == "R3" and not records:
        raise ConfigError(
            "actor.router_replay.mode is R3, which replays the rollout's experts, but "
            "rollout.enable_rollout_routing_replay is false; set it to true"
        )
    if mode == "R2" and correction_of(settings).bypass_mode:
        raise ConfigError(
            "actor.router_replay.mode is R2, which replays the experts of the pass for old log-probs, but "
            "algorithm.rollout_correction.bypass_mode leaves that pass out; use R3, or set bypass_mode=false"
        )
    return {"R2": "actor", "R3": "rollout"}.get(mode, "")


def log_prob_metrics(tokens: int, output: DataProto) -> dict[str, float]:
    """Return the mean entropy, and the maximum and mean gap between the log-probs of rollout and actor.

    Args:
        tokens: number of masked-in tokens.
        output: columns ``POLICY_GAP`` of the actor's pass.
    """
    gaps = output.local(POLICY_GAP)
    entropy, total, largest = (gaps[name] for name in POLICY_GAP)
    return {
        "actor/entropy": float(entropy.sum()) / max(tokens, 1),
        "rollout/logprob_gap_max": float(largest.max()) if len(largest) else 0.0,
        "rollout/logprob_gap_mean": float(total.sum()) / max(tokens, 1),
    }
