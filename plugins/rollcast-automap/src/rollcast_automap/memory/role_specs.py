"""Role specifications for the cost models, read from the configuration of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcast.contracts.engine import ModelConfig
from rollcast_automap.contract import ModelFacts, RoleKind, RoleSpec, RolloutLayout, TrainingLayout
from rollcast_automap.memory.engine_layout import describe_engine
from rollcast_automap.memory.memory_model import KL_LOGIT_COPIES, LOGIT_COPIES, ModelSize, count_adapter, measure_model
from rollcast_serving.contracts.weight_sync import weight_syncs
from rollcast_trainer.api import (
    BatchAlgebra,
    CriticConfig,
    ParallelSizes,
    RefConfig,
    RewardModelConfig,
    Role,
    RunSettings,
    data_parallel_size,
    find_vocabulary_kl,
)

__all__ = [
    "compares_vocabularies",
    "count_replicas",
    "find_model",
    "largest_pass",
    "micro_batch_rows",
    "read_role",
    "role_size",
    "shares_weights",
    "slots_of",
]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Keys of rollouts for the sequences that they decode at once, and for their share of a device's memory.
_MOST_ROWS = ("max_batch_size", "max_num_seqs", "max_running_requests")
_SHARES = ("gpu_memory_utilization", "mem_fraction_static")
#: Bytes of vLLM's KV cache on a CPU if its key is null.
_CPU_CACHE_BYTES = 256 << 20
_KINDS: dict[str, RoleKind] = {"actor": "trains", "critic": "trains"}


def find_model(settings: RunSettings) -> tuple[ModelConfig | None, str]:
    """Return the model that the run starts from; or None and the reason why the model is not known yet."""
    warm = settings.run_dir / "warm_start" / "export"
    if settings.trainer.warm_start is not None and (warm / "config.json").is_file():
        return replace(settings.model, path=str(warm)), ""
    folder = Path(settings.model.path)
    if settings.data.preprocess is not None and not folder.exists():
        return (
            None,
            f"{folder} does not exist; data.preprocess={settings.data.preprocess} may make it when the run starts",
        )
    if settings.trainer.warm_start is not None and not folder.exists():
        return None, f"{folder} does not exist; recipe {settings.trainer.warm_start} is trained first and may make it"
    return settings.model, ""


def role_size(settings: RunSettings, name: str, size: ModelSize) -> ModelSize:
    """Return the sizes of a role's model.

    Args:
        settings: settings of the run.
        name: ``actor``, ``rollout``, ``critic``, ``ref`` or ``reward_model``.
        size: sizes of the model that the run starts from.

    Raises:
        ConfigError: the folder of the role's own model cannot be used.
    """
    path: str | None = None
    if name == "critic" and Role.CRITIC in settings.roles:
        critic: CriticConfig = settings.section("critic", CriticConfig)
        path = critic.model.path
    if name == "reward_model":
        judge: RewardModelConfig = settings.section("reward_model", RewardModelConfig)
        path = str(judge.model.path)
    return size if path is None else measure_model(replace(settings.model, path=path), f"{name}.model.path")


def read_role(settings: RunSettings, name: str, size: ModelSize, on_cpu: bool) -> RoleSpec:
    """Return the specification of a role of a run.

    Args:
        settings: settings of the run.
        name: ``actor``, ``rollout``, ``critic``, ``ref`` or ``reward_model``.
        size: sizes of the role's model.
        on_cpu: True if the devices are CPUs, for which some rollouts have different defaults.
    """
    facts = _facts(size)
    if name == "rollout":
        actor = describe_engine(RoleSpec("actor", "trains", facts, settings.engine.name), settings.engine)
        training = actor.training or TrainingLayout()
        stored = _rollout_bytes(settings, training.computed_bytes, on_cpu)
        return RoleSpec(
            name,
            "generates",
            replace(facts, dtype_bytes=stored),
            settings.rollout.name,
            own_process=settings.uses_replicas,
            rollout=_rollout_layout(settings, on_cpu),
        )
    engine = settings.role_engine(name)
    role = RoleSpec(
        name, _KINDS.get(name, "forwards"), facts, engine.name, value_head=name in ("critic", "reward_model")
    )
    role = describe_engine(role, engine)
    training = role.training or TrainingLayout()
    training = replace(training, eager_attention=settings.model.attn_implementation == "eager")
    if name == "actor":
        if compares_vocabularies(settings):
            training = replace(training, logit_copies=LOGIT_COPIES + KL_LOGIT_COPIES)
            if not settings.model.trains_adapter:
                on_host = _offloads_reference(settings, training.param_offload)
                training = replace(training, reference="host" if on_host else "device")
        role = replace(role, adapter_parameters=count_adapter(settings.model) if find_model(settings)[0] else 0)
    if name == "ref":
        offload = _offloads_reference(settings, training.param_offload)
        role = replace(role, offload=offload)
        training = replace(training, param_offload=offload, shares_weights=shares_weights(settings))
    return replace(role, training=training)


def _facts(size: ModelSize) -> ModelFacts:
    return ModelFacts(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn=size.intermediate,
        vocab=size.vocabulary,
        parameters=size.parameters,
        head_size=size.head_dim,
        tied=size.parameters == size.body,
    )


def _rollout_bytes(settings: RunSettings, computed: int, on_cpu: bool) -> int:
    """Return the bytes per parameter in the rollout; 2 for replicas that choose the dtype themselves on a GPU."""
    if not settings.uses_replicas:
        return computed
    dtype = settings.rollout_dtype
    if dtype in _BYTES:
        return _BYTES[dtype]
    return computed if on_cpu or settings.placement.device in ("auto", "cpu") else 2


def _rollout_layout(settings: RunSettings, on_cpu: bool) -> RolloutLayout:
    rollout: Any = settings.rollout
    rows = [int(getattr(rollout, key)) for key in _MOST_ROWS if getattr(rollout, key, None)]
    share = next((float(getattr(rollout, key)) for key in _SHARES if hasattr(rollout, key)), None)
    fixed = getattr(rollout, "kv_cache_memory_bytes", None)
    if on_cpu:
        fixed = _CPU_CACHE_BYTES if fixed is None and hasattr(rollout, "kv_cache_memory_bytes") else fixed
        share = None
    return RolloutLayout(
        max_rows=min(rows, default=None),
        memory_share=share if settings.uses_replicas else None,
        cache_bytes=None if fixed is None or not settings.uses_replicas else int(fixed),
        releases_memory=settings.rollout_class.capabilities.releases_memory
        and bool(getattr(rollout, "free_cache_engine", True)),
        bucket_bytes=rollout.update_weights_bucket_megabytes << 20 if settings.uses_replicas else 0,
        # One is filled while the other is read, or the bucket is cast before it leaves the device.
        sync_buffers=2 if weight_syncs.get(rollout.weight_sync).capabilities.shared_devices else 1,
        captures_graphs=not getattr(rollout, "enforce_eager", False),
    )


def shares_weights(settings: RunSettings) -> bool:
    """Return True if the reference model is the actor without its adapter, in the same workers."""
    pools, has_reference = settings.pools.mapping, Role.REF in settings.roles
    return has_reference and settings.model.trains_adapter and pools[Role.REF] == pools[Role.ACTOR_ROLLOUT]


def _offloads_reference(settings: RunSettings, as_actor: bool) -> bool:
    section: RefConfig = settings.section("ref", RefConfig)
    return as_actor or bool(section.engine.get("param_offload", False))


def compares_vocabularies(settings: RunSettings) -> bool:
    """Return True if the loss has a KL penalty over the vocabulary; the actor's workers then hold the reference."""
    trains_policy = any(place.name == "update_actor" for place in settings.places)
    return trains_policy and find_vocabulary_kl(settings) is not None


