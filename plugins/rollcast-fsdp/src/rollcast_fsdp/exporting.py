"""Writing Hugging Face folders from a live engine or from its checkpoints, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import CheckpointError, ConfigError
from rollcast_engine.checkpoint_files import check_shards, read_summary
from rollcast_engine.export import build_skeleton, write_folder
from rollcast_engine.hf import checkpoint_parameters
from rollcast_engine.lora import Adapter, merge_pair, write_adapter
from rollcast_engine.weights import WeightFolder
from rollcast_fsdp.checkpoint import read_tensors
from rollcast_fsdp.loading import VALUE_HEAD, match_names

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelConfig, ModelType
    from rollcast_fsdp.tensors import ModelTensors

__all__ = ["export_checkpoint", "export_live"]

#: Bytes of a checkpoint that are read at a time, counted as float32.
_BUCKET = 64 << 20


def export_live(path: Path, model: ModelConfig, model_type: ModelType, tensors: ModelTensors, is_writer: bool) -> None:
    """Write the live model with its adapter merged, and the adapter separately; all ranks must call.

    Raises:
        CheckpointError: the folder cannot be written; only the writing rank raises.
    """
    try:
        write_folder(path, model, model_type, tensors.gather_merged(), is_writer)
    finally:
        adapter = tensors.gather_adapter()
    if is_writer and adapter is not None and model_type == "language_model":
        write_adapter(path, adapter)


def export_checkpoint(checkpoint: Path, model: ModelConfig, output: Path) -> None:
    """Write a checkpoint's model in one process.

    Raises:
        CheckpointError: the checkpoint is incomplete, corrupt, or belongs to another engine or model, or the folder
            cannot be written.
    """
    summary = read_summary(checkpoint, "fsdp")
    check_shards(checkpoint, int(summary["world_size"]), 0, 1)
    model_type, described = summary["model_type"], summary["adapter"]
    if described is None:
        write_folder(output, model, model_type, _stream(checkpoint, summary["parameters"]))
        return
    trained = read_tensors(checkpoint, summary["parameters"])
    write_folder(output, model, model_type, _merge(checkpoint, model, model_type, described, trained))
    if model_type == "language_model":
        own = {name for a, b, _ in described["pairs"].values() for name in (a, b)}
        tensors = {Adapter.peft_name(name): tensor for name, tensor in trained.items() if name in own}
        write_adapter(output, AdapterWeights(described["config"], tensors))


def _stream(checkpoint: Path, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    bucket: dict[str, Any] = {}
    held = 0
    for name, (shape, dtype) in parameters.items():
        bucket[name] = (shape, dtype)
        held += _count_bytes(shape)
        if held >= _BUCKET:
            yield from read_tensors(checkpoint, bucket).items()
            bucket, held = {}, 0
    if bucket:
        yield from read_tensors(checkpoint, bucket).items()


def _count_bytes(shape: list[int]) -> int:
    count = 4
    for size in shape:
        count *= size
    return count


def _merge(
    checkpoint: Path,
    model: ModelConfig,
    model_type: ModelType,
    described: Mapping[str, Any],
    trained: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``model.path`` merged with, or replaced by, those that the checkpoint trained."""
    try:
        source = WeightFolder(Path(model.path))
        if described["base"] not in (None, source.fingerprint()):
            raise CheckpointError(
                f"the adapter in {checkpoint} was trained on other base weights than those in {model.path}"
            )
        dtype = source.read(next(iter(source.shapes))).dtype
        skeleton = build_skeleton(model, model_type, dtype)
        names = match_names(skeleton, source, VALUE_HEAD)
    except ConfigError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} contains an adapter, but its base model cannot be read: {error}"
        ) from error
    for name in checkpoint_parameters(skeleton):
        if name in trained:
            yield name, trained[name]
            continue
        tensor = source.read(names[name])
        if name in described["pairs"]:
            a, b, scaling = described["pairs"][name]
            tensor = merge_pair(tensor, trained[a], trained[b], scaling)
        yield name, tensor
