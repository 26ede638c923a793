"""Which models a run has, in which pool, and what they take there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.pools import ResourcePool
from rollcast_automap.engine_layout import EngineLayout
from rollcast_automap.memory_model import (
    KL_LOGIT_COPIES,
    LOGIT_COPIES,
    MemoryItem,
    ModelSize,
    Passes,
    bound_activations,
    count_adapter,
    count_adapter_state,
    count_frozen,
    count_gathered,
    count_trained,
    measure_model,
    parameters_on_rank,
    total,
)
from rollcast_automap.rollout_memory import bound_cache, rollout_items
from rollcast_automap.splits import check_split
from rollcast_trainer.batch.sizes import BatchAlgebra, data_parallel_size
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.schemas import CriticConfig, RefConfig, RewardModelConfig
from rollcast_trainer.workers.roles import Role

__all__ = ["critic_size", "find_model", "format_bytes", "largest_pass", "placed_roles", "plan_memory"]

#: Of a device; the rest is for libraries, the device's context and the allocator's gaps.
_USABLE = 0.9


#: Titles of roles where they differ from the name.
_TITLES: dict[str, str] = {Role.ACTOR_ROLLOUT: "actor", Role.REF: "reference", Role.REWARD_MODEL: "reward model"}
_SECTIONS = {"actor": "actor", "reference": "ref", "critic": "critic", "reward model": "reward_model"}


def placed_roles(trainer: LoopTrainer) -> dict[ResourcePool, list[str]]:
    """Return the roles of this run that live in each pool."""
    task, pools = trainer.task, trainer.task.pools
    actor = pools.mapping[Role.ACTOR_ROLLOUT]
    roles = {"actor": actor, "rollout": pools.mapping[Role.ROLLOUT] if task.uses_replicas else actor}
    for role in trainer.run.roles[1:]:
        # An actor without its adapter is the reference.
        if role != Role.REF or pools.mapping[role] != actor or not task.model.trains_adapter:
            roles[_TITLES.get(role, role)] = pools.mapping[role]
    found: dict[ResourcePool, list[str]] = {}
    for title, pool in roles.items():
        found.setdefault(pools.resource_pool_dict[pool], []).append(title)
    return found


def largest_pass(algebra: BatchAlgebra, longest: int) -> int:
    """Rows of the longest length in the largest forward and backward pass of a rank."""
    if algebra.micro_batch_tokens is not None:
        return min(max(algebra.micro_batch_tokens // longest, 1), algebra.rows_per_rank)
    return min(algebra.micro_batch_rows or algebra.rows_per_rank, algebra.rows_per_rank)


def plan_memory(
    trainer: LoopTrainer, algebra: BatchAlgebra, notes: list[str], device_bytes: int | None = None
) -> list[tuple[str, Any, str]]:
    """Key, value and text of each line about memory; bytes on each rank.

    Args:
        trainer: of the run.
        algebra: of a step.
        notes: to which is added what else is worth knowing.
        device_bytes: of each device; None where it is not known.

    Raises:
        ConfigError: the model folder is not one, and nothing in the run would make it; or the engine or the
            rollout cannot split its model so.
    """
    model, reason = find_model(trainer)
    if model is None:
        notes.append(f"the size of the model is not known yet: {reason}")
        return [("parameters", None, "parameters: not known"), ("pools", None, "memory: not known")]
    size = measure_model(model)
    check_split(trainer, size)
    lines: list[tuple[str, Any, str]] = [("parameters", size.parameters, f"{size.parameters:,} parameters")]
    if not EngineLayout.read(trainer.task.engine, 1).known:
        notes.append(f"engine {trainer.task.engine.name} does not say how it stores a model: whole in fp32 is assumed")
    adapter = count_adapter(model)
    if adapter:
        lines.append(("adapter_parameters", adapter, f"{adapter:,} parameters of the adapter that trains"))
    disk = 3 * 4 * adapter
    by_pool: dict[str, Any] = {}
    for pool, roles in placed_roles(trainer).items():
        items = [item for role in roles for item in _items(role, trainer, algebra, size, pool, adapter)]
        if device_bytes is not None and "rollout" in roles:
            items = bound_cache(items, trainer.task, device_bytes)
        phases = {"held": total(items, "held")}
        phases |= {"generating": total(items, "generate")} if "rollout" in roles else {}
        phases |= {"updating": total(items, "update")} if {"actor", "critic"} & set(roles) else {}
        by_pool[pool.name] = {"items": {item.name: item.bytes for item in items}, "device": phases}
        for item in items:
            how = [*(["rough bound"] if item.is_bound else []), *(["in host memory"] if item.on_host else [])]
            aside = f" ({', '.join(how)})" if how else ""
            lines.append(("", None, f"{pool.name}: {item.name} {format_bytes(item.bytes)}{aside}"))
        shown = ", ".join(f"{format_bytes(most)} {phase}" for phase, most in phases.items())
        lines.append(("", None, f"{pool.name}: in all {shown}"))
        if device_bytes is not None:
            by_pool[pool.name]["fits"] = fits = _fits(pool.name, phases, device_bytes, notes)
            room = f"{format_bytes(device_bytes)} on each device"
            lines.append(("", None, f"{pool.name}: {'fits' if fits else 'does not fit'} into {room}"))
        disk += size.parameters * ("actor" in roles and not adapter) * _checkpointed(trainer, "actor", pool)
        critic = critic_size(trainer, size).value_parameters * ("critic" in roles)
        disk += critic * _checkpointed(trainer, "critic", pool)
    lines.append(("checkpoint_bytes", disk, f"{format_bytes(disk)} a checkpoint on the disk"))
    lines.append(("pools", by_pool, ""))
    return lines


def _fits(pool: str, phases: dict[str, int], device_bytes: int, notes: list[str]) -> bool:
    """Whether the largest phase leaves room for what is not counted."""
    phase, most = max(phases.items(), key=lambda entry: entry[1])
    usable = int(device_bytes * _USABLE)
    if most > usable:
        notes.append(
            f"{pool}: {format_bytes(most)} {phase} does not fit into {_USABLE:.0%} of {format_bytes(device_bytes)}; "
            "more devices, smaller passes, offload or gradient checkpointing would help"
        )
    return most <= usable


def find_model(trainer: LoopTrainer) -> tuple[ModelConfig | None, str]:
    """Return the model that the run starts from; or None and why it cannot be known."""
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


def _engine_of(trainer: LoopTrainer, title: str) -> Any:
    return trainer.task.role_engine(_SECTIONS.get(title, "actor"))


def _checkpointed(trainer: LoopTrainer, title: str, pool: ResourcePool) -> int:
    """Return the bytes of a parameter in a checkpoint: weight and optimizer state."""
    layout: EngineLayout = EngineLayout.read(_engine_of(trainer, title), pool.world_size)
    return layout.stored + (2 * layout.stored if layout.state is None else layout.state)


def _items(
    role: str, trainer: LoopTrainer, algebra: BatchAlgebra, size: ModelSize, pool: ResourcePool, adapter: int
) -> list[MemoryItem]:
    if role not in (*_SECTIONS, "rollout"):
        return []  # a role of a plugin, whose model is not known here
    data, layout = trainer.task.data, EngineLayout.read(_engine_of(trainer, role), pool.world_size)
    longest = data.max_prompt_length + data.max_response_length
    algebra = replace(algebra, dp_size=data_parallel_size(_engine_of(trainer, role), pool.world_size))
    if role == "reference":
        section: RefConfig = trainer.task.section("ref", RefConfig)
        offload = layout.param_offload or bool(section.engine.get("param_offload", False))
        return count_frozen("reference", parameters_on_rank(size, layout), replace(layout, param_offload=offload))
    if role == "reward model":
        judge = trainer.task.section("reward_model", RewardModelConfig).model.path
        own = measure_model(replace(trainer.task.model, path=judge), "reward_model.model.path")
        return count_frozen("reward model", parameters_on_rank(own, layout, value_model=True), layout)
    if role == "rollout":
        return rollout_items(trainer, algebra, size, layout, longest, pool.world_size)
    if role == "critic":
        rows = trainer.task.section("critic", CriticConfig).ppo_micro_batch_size_per_gpu
        algebra = replace(algebra, micro_batch_rows=rows or algebra.micro_batch_rows)
    passes = Passes(largest_pass(algebra, longest), longest, data.max_response_length)
    eager = trainer.task.model.attn_implementation == "eager"
    size = size if role == "actor" else critic_size(trainer, size)
    parameters = parameters_on_rank(size, layout, value_model=role == "critic")
    logits = (LOGIT_COPIES + (KL_LOGIT_COPIES if _compares_vocabularies(trainer) else 0)) if role == "actor" else 0
    activations = bound_activations(size, passes, layout, eager, logits)
    if role == "actor" and adapter:
        items = [*count_frozen(role, parameters, layout), count_adapter_state(role, adapter, layout)]
    else:
        items = count_trained(role, parameters, layout)
    if layout.gathers:
        items.append(MemoryItem(f"{role}: gathered weights", count_gathered(size, layout), "update"))
    if layout.activation_offload:
        kept = bound_activations(size, passes, replace(layout, activation_offload=False), eager, 0)
        items.append(MemoryItem(f"{role}: kept activations", kept, "update", on_host=True, is_bound=True))
    return [*items, MemoryItem(f"{role}: activations", activations, "update", is_bound=True)]


def _compares_vocabularies(trainer: LoopTrainer) -> bool:
    return any(getattr(stage, "vocabulary_kl", None) is not None for stage in trainer.stages)


def critic_size(trainer: LoopTrainer, actor: ModelSize) -> ModelSize:
    """Return the size of the critic's model: the actor's, unless ``critic.model.path`` names another."""
    if Role.CRITIC not in trainer.run.roles:
        return actor
    critic: CriticConfig = trainer.task.section("critic", CriticConfig)
    if critic.model.path is None:
        return actor
    return measure_model(replace(trainer.task.model, path=critic.model.path), "critic.model.path")


def format_bytes(count: int) -> str:
    """A size for people, with three digits: ``"512 B"``, ``"1.5 GiB"``."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1000:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g} {unit}"
