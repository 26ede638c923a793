"""The memory section of a plan: the models in each pool and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcast.contracts.pools import ResourcePool
from rollcast.errors import ConfigError
from rollcast_automap.composition import held_bytes
from rollcast_automap.contract import Constraints, MemoryParts, Mesh, RoleSpec
from rollcast_automap.memory.engine_layout import has_known_keys
from rollcast_automap.memory.memory_model import MemoryItem, ModelSize, count_adapter, measure_model
from rollcast_automap.memory.process_memory import find_process_memory
from rollcast_automap.memory.role_memory import (
    Cache,
    ReplicaTooLargeError,
    gather_parts,
    list_engine_items,
    list_rollout_items,
    longest_pass,
)
from rollcast_automap.memory.role_specs import (
    compares_vocabularies,
    find_model,
    micro_batch_rows,
    read_role,
    role_size,
    shares_weights,
    slots_of,
)
from rollcast_automap.memory.splits import check_split
from rollcast_trainer.api import BatchAlgebra, ParallelSizes, RefConfig, Role, RunSettings

__all__ = ["format_bytes", "placed_roles", "plan_memory", "rollout_mesh"]

#: Usable fraction of a device; the rest is for the allocator's gaps, as `constraints.headroom` of `rollcast map`.
_USABLE = 1 - Constraints().headroom
#: Titles of roles where they differ from the name.
_TITLES: dict[str, str] = {Role.ACTOR_ROLLOUT: "actor", Role.REF: "reference", Role.REWARD_MODEL: "reward model"}
#: Title → name of the role in a problem of `rollcast map`. Roles of plugins are missing: their models are not known.
_NAMES = {
    "actor": "actor",
    "reference": "ref",
    "critic": "critic",
    "reward model": "reward_model",
    "rollout": "rollout",
}


def placed_roles(settings: RunSettings) -> dict[ResourcePool, list[str]]:
    """Return pool → titles of the roles placed on it."""
    pools = settings.pools
    actor = pools.mapping[Role.ACTOR_ROLLOUT]
    roles = {"actor": actor, "rollout": pools.mapping[Role.ROLLOUT] if settings.uses_replicas else actor}
    for role in settings.roles[1:]:
        # An actor without its adapter is the reference.
        if role != Role.REF or pools.mapping[role] != actor or not settings.model.trains_adapter:
            roles[_TITLES.get(role, role)] = pools.mapping[role]
    titles: dict[ResourcePool, list[str]] = {}
    for title, pool in roles.items():
        titles.setdefault(pools.resource_pool_dict[pool], []).append(title)
    return titles


def plan_memory(
    settings: RunSettings, algebra: BatchAlgebra, notes: list[str], device_bytes: int | None = None
) -> list[tuple[str, Any, str]]:
    """Return (key, value, text) of each line about memory; sizes are bytes on each rank.

    Args:
        settings: settings of the run.
        algebra: batch algebra of a step.
        notes: list to which notes are appended.
        device_bytes: memory of each device in bytes; None if not known.

    Raises:
        ConfigError: the model folder is not valid and nothing in the run creates it, or the engine or the rollout
            cannot split the model as configured.
    """
    model, reason = find_model(settings)
    if model is None:
        notes.append(f"the size of the model is not known yet: {reason}")
        return [("parameters", None, "parameters: not known"), ("pools", None, "memory: not known")]
    size = measure_model(model)
    check_split(settings, size)
    lines: list[tuple[str, Any, str]] = [("parameters", size.parameters, f"{size.parameters:,} parameters")]
    if not has_known_keys(settings.engine):
        notes.append(f"engine {settings.engine.name} does not say how it stores a model: whole in fp32 is assumed")
    adapter = count_adapter(model)
    if adapter:
        lines.append(("adapter_parameters", adapter, f"{adapter:,} parameters of the adapter that trains"))
    disk = 3 * 4 * adapter
    by_pool: dict[str, Any] = {}
    for pool, titles in placed_roles(settings).items():
        memory = _PoolMemory(settings, algebra, size, pool, _counted(settings, titles), device_bytes)
        phases = memory.phases()
        by_pool[pool.name] = {"items": {item.name: item.bytes for item in memory.items}, "device": phases}
        lines += [("", None, f"{pool.name}: {_describe(item)}") for item in memory.items]
        shown = ", ".join(f"{format_bytes(most)} {phase}" for phase, most in phases.items())
        lines.append(("", None, f"{pool.name}: in all {shown}"))
        if device_bytes is not None:
            by_pool[pool.name]["fits"] = fits = _fits(pool.name, phases, device_bytes, notes)
            room = f"{format_bytes(device_bytes)} on each device"
            lines.append(("", None, f"{pool.name}: {'fits' if fits else 'does not fit'} into {room}"))
        disk += sum(
            memory.checkpoint_bytes(role) for role in memory.roles.values() if not (role.name == "actor" and adapter)
        )
        if _TITLES[Role.REF] in titles and settings.section("ref", RefConfig).sync_ref_model:
            disk += memory.weight_bytes(_TITLES[Role.REF])
    lines.append(("checkpoint_bytes", disk, f"{format_bytes(disk)} a checkpoint on the disk"))
    lines.append(("pools", by_pool, ""))
    return lines


def _counted(settings: RunSettings, titles: Sequence[str]) -> list[str]:
    """Return the roles of a pool that have memory of their own there."""
    named = [title for title in titles if title in _NAMES]
    if "actor" in named and shares_weights(settings):
        named.append("reference")  # shares the actor's weights, but its passes need memory
    if "actor" in named and compares_vocabularies(settings) and "reference" in named:
        named.remove("reference")  # already counted in the actor's update
    return named


class _PoolMemory:
    """The memory of the roles of a pool on each of its devices.

    Attributes:
        roles: title → role.
        parts: title → memory of the role.
        items: memory items of all roles and their processes.
    """

    def __init__(
        self,
        settings: RunSettings,
        algebra: BatchAlgebra,
        size: ModelSize,
        pool: ResourcePool,
        titles: Sequence[str],
        device_bytes: int | None,
    ) -> None:
        self._settings, self._algebra, self._ranks, self._device_bytes = (
            settings,
            algebra,
            pool.world_size,
            device_bytes,
        )
        # A device that is not known yet (placement.device=auto) is assumed to be a GPU.
        self._on_cpu = settings.placement.device == "cpu"
        self._sizes = {title: role_size(settings, _NAMES[title], size) for title in titles}
        self.roles = {title: read_role(settings, _NAMES[title], self._sizes[title], self._on_cpu) for title in titles}
        self._actor = read_role(settings, "actor", size, self._on_cpu)
        self.items: list[MemoryItem] = []
        self.parts: dict[str, MemoryParts] = {}
        for title, role in self.roles.items():
            items = self._list_items(title, role)
            self.items += items
            self.parts[title] = gather_parts(items, role, find_process_memory(role, self._on_cpu))
        shared = [parts.reserve for parts in self.parts.values() if not parts.own_process]
        if shared:
            self.items.append(MemoryItem("workers: context and libraries", max(shared), is_bound=True))
        own = [(title, parts.reserve) for title, parts in self.parts.items() if parts.own_process]
        self.items += [
            MemoryItem(f"{title}: context, libraries and graphs", size_bytes, is_bound=True)
            for title, size_bytes in own
        ]

    def _list_items(self, title: str, role: RoleSpec) -> list[MemoryItem]:
        settings, data = self._settings, self._settings.data
        longest = data.max_prompt_length + data.max_response_length
        if role.kind == "generates":
            cache = Cache(slots_of(settings, self._algebra, self._ranks), longest, longest / 2, self._device_bytes)
            process = find_process_memory(role, self._on_cpu)
            try:
                return list_rollout_items(
                    role,
                    self._actor,
                    rollout_mesh(settings, self._ranks),
                    self._ranks,
                    cache,
                    process,
                    settings.rollout.mode,
                )
            except ReplicaTooLargeError as error:
                raise _describe_too_large(settings, error, self._device_bytes or 0) from error
        rows = micro_batch_rows(settings, self._algebra, role.name, self._ranks, longest)
        sizes = ParallelSizes.read(settings.role_engine(role.name))
        mesh = Mesh(sizes.data(self._ranks), sizes.tensor, sizes.pipeline)
        sends = role.name == "actor" and settings.uses_replicas
        bucket = settings.rollout.update_weights_bucket_megabytes << 20 if sends else 0
        lengths, samples = (data.max_prompt_length, data.max_response_length), self._algebra.samples
        passes = longest_pass(role, mesh, self._ranks, rows, *lengths, samples)
        return list_engine_items(title, role, mesh, self._ranks, passes, bucket)

    def phases(self) -> dict[str, int]:
        """Return phase → peak bytes on a device, for the phases in which the pool takes part."""
        held = held_bytes(list(self.parts.values()))
        names = {"generates": "generating", "forwards": "forward", "trains": "updating"}
        bytes_by_phase = {"held": held}
        for kind, name in names.items():
            mine = [self.parts[title].passing for title, role in self.roles.items() if role.kind == kind]
            bytes_by_phase |= {name: held + max(mine)} if mine else {}
        syncing = sum(parts.syncing for parts in self.parts.values())
        return bytes_by_phase | ({"syncing": held + syncing} if syncing else {})

    def checkpoint_bytes(self, role: RoleSpec) -> int:
        """Return the bytes of a role in a checkpoint: weights and optimizer state."""
        if role.kind != "trains":
            return 0
        size = self._sizes[role.name]
        numbers = size.value_parameters if role.value_head else size.parameters
        return numbers * (role.model.dtype_bytes + role.optimizer_bytes)

    def weight_bytes(self, title: str) -> int:
        """Return the bytes of the weights of the role with this title in a checkpoint."""
        return self._sizes[title].parameters * self.roles[title].model.dtype_bytes


def rollout_mesh(settings: RunSettings, ranks: int) -> Mesh:
    """Return the mesh of the rollout; in the actor's processes it has one copy per data-parallel part.

    Data-parallel copies of attention within a replica count as copies of the whole model, which for a mixture of
    experts is an upper bound.
    """
    if settings.uses_replicas:
        sizes = ParallelSizes.read(settings.rollout)
        return Mesh(sizes.data(ranks), sizes.tensor, sizes.pipeline)
    sizes = ParallelSizes.read(settings.engine)
    return Mesh(sizes.data(ranks), sizes.model)


def _describe_too_large(settings: RunSettings, error: ReplicaTooLargeError, device_bytes: int) -> ConfigError:
    key = next(key for key in ("gpu_memory_utilization", "mem_fraction_static") if hasattr(settings.rollout, key))
    return ConfigError(
        f"rollout.{key}={getattr(settings.rollout, key):g} of a device of {device_bytes / 2**30:.0f} GiB is "
        f"{error.room / 2**30:.1f} GiB, but a replica's weights take {error.weights / 2**30:.1f} GiB on each of its "
        f"{settings.rollout.replica_size} devices, and its process {error.process / 2**30:.1f} GiB; "
        f"raise rollout.{key} or rollout.tensor_model_parallel_size"
    )


def _describe(item: MemoryItem) -> str:
    how = [*(["rough bound"] if item.is_bound else []), *(["in host memory"] if item.on_host else [])]
    aside = f" ({', '.join(how)})" if how else ""
    return f"{item.name} {format_bytes(item.bytes)}{aside}"


def _fits(pool: str, phases: dict[str, int], device_bytes: int, notes: list[str]) -> bool:
    """Return True if the largest phase fits and leaves the headroom free; else append a note."""
    phase, most = max(phases.items(), key=lambda entry: entry[1])
    usable = int(device_bytes * _USABLE)
    if most > usable:
        notes.append(
            f"{pool}: {format_bytes(most)} {phase} does not fit into {_USABLE:.0%} of {format_bytes(device_bytes)}; "
            "more devices, smaller passes, offload or gradient checkpointing would help"
        )
    return most <= usable


def format_bytes(count: int) -> str:
    """Format a size with three significant digits: ``"512 B"``, ``"1.5 GiB"``."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1000:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g} {unit}"
