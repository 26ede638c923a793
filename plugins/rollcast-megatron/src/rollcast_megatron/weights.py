"""Weights on their way from a Hugging Face folder to the ranks, and back: one parameter at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rollcast.errors import ConfigError
from rollcast_engine.export import build_skeleton
from rollcast_engine.hf import WEIGHT_PATTERNS, parameters_by_name
from rollcast_engine.weights import WeightFolder
from rollcast_megatron.build import Placed, Plan, find_name

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelConfig, ModelType

__all__ = ["Shapes", "gather", "hf_shapes", "load_folder", "load_random", "open_folder"]

#: Shape of each parameter by its Hugging Face name; tied ones once.
Shapes = dict[str, torch.Size]


def hf_shapes(model: ModelConfig, model_type: ModelType) -> Shapes:
    """The parameters of the folder's model as transformers has them, without memory for them."""
    skeleton = build_skeleton(model, model_type, torch.float32)
    return {name: tensor.shape for name, tensor in parameters_by_name(skeleton).items()}


def open_folder(path: Path) -> WeightFolder:
    """The folder's safetensors, to be read slice by slice.

    Raises:
        ConfigError: there are none, or one cannot be read; says what to do.
    """
    if not any(path.glob("*.safetensors")):
        other = any(any(path.glob(pattern)) for pattern in WEIGHT_PATTERNS)
        hint = (
            "the megatron engine reads safetensors: load the folder with transformers and save_pretrained() it"
            if other
            else "set model.random_init=true to start from random ones"
        )
        raise ConfigError(f"model.path {path} holds no weights in *.safetensors; {hint}")
    return WeightFolder(path)


def load_folder(plan: Plan, parameters: dict[str, Tensor], shapes: Shapes, folder: WeightFolder) -> None:
    """Set this rank's parameters from a folder, reading no more than they need.

    Raises:
        ConfigError: the folder lacks parameters, or they have other shapes.
    """
    own = [placed for placed in plan.weights() if placed.stage == plan.mesh.pipeline_rank]
    optional = {"score.weight", "score.bias"}
    needed = [name for placed in plan.weights() for name in placed.weight.sources if name not in optional]
    missing = sorted({name for name in needed if name not in folder})
    if missing:
        raise ConfigError(
            f"the weights in {folder.folder} lack {len(missing)} parameters, such as {', '.join(missing[:3])}"
        )
    for placed in own:
        if placed.weight.sources[0] in optional and not _has_head(folder, placed.weight.sources[0], shapes):
            continue
        shares = [_read_share(plan, placed, name, shapes[name], folder) for name in placed.weight.sources]
        _set(plan, placed, parameters, shares)


def load_random(plan: Plan, parameters: dict[str, Tensor], shapes: Shapes, seed: int, std: float) -> None:
    """Set this rank's parameters to random numbers that are the same on every mesh.

    Matrices are normal with deviation ``std``, norms one, biases and a value head zero.
    """
    for placed in plan.weights():
        if placed.stage != plan.mesh.pipeline_rank:
            continue
        shares = []
        for name in placed.weight.sources:
            whole = _random(name, shapes[name], seed, std)
            dim = placed.weight.layout.dim
            if dim is not None:
                start, size = _span(plan, shapes[name][dim])
                whole = whole.narrow(dim, start, size)
            shares.append(whole)
        _set(plan, placed, parameters, shares)


def gather(plan: Plan, parameters: dict[str, Tensor], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, by its Hugging Face name, on every rank; one at a time.

    All ranks go through it to the end together.
    """
    mesh = plan.mesh
    dtype, device = next((tensor.dtype, tensor.device) for tensor in parameters.values())
    for placed in plan.weights():
        if placed.is_copy:
            continue
        names = placed.weight.sources
        if placed.stage == mesh.pipeline_rank:
            shard = parameters[find_name(placed, parameters)].detach()
            shares = placed.weight.layout.unfuse(shard, mesh.tensor_size)
            wholes = [_join(plan, placed, share, shapes[name]) for name, share in zip(names, shares, strict=True)]
        else:
            wholes = [torch.empty(shapes[name], dtype=dtype, device=device) for name in names]
        for name, whole in zip(names, wholes, strict=True):
            if mesh.pipeline_size > 1:
                dist.broadcast(whole, mesh.stage_rank(placed.stage), group=mesh.pipeline_group)
            yield name, whole


def _join(plan: Plan, placed: Placed, share: Tensor, shape: torch.Size) -> Tensor:
    dim, ranks = placed.weight.layout.dim, plan.mesh.tensor_size
    share = share.contiguous()
    if dim is None or ranks == 1:
        return share
    shares = [torch.empty_like(share) for _ in range(ranks)]
    dist.all_gather(shares, share, group=plan.mesh.tensor_group)
    return torch.cat(shares, dim).narrow(dim, 0, shape[dim]).contiguous()


def _span(plan: Plan, length: int) -> tuple[int, int]:
    """Where this rank's share of a dimension starts, and how long it is."""
    share = -(-length // plan.mesh.tensor_size)
    start = min(plan.mesh.tensor_rank * share, length)
    return start, min(share, length - start)


def _read_share(plan: Plan, placed: Placed, name: str, shape: torch.Size, folder: WeightFolder) -> Tensor:
    """This rank's part of a parameter of the folder.

    Raises:
        ConfigError: it has another shape than the folder's config says.
    """
    given = folder.shapes[name]
    if given != tuple(shape):
        raise ConfigError(f"{name} in {folder.folder} is {list(given)}, where config.json makes it {list(shape)}")
    dim, region = placed.weight.layout.dim, [slice(0, size) for size in shape]
    if dim is not None:
        start, size = _span(plan, shape[dim])
        region[dim] = slice(start, start + size)
    return folder.read(name, region)


def _set(plan: Plan, placed: Placed, parameters: dict[str, Tensor], shares: list[Tensor]) -> None:
    parameter = parameters[find_name(placed, parameters)]
    fused = placed.weight.layout.fuse(shares, plan.mesh.tensor_size)
    with torch.no_grad():
        if placed.is_vocabulary:
            parameter.zero_()
            parameter[: fused.size(0)].copy_(fused)
        else:
            parameter.copy_(fused)


def _has_head(folder: WeightFolder, name: str, shapes: Shapes) -> bool:
    """A value head stays zero unless the folder is an exported value model, and no classifier with several labels."""
    return name in folder and folder.shapes[name] == tuple(shapes[name])


def _random(name: str, shape: torch.Size, seed: int, std: float) -> Tensor:
    if name.startswith("score.") or name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape).normal_(0.0, std, generator=generator)
