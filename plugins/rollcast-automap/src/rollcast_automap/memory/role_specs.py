"""Role specifications for the cost models, read from the configuration of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcast.contracts.engine import ModelConfig
from rollcast_automap.contract import ModelFacts, RoleKind, RoleSpec, RolloutLayout, TrainingLayout
from rollcast_automap.memory.engine_layout import describe_engine
from rollcast_automap.memory.memory_model import KL_LOGIT_COPIES, LOGIT_COPIES, ModelSize, count_adapter, measure_model
from rollcast_trainer.batch.sizes import BatchAlgebra, ParallelSizes, data_parallel_size
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.run.task_runner import TaskRunner
from rollcast_trainer.schemas import CriticConfig, RefConfig, RewardModelConfig
from rollcast_trainer.workers.roles import Role

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


def find_model(trainer: LoopTrainer) -> tuple[ModelConfig | None, str]:
    """Return the model that the run starts from; or None and the reason why the model is not known yet."""
    task = trainer.task
    warm = task.run_dir / "warm_start" / "export"
    if task.trainer.warm_start is not None and (warm / "config.json").is_file():
        return replace(task.model, path=str(warm)), ""
    folder = Path(task.model.path)
    if task.data.preprocess is not None and not folder.exists():
        return None, f"{folder} does not exist; data.preprocess={task.data.preprocess} may make it when the run starts"
    if task.trainer.warm_start is not None and not folder.exists():
        return None, f"{folder} does not exist; recipe {task.trainer.warm_start} is trained first and may make it"
    return task.model, ""


def role_size(trainer: LoopTrainer, name: str, size: ModelSize) -> ModelSize:
    """Return the sizes of a role's model.

    Args:
        trainer: trainer of the run.
        name: ``actor``, ``rollout``, ``critic``, ``ref`` or ``reward_model``.
        size: sizes of the model that the run starts from.

    Raises:
        ConfigError: the folder of the role's own model cannot be used.
    """
    path: str | None = None
    if name == "critic" and Role.CRITIC in trainer.run.roles:
        critic: CriticConfig = trainer.task.section("critic", CriticConfig)
        path = critic.model.path
    if name == "reward_model":
        judge: RewardModelConfig = trainer.task.section("reward_model", RewardModelConfig)
        path = str(judge.model.path)
    return size if path is None else measure_model(replace(trainer.task.model, path=path), f"{name}.model.path")


def read_role(trainer: LoopTrainer, name: str, size: ModelSize, on_cpu: bool) -> RoleSpec:
    """Return the specification of a role of a run.

    Args:
        trainer: trainer of the run.
        name: ``actor``, ``rollout``, ``critic``, ``ref`` or ``reward_model``.
        size: sizes of the role's model.
        on_cpu: True if the devices are CPUs, for which some rollouts have different defaults.
    """
    task, facts = trainer.task, _facts(size)
    if name == "rollout":
        actor = describe_engine(RoleSpec("actor", "trains", facts, task.engine.name), task.engine)
        training = actor.training or TrainingLayout()
        stored = _rollout_bytes(task, training.computed_bytes, on_cpu)
        return RoleSpec(
            name,
            "generates",
            replace(facts, dtype_bytes=stored),
            task.rollout.name,
            own_process=task.uses_replicas,
            rollout=_rollout_layout(task, on_cpu),
        )
    engine = task.role_engine(name)
    role = RoleSpec(
        name, _KINDS.get(name, "forwards"), facts, engine.name, value_head=name in ("critic", "reward_model")
    )
    role = describe_engine(role, engine)
    training = role.training or TrainingLayout()
    training = replace(training, eager_attention=task.model.attn_implementation == "eager")
    if name == "actor":
        if compares_vocabularies(trainer):
            training = replace(training, logit_copies=LOGIT_COPIES + KL_LOGIT_COPIES)
            if not task.model.trains_adapter:
                on_host = _offloads_reference(trainer, training.param_offload)
                training = replace(training, reference="host" if on_host else "device")
        role = replace(role, adapter_parameters=count_adapter(task.model) if find_model(trainer)[0] else 0)
    if name == "ref":
        offload = _offloads_reference(trainer, training.param_offload)
        role = replace(role, offload=offload)
        training = replace(training, param_offload=offload, shares_weights=shares_weights(trainer))
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


def _rollout_bytes(task: TaskRunner, computed: int, on_cpu: bool) -> int:
    """Return the bytes per parameter in the rollout; 2 for replicas that choose the dtype themselves on a GPU."""
    if not task.uses_replicas:
        return computed
    dtype = task.rollout_dtype
    if dtype in _BYTES:
        return _BYTES[dtype]
    return computed if on_cpu or task.placement.device in ("auto", "cpu") else 2


def _rollout_layout(task: TaskRunner, on_cpu: bool) -> RolloutLayout:
    rollout: Any = task.rollout
    rows = [int(getattr(rollout, key)) for key in _MOST_ROWS if getattr(rollout, key, None)]
    share = next((float(getattr(rollout, key)) for key in _SHARES if hasattr(rollout, key)), None)
    fixed = getattr(rollout, "kv_cache_memory_bytes", None)
    if on_cpu:
        fixed = _CPU_CACHE_BYTES if fixed is None and hasattr(rollout, "kv_cache_memory_bytes") else fixed
        share = None
    return RolloutLayout(
        max_rows=min(rows, default=None),
        memory_share=share if task.uses_replicas else None,
        cache_bytes=None if fixed is None or not task.uses_replicas else int(fixed),
        releases_memory=task.rollout_class.capabilities.releases_memory
        and bool(getattr(rollout, "free_cache_engine", True)),
        bucket_bytes=rollout.update_weights_bucket_megabytes << 20 if task.uses_replicas else 0,
        captures_graphs=not getattr(rollout, "enforce_eager", False),
    )


def shares_weights(trainer: LoopTrainer) -> bool:
    """Return True if the reference model is the actor without its adapter, in the same workers."""
    pools, has_reference = trainer.task.pools.mapping, Role.REF in trainer.run.roles
    return has_reference and trainer.task.model.trains_adapter and pools[Role.REF] == pools[Role.ACTOR_ROLLOUT]


def _offloads_reference(trainer: LoopTrainer, as_actor: bool) -> bool:
    section: RefConfig = trainer.task.section("ref", RefConfig)
    return as_actor or bool(section.engine.get("param_offload", False))


def compares_vocabularies(trainer: LoopTrainer) -> bool:
    """Return True if the loss has a KL penalty over the vocabulary; the actor's workers then hold the reference."""
    return any(getattr(stage, "vocabulary_kl", None) is not None for stage in trainer.stages)