def count_replicas(settings: RunSettings, ranks: int) -> int:
    """Return the number of copies that generate on ``ranks`` ranks; without replicas, every rank has one."""
    return ParallelSizes.read(settings.rollout).data(ranks) if settings.uses_replicas else ranks


def slots_of(settings: RunSettings, algebra: BatchAlgebra, ranks: int) -> int:
    """Return the sequences per step and replica; a rollout's own limit may allow fewer at a time."""
    return -(-algebra.rows // count_replicas(settings, ranks))


def largest_pass(algebra: BatchAlgebra, longest: int) -> int:
    """Return the rows in the largest forward and backward pass of a rank, all of the longest length."""
    if algebra.micro_batch_tokens is not None:
        return min(max(algebra.micro_batch_tokens // longest, 1), algebra.rows_per_rank)
    return min(algebra.micro_batch_rows or algebra.rows_per_rank, algebra.rows_per_rank)


def micro_batch_rows(settings: RunSettings, algebra: BatchAlgebra, role: str, ranks: int, length: int) -> int:
    """Return the rows of a role's largest micro-batch on a rank.

    Args:
        settings: settings of the run.
        algebra: batch algebra of a step.
        role: name of a role that does not generate.
        ranks: number of ranks in the role's pool.
        length: tokens of a row.
    """
    actor = settings.actor
    own: int | None = algebra.micro_batch_rows
    forwards = getattr(actor, "log_prob_micro_batch_size_per_gpu", None) or own
    prompts = algebra.mini_batch_prompts
    if role == "critic":
        critic: CriticConfig = settings.section("critic", CriticConfig)
        own, prompts = critic.ppo_micro_batch_size_per_gpu or own, critic.ppo_mini_batch_size or prompts
    elif role == "ref":
        own, prompts = forwards, algebra.prompts
    elif role == "reward_model":
        judge: RewardModelConfig = settings.section("reward_model", RewardModelConfig)
        own, prompts = judge.micro_batch_size_per_gpu or forwards, algebra.prompts
    parts = data_parallel_size(settings.role_engine(role), ranks)
    mine = replace(algebra, dp_size=parts, micro_batch_rows=own, mini_batch_prompts=prompts)
    return largest_pass(mine, length)
