"""The memory of a role on a mesh; shared by ``rollcast plan`` and the cost models of ``rollcast map``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rollcast_automap.composition import find_trained
from rollcast_automap.contract import (
    Lengths,
    MemoryParts,
    Mesh,
    Mode,
    ModelFacts,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    RolloutLayout,
)
from rollcast_automap.memory.engine_layout import EngineLayout, usual_layout
from rollcast_automap.memory.memory_model import (
    FORWARD_LOGIT_COPIES,
    MemoryItem,
    ModelSize,
    Passes,
    Phase,
    bound_activations,
    bound_forward,
    bound_logits,
    count_adapter_state,
    count_frozen,
    count_gathered,
    count_kv_cache,
    count_trained,
    count_unreduced,
    parameters_on_rank,
)
from rollcast_automap.memory.process_memory import ProcessMemory, find_process_memory

__all__ = [
    "Cache",
    "ReplicaTooLargeError",
    "gather_parts",
    "list_engine_items",
    "list_rollout_items",
    "longest_of",
    "longest_pass",
    "price_memory",
    "size_of",
]

#: Name of an item, without its role → field of ``MemoryParts``.
_PARTS = {
    "parameters": "parameters",
    "weights": "parameters",
    "actor's weights": "parameters",
    "adapter": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "gathered weights": "gathered",
    "unreduced gradients": "gathered",
    "activations": "activations",
    "logits": "logits",
    "KV cache": "kv_cache",
    "sync bucket": "buckets",
}


class ReplicaTooLargeError(Exception):
    """Weights and process of a replica leave no room for the KV cache in the replica's share of a device.

    Args:
        room: share of the device in bytes.
        weights: bytes of the weights on each device.
        process: bytes of the process beyond its tensors.
    """

    def __init__(self, room: int, weights: int, process: int) -> None:
        super().__init__(room, weights, process)
        self.room, self.weights, self.process = room, weights, process


@dataclass(frozen=True)
class Cache:
    """The sequences that the KV cache of a rollout has to hold.

    Attributes:
        rows: sequences that a replica decodes at a time.
        row_tokens: tokens of the longest row.
        mean_tokens: mean tokens of a row.
        device_bytes: memory of a device in bytes; None if not known.
    """

    rows: int
    row_tokens: int
    mean_tokens: float
    device_bytes: int | None = None


def size_of(model: ModelFacts) -> ModelSize:
    """Return the sizes of a model."""
    head = 0 if model.tied else model.hidden * model.vocab
    return ModelSize(
        parameters=model.parameters,
        value_parameters=model.parameters - head + model.hidden + 1,
        layers=model.layers,
        hidden=model.hidden,
        intermediate=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_size,
        vocabulary=model.vocab,
    )


def longest_of(lengths: Lengths) -> int:
    """Return the longest length in tokens: the quantile of probability 1 if there is one, else the maximum."""
    if lengths.quantiles and lengths.quantiles[-1][0] >= 1:
        return round(lengths.quantiles[-1][1])
    return lengths.maximum


def longest_pass(
    role: RoleSpec, mesh: Mesh, devices: int, rows: int, prompt: int, response: int, samples: int
) -> Passes:
    """Return the largest micro-batch of a role that does not generate.

    Args:
        role: role that does not generate.
        mesh: mesh of the role.
        devices: number of devices in the role's pool.
        rows: rows of the micro-batch.
        prompt, response: longest lengths in tokens.
        samples: responses per prompt.
    """
    keeps = role.training or usual_layout(role)
    if keeps.shares_prompts and not EngineLayout.of(role, mesh, devices).gathers:
        prompt = -(-prompt // min(samples, rows))
    return Passes(rows, prompt + response, response)


def list_engine_items(
    title: str, role: RoleSpec, mesh: Mesh, devices: int, passes: Passes, bucket_bytes: int = 0
) -> list[MemoryItem]:
    """Return the memory items of a role that does not generate, on each of its devices.

    Args:
        title: name of the role in the items.
        role: role that does not generate.
        mesh: mesh of the role.
        devices: number of devices in the role's pool.
        passes: largest micro-batch of the role.
        bucket_bytes: bytes of the largest weight sync bucket; 0 for a role that sends no weights.
    """
    size, layout, keeps = size_of(role.model), EngineLayout.of(role, mesh, devices), role.training or usual_layout(role)
    parameters = parameters_on_rank(size, layout, role.value_head)
    trains = role.kind == "trains"
    if trains and role.adapter_parameters:
        items = count_frozen(title, parameters, layout)
        items += count_adapter_state(title, role.adapter_parameters, layout)
    elif keeps.shares_weights:
        items = []
    else:
        items = (count_trained if trains else count_frozen)(title, parameters, layout)
    if keeps.reference is not None:
        on_host = keeps.reference == "host"
        copy = count_frozen("reference", parameters, layout)
        items += [replace(item, on_host=on_host, phase="update" if on_host else "held") for item in copy]
    if layout.streams_weights:
        # Not parts of the device's memory, as the activations that are kept in host memory.
        items = [replace(item, name=item.name.replace(": ", ": kept "), on_host=True) for item in items]
    items += _list_pass_items(title, role, size, layout, passes)
    if bucket_bytes:
        items.append(MemoryItem(f"{title}: sync bucket", _gathered_bucket(size, layout, bucket_bytes), "sync"))
    return items


def _list_pass_items(
    title: str, role: RoleSpec, size: ModelSize, layout: EngineLayout, passes: Passes
) -> list[MemoryItem]:
    """Return the items that the largest pass of a role that does not generate adds, in its phase."""
    keeps = role.training or usual_layout(role)
    trains, eager = role.kind == "trains", keeps.eager_attention
    phase: Phase = "update" if trains else "forward"
    items: list[MemoryItem] = []
    if layout.gathers:
        gathered = count_gathered(size, layout, 2 if trains else 3)
        items.append(MemoryItem(f"{title}: gathered weights", gathered, phase))
    if layout.gathers and trains and not role.adapter_parameters:
        unreduced = count_unreduced(size, layout, role.value_head)
        items.append(MemoryItem(f"{title}: unreduced gradients", unreduced, phase))
    if trains and layout.activation_offload:
        kept, _ = bound_activations(size, passes, replace(layout, activation_offload=False), eager)
        items.append(MemoryItem(f"{title}: kept activations", kept, phase, on_host=True, is_bound=True))
    if trains:
        kept, at_work = bound_activations(size, passes, layout, eager)
    else:
        kept, at_work = 0, bound_forward(size, passes, layout, eager)
    logits = 0
    if not role.value_head:
        copies: float = keeps.logit_copies if trains else FORWARD_LOGIT_COPIES
        if layout.head_positions is None:  # whole: autograd has one more, and a forward those that the model returns
            copies = copies + 1 if trains else 1 + layout.computed / 4
        logits = bound_logits(size, passes, layout, copies)
        items.append(MemoryItem(f"{title}: logits", logits, phase, is_bound=True))
    # The logits exist when no layer is at work, so only what that needs beyond them counts.
    items.append(MemoryItem(f"{title}: activations", kept + max(at_work - logits, 0), phase, is_bound=True))
    return items


def list_rollout_items(
    role: RoleSpec, trained: RoleSpec | None, mesh: Mesh, devices: int, cache: Cache, process: ProcessMemory, mode: Mode
) -> list[MemoryItem]:
    """Return the memory items of a rollout on each of its devices.

    Args:
        role: role of the rollout.
        trained: role whose weights the rollout receives.
        mesh: mesh of the rollout.
        devices: number of devices in the rollout's pool.
        cache: sequences that the KV cache has to hold.
        process: memory of a replica's process beyond its tensors.
        mode: rollout mode.

    Raises:
        ReplicaTooLargeError: no memory is left for the KV cache.
    """
    size, layout = size_of(role.model), role.rollout or RolloutLayout()
    rows = cache.rows if layout.max_rows is None else min(cache.rows, layout.max_rows)
    computed = role.model.dtype_bytes
    if trained is not None and not _is_replicated(role):
        # Each rank holds the whole cache, because a rollout in the actor's processes does not split the model.
        cache_bytes = count_kv_cache(size, rows, cache.row_tokens, computed)
        items = _weights_in_process(size, trained, mesh, devices)
        return [*items, MemoryItem("rollout: KV cache", cache_bytes, "generate", is_bound=True)]
    weights = parameters_on_rank(size, EngineLayout(1, tensor=mesh.tensor, pipeline=mesh.pipeline)) * computed
    phase: Phase = "generate" if mode == "hybrid" and layout.releases_memory else "held"
    needed = count_kv_cache(size, rows, cache.row_tokens, computed, mesh.tensor, mesh.pipeline)
    is_bound = layout.cache_bytes is None
    if layout.cache_bytes is not None:
        needed = layout.cache_bytes
    elif layout.memory_share is not None and cache.device_bytes is not None:
        room = int(cache.device_bytes * layout.memory_share)
        left, is_bound = room - weights - process.total, False
        if left <= 0:
            raise ReplicaTooLargeError(room, weights, process.total)
        # Rows that do not fit wait in the engine's queue, so room for all rows at their mean length is enough.
        mean = round(cache.mean_tokens)
        needed = max(left, count_kv_cache(size, rows, mean, computed, mesh.tensor, mesh.pipeline))
    items = [
        MemoryItem("rollout: weights", weights, phase),
        MemoryItem("rollout: KV cache", needed, phase, is_bound=is_bound),
    ]
    if layout.bucket_bytes:
        bucket = _bucket(size, computed, layout.bucket_bytes)
        items.append(MemoryItem("rollout: sync bucket", layout.sync_buffers * bucket, "sync"))
    return items


def _is_replicated(role: RoleSpec) -> bool:
    return role.own_process or role.rollout is None


def _weights_in_process(size: ModelSize, trained: RoleSpec, mesh: Mesh, devices: int) -> list[MemoryItem]:
    """Return the weights that a rollout in the trained role's processes adds to the device while it generates."""
    layout = EngineLayout.of(trained, Mesh(data=mesh.data, tensor=mesh.tensor), devices)
    items = []
    if layout.gathers or mesh.tensor * mesh.pipeline > 1:
        items.append(MemoryItem("rollout: weights", size.parameters * layout.computed, "generate"))
    if layout.param_offload:
        own = -(-layout.shard(size.parameters) // mesh.pipeline) * layout.stored
        items.append(MemoryItem("rollout: actor's weights", own, "generate"))
    return items


def _bucket(size: ModelSize, stored: int, bucket_bytes: int) -> int:
    """Return the bytes of the largest bucket; a tensor above ``bucket_bytes``, such as the embedding, is one bucket."""
    return min(max(bucket_bytes, size.vocabulary * size.hidden * stored), size.parameters * stored)


def _gathered_bucket(size: ModelSize, layout: EngineLayout, bucket_bytes: int) -> int:
    """Return the bytes of a bucket in the engine's dtype, and of the largest tensor, which did not fit into it."""
    bucket = bucket_bytes * layout.stored // min(layout.stored, layout.computed)
    return min(bucket + size.vocabulary * size.hidden * layout.stored, size.parameters * layout.stored)


def gather_parts(items: Iterable[MemoryItem], role: RoleSpec, process: ProcessMemory) -> MemoryParts:
    """Return the items of a role as memory parts; items without a part, such as kept activations, are left out."""
    sizes: dict[str, int] = {}
    visiting = set()
    for item in items:
        part = _PARTS.get(item.name.partition(": ")[2])
        if part is None:
            continue
        if part == "parameters" and item.phase == "update":
            part = "gathered"  # a temporary copy; the role's own weights may stay on the device all the time
        sizes[part] = sizes.get(part, 0) + item.bytes
        if item.on_host or item.phase == "generate" or (part, item.phase) == ("gradients", "update"):
            visiting.add(part)
    # A part is offloaded as a whole, so an adapter counts as offloaded together with the base weights.
    return MemoryParts(
        **sizes, reserve=process.total, visiting=frozenset(visiting), own_process=role.own_process and bool(sizes)
    )


def price_memory(
    problem: Problem,
    role: RoleSpec,
    placement: Placement,
    pool: Pool,
    mode: Mode,
    reserve_bytes: int | None = None,
    graph_bytes: int | None = None,
) -> MemoryParts:
    """Return the memory of a role on each of its devices; more than a device has if a replica cannot start.

    Args:
        problem: problem with the lengths and the other roles.
        role: role to price.
        placement: mesh and micro-batch of the role.
        pool: devices of the role.
        mode: rollout mode.
        reserve_bytes, graph_bytes: bytes of a process beyond its tensors, and of its CUDA graphs; None for the figures
            of its device and plugin.
    """
    kinds = [problem.cluster.nodes[node].kind for node, _ in pool.places]
    on_cpu = all(kind.name == "cpu" for kind in kinds)
    process = find_process_memory(role, on_cpu, reserve_bytes, graph_bytes)
    response = longest_of(problem.response_lengths)
    longest, trained = longest_of(problem.prompt_lengths) + response, find_trained(problem)
    if role.kind != "generates":
        sends = trained is not None and role.name == trained.name
        rollouts = [spec for spec in problem.roles if spec.kind == "generates" and _is_replicated(spec)]
        layouts = [rollout.rollout or RolloutLayout() for rollout in rollouts] if sends else []
        bucket = max((layout.bucket_bytes for layout in layouts), default=0)
        rows, prompt = placement.micro_batch_rows, longest - response
        passes = longest_pass(role, placement.mesh, pool.devices, rows, prompt, response, problem.samples)
        items = list_engine_items(role.name, role, placement.mesh, pool.devices, passes, bucket)
        return gather_parts(items, role, process)
    mean, smallest = problem.prompt_lengths.mean + problem.response_lengths.mean, min(k.memory_bytes for k in kinds)
    rows = min(placement.micro_batch_rows, -(-problem.rows // placement.mesh.data))
    cache = Cache(rows, longest, mean, smallest)
    try:
        items = list_rollout_items(role, trained, placement.mesh, pool.devices, cache, process, mode)
    except ReplicaTooLargeError as error:
        return MemoryParts(error.weights, kv_cache=smallest, reserve=process.total, own_process=role.own_process)
    return gather_parts(items, role, process)
