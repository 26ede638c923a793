"""Moving weights between a Hugging Face folder and the ranks, a bounded number of bytes at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rollcast.errors import ConfigError
from rollcast_engine.export import build_skeleton
from rollcast_engine.hf import WEIGHT_PATTERNS, checkpoint_parameters
from rollcast_engine.weights import WeightFolder
from rollcast_megatron.build import Placed, Plan, find_name

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelConfig, ModelType

__all__ = ["VALUE_HEAD", "Shapes", "gather", "hf_shapes", "load_folder", "load_random", "open_folder"]

#: Parameters of a value model that a folder may lack.
VALUE_HEAD = frozenset({"score.weight", "score.bias"})
#: Maximum bytes that ranks gather in one collective; a larger parameter is gathered alone.
_GATHERED_BYTES = 64 << 20
_ALIGNMENT = 64

#: Shape of each parameter by its Hugging Face name; tied ones once.
Shapes = dict[str, torch.Size]


def hf_shapes(model: ModelConfig, model_type: ModelType) -> Shapes:
    """Return the shapes of the parameters of the folder's transformers model, without memory for them."""
    skeleton = build_skeleton(model, model_type, torch.float32)
    return {name: tensor.shape for name, tensor in checkpoint_parameters(skeleton).items()}


def open_folder(path: Path) -> WeightFolder:
    """Return the folder's safetensors, to be read slice by slice.

    Raises:
        ConfigError: the folder has none, or one cannot be read; the message says what to do.
    """
    if not any(path.glob("*.safetensors")):
        other = any(any(path.glob(pattern)) for pattern in WEIGHT_PATTERNS)
        hint = (
            "the megatron engine reads safetensors: load the folder with transformers and save_pretrained() it"
            if other
            else "set model.random_init=true to start from random ones"
        )
        raise ConfigError(f"model.path {path} contains no *.safetensors; {hint}")
    return WeightFolder(path)


def load_folder(plan: Plan, parameters: Mapping[str, Tensor], shapes: Shapes, folder: WeightFolder) -> None:
    """Set this rank's parameters from a folder, reading only the slices that it needs.

    Raises:
        ConfigError: the folder lacks parameters, or they have other shapes.
    """
    own = [placed for placed in plan.weights() if placed.stage == plan.mesh.pipeline_rank]
    needed = [name for placed in plan.weights() for name in placed.all_sources if name not in VALUE_HEAD]
    missing = sorted({name for name in needed if name not in folder})
    if missing:
        raise ConfigError(
            f"the weights in {folder.folder} lack {len(missing)} parameters, such as {', '.join(missing[:3])}"
        )
    for placed in own:
        if placed.weight.sources[0] in VALUE_HEAD and not _has_head(folder, placed.weight.sources[0], shapes):
            continue
        shares = [_read_share(plan, placed, name, shapes[name], folder) for name in placed.weight.sources]
        _set(plan, placed, parameters, shares)


def load_random(plan: Plan, parameters: Mapping[str, Tensor], shapes: Shapes, seed: int, std: float) -> None:
    """Set this rank's parameters to random numbers that are the same on every mesh.

    Matrices are normal with standard deviation ``std``, norms are one, and biases and a value head are zero.
    """
    for placed in plan.weights():
        if placed.stage != plan.mesh.pipeline_rank:
            continue
        shares = []
        for name in placed.weight.sources:
            whole = _random(name, shapes[name], seed, std)
            dim = _split_dim(plan, placed)
            if dim is not None:
                start, size = _span(plan, shapes[name][dim])
                whole = whole.narrow(dim, start, size)
            shares.append(whole)
        _set(plan, placed, parameters, shares)