def count_replicas(task: TaskRunner, ranks: int) -> int:
    """Return the number of copies that generate on ``ranks`` ranks; without replicas, every rank has one."""
    return ParallelSizes.read(task.rollout).data(ranks) if task.uses_replicas else ranks


def slots_of(task: TaskRunner, algebra: BatchAlgebra, ranks: int) -> int:
    """Return the sequences per step and replica; a rollout's own limit may allow fewer at a time."""
    return -(-algebra.rows // count_replicas(task, ranks))


def largest_pass(algebra: BatchAlgebra, longest: int) -> int:
    """Return the rows in the largest forward and backward pass of a rank, all of the longest length."""
    if algebra.micro_batch_tokens is not None:
        return min(max(algebra.micro_batch_tokens // longest, 1), algebra.rows_per_rank)
    return min(algebra.micro_batch_rows or algebra.rows_per_rank, algebra.rows_per_rank)


def micro_batch_rows(trainer: LoopTrainer, algebra: BatchAlgebra, role: str, ranks: int, length: int) -> int:
    """Return the rows of a role's largest micro-batch on a rank.

    Args:
        trainer: trainer of the run.
        algebra: batch algebra of a step.
        role: name of a role that does not generate.
        ranks: number of ranks in the role's pool.
        length: tokens of a row.
    """
    task, actor = trainer.task, trainer.task.actor
    own: int | None = algebra.micro_batch_rows
    forwards = getattr(actor, "log_prob_micro_batch_size_per_gpu", None) or own
    prompts = algebra.mini_batch_prompts
    if role == "critic":
        critic: CriticConfig = task.section("critic", CriticConfig)
        own, prompts = critic.ppo_micro_batch_size_per_gpu or own, critic.ppo_mini_batch_size or prompts
    elif role == "ref":
        own, prompts = forwards, algebra.prompts
    elif role == "reward_model":
        judge: RewardModelConfig = task.section("reward_model", RewardModelConfig)
        own, prompts = judge.micro_batch_size_per_gpu or forwards, algebra.prompts
    parts = data_parallel_size(task.role_engine(role), ranks)
    mine = replace(algebra, dp_size=parts, micro_batch_rows=own, mini_batch_prompts=prompts)
    return largest_pass(mine, length)