def gather(
    plan: Plan,
    parameters: Mapping[str, Tensor],
    shapes: Shapes,
    limit: int = _GATHERED_BYTES,
    weights: Iterable[Placed] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter whole, by its Hugging Face name, on every rank; all ranks must iterate to the end together.

    Consecutive parameters of a stage share one collective: a model has hundreds of small ones, and each collective
    waits for every rank.

    Args:
        plan: mesh of the model, and its parameters.
        parameters: this rank's parameters by megatron-core's names.
        shapes: shapes of the whole parameters.
        limit: bytes of the whole parameters in one collective; a larger parameter is gathered alone.
        weights: parameters to yield, of all stages; None for those of the model.
    """
    like = next(iter(parameters.values())).detach()
    rooms = _Rooms(plan, like.device)
    for batch in _batches(plan.weights() if weights is None else weights, shapes, like.dtype, limit):
        names = [name for placed in batch for name in placed.all_sources]
        own = batch[0].stage == plan.mesh.pipeline_rank
        wholes = _join(plan, batch, parameters, shapes, rooms) if own else iter(())
        if own and plan.mesh.expert_size > 1 and batch[0].peers:
            wholes = _exchange(plan, batch, list(wholes))
        if plan.mesh.pipeline_size > 1:
            example = like if batch[0].weight.dtype is None else like.to(batch[0].weight.dtype)
            wholes = _spread(plan, batch[0].stage, wholes, example, [shapes[name] for name in names])
        yield from zip(names, wholes, strict=True)


def _batches(weights: Iterable[Placed], shapes: Shapes, dtype: torch.dtype, limit: int) -> Iterator[list[Placed]]:
    """Yield the parameters to export, in order, in batches that share a collective."""
    batch: list[Placed] = []
    held = 0
    for placed in weights:
        if placed.is_copy:
            continue
        size = sum(shapes[name].numel() for name in placed.all_sources) * dtype.itemsize
        other = batch and _kind(placed) != _kind(batch[0])
        if batch and (held + size > limit or other):
            yield batch
            batch, held = [], 0
        batch.append(placed)
        held += size
    if batch:
        yield batch


def _kind(placed: Placed) -> tuple[int, bool, torch.dtype | None]:
    """Return what the parameters of one collective have in common."""
    return placed.stage, bool(placed.peers), placed.weight.dtype


def _join(
    plan: Plan, batch: list[Placed], parameters: Mapping[str, Tensor], shapes: Shapes, rooms: _Rooms
) -> Iterator[Tensor]:
    """Yield the whole tensors of a batch on the ranks of its stage."""
    ranks = plan.mesh.tensor_size
    shares: list[tuple[Placed, str, int | None, Tensor]] = []
    for placed in batch:
        shard = parameters[find_name(placed, parameters)].detach()
        if placed.weight.layout.splits_fused(ranks):
            shares.append((placed, "", 0, shard))
            continue
        parts = placed.weight.layout.unfuse(shard, ranks)
        dim = placed.weight.layout.dim if ranks > 1 else None
        shares += [(placed, name, dim, part) for name, part in zip(placed.weight.sources, parts, strict=True)]
    gathered = rooms.gather([part for _, _, dim, part in shares if dim is not None])
    for placed, name, dim, part in shares:
        if dim is None:
            yield part.contiguous()
        elif name:
            yield torch.cat(next(gathered), dim).narrow(dim, 0, shapes[name][dim]).contiguous()
        else:
            yield from (tensor.contiguous() for tensor in placed.weight.layout.unfuse(torch.cat(next(gathered)), 1))


class _Rooms:
    """Reused buffers of gathers: on a CPU, allocating fresh memory takes longer than the gather."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._ranks, self._group = plan.mesh.tensor_size, plan.mesh.tensor_group
        self._own, self._all = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))

    def gather(self, shares: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield each share of every tensor-parallel rank, gathered in one collective; valid until the next call."""
        # Gathered as bytes, because a model's parameters may differ in dtype; each is aligned for any dtype.
        lengths = [-(-share.numel() * share.element_size() // _ALIGNMENT) * _ALIGNMENT for share in shares]
        size = sum(lengths)
        if not shares:
            return
        if len(self._own) < size:
            self._own, self._all = self._own.new_empty(size), self._own.new_empty(size * self._ranks)
        own, whole = self._own[:size], self._all[: size * self._ranks]
        for share, room in zip(shares, own.split(lengths), strict=True):  # type: ignore[no-untyped-call]
            _view(room, share.dtype, share.shape).copy_(share)
        # The name since torch 2.13; the old name warns there.
        collect = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        collect(whole, own, group=self._group)
        rooms = whole.view(self._ranks, -1).split(lengths, dim=1)  # type: ignore[no-untyped-call]
        for share, room in zip(shares, rooms, strict=True):
            yield [_view(buffer, share.dtype, share.shape) for buffer in room]


def _exchange(plan: Plan, batch: list[Placed], wholes: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of all expert-parallel ranks, in the order of ``all_sources``, from this rank's own."""
    flat = torch.cat([whole.reshape(-1) for whole in wholes])
    every = [torch.empty_like(flat) for _ in range(plan.mesh.expert_size)]
    dist.all_gather(every, flat, group=plan.mesh.expert_group)
    parts = [rank.split([whole.numel() for whole in wholes]) for rank in every]  # type: ignore[no-untyped-call]
    first = 0
    for placed in batch:
        count = len(placed.weight.sources)
        for own in parts:
            for part, whole in zip(own[first : first + count], wholes[first : first + count], strict=True):
                yield part.view(whole.shape)
        first += count


def _spread(
    plan: Plan, stage: int, wholes: Iterator[Tensor], like: Tensor, shapes: list[torch.Size]
) -> Iterator[Tensor]:
    """Return a stage's whole tensors on all stages, broadcast in one collective; ``wholes`` is empty elsewhere."""
    lengths = [shape.numel() for shape in shapes]
    flat = like.new_empty(sum(lengths))
    rooms = flat.split(lengths)  # type: ignore[no-untyped-call]
    for whole, room in zip(wholes, rooms, strict=False):
        room.copy_(whole.reshape(-1))
    dist.broadcast(flat, plan.mesh.stage_rank(stage), group=plan.mesh.pipeline_group)
    return (room.view(shape) for room, shape in zip(rooms, shapes, strict=True))


def _view(room: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the first bytes of ``room`` as a tensor."""
    return room[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _span(plan: Plan, length: int) -> tuple[int, int]:
    """Return start and length of this rank's share of a dimension."""
    share = -(-length // plan.mesh.tensor_size)
    start = min(plan.mesh.tensor_rank * share, length)
    return start, min(share, length - start)


def _split_dim(plan: Plan, placed: Placed) -> int | None:
    """Return the dimension along which a rank reads its share of each transformers parameter; None if it reads all."""
    layout = placed.weight.layout
    return None if layout.splits_fused(plan.mesh.tensor_size) else layout.dim


def _read_share(plan: Plan, placed: Placed, name: str, shape: torch.Size, folder: WeightFolder) -> Tensor:
    """Return this rank's part of a parameter of the folder.

    Raises:
        ConfigError: the parameter's shape differs from the folder's config.
    """
    full_shape = folder.shapes[name]
    if full_shape != tuple(shape):
        raise ConfigError(
            f"{name} in {folder.folder} has shape {list(full_shape)}, but config.json implies {list(shape)}"
        )
    dim, region = _split_dim(plan, placed), [slice(0, size) for size in shape]
    if dim is not None:
        start, size = _span(plan, shape[dim])
        region[dim] = slice(start, start + size)
    return folder.read(name, region)


def _set(plan: Plan, placed: Placed, parameters: Mapping[str, Tensor], shares: list[Tensor]) -> None:
    parameter = parameters[find_name(placed, parameters)]
    ranks = plan.mesh.tensor_size
    if placed.weight.layout.splits_fused(ranks):
        fused = placed.weight.layout.fuse(shares, 1).chunk(ranks)[plan.mesh.tensor_rank]
    else:
        fused = placed.weight.layout.fuse(shares, ranks)
    with torch.no_grad():
        if placed.is_vocabulary:
            parameter.zero_()
            parameter[: fused.size(0)].copy_(fused)
        else:
            parameter.copy_(fused)


def _has_head(folder: WeightFolder, name: str, shapes: Shapes) -> bool:
    """Return True if the folder has the value head of one label; otherwise the head stays zero."""
    return name in folder and folder.shapes[name] == tuple(shapes[name])


def _random(name: str, shape: torch.Size, seed: int, std: float) -> Tensor:
    if name.startswith("score.") or name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape).normal_(0.0, std, generator=generator)
