"""Writing a Hugging Face folder from weights that arrive one at a time."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from rollcast.contracts.weights import find_stacked, keep_float32, split_stacked
from rollcast.errors import CheckpointError
from rollcast_data.vision.model_inputs import auto_class_name
from rollcast_engine.hf import (
    ValueModel,
    checkpoint_parameters,
    holds_weights,
    is_converted,
    load_hf_config,
    parameters_by_name,
    transformer,
)
from rollcast_engine.safetensors_writer import SHARD_BYTES, SafetensorsWriter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import ModelConfig, ModelType

__all__ = ["build_skeleton", "write_folder"]

_WRITE_ERRORS = (OSError, SafetensorError, ValueError)


def write_folder(
    path: Path,
    model: ModelConfig,
    model_type: ModelType,
    tensors: Iterable[tuple[str, Tensor]],
    is_writer: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config, ``model*.safetensors`` and the other files of ``model.path`` (tokenizer, templates, custom code).

    At most one tensor is held in memory, besides what ``tensors`` itself needs. For models whose names or file layout
    transformers converts in other ways than to stack experts, all tensors are held.

    Args:
        path: folder to create.
        model: model that the weights were first loaded from.
        model_type: a value model is written as ``...ForTokenClassification`` with one label.
        tensors: all parameters by name, whole, in any order; tied ones once, and stacked experts as they are or split.
            Consumed to the end on every rank, even after an error, because other ranks may wait in it.
        is_writer: True on the rank that writes; the others only consume ``tensors``.
        shard_bytes: maximum size of a weights file in bytes.

    Raises:
        CheckpointError: the tensors are not those of ``model``, or the folder cannot be written; only the writing rank
            raises.
    """
    arriving = iter(tensors)
    try:
        if is_writer:
            _write(path, model, model_type, arriving, shard_bytes)
    finally:
        for _ in arriving:
            pass


def _write(
    path: Path, model: ModelConfig, model_type: ModelType, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int
) -> None:
    first = next(tensors, None)
    if first is None:
        raise CheckpointError(f"{path} cannot be written: there are no weights")
    dtype = first[1].dtype
    tensors = itertools.chain([first], tensors)
    del first  # drop the reference, so that the first tensor is freed as early as the others
    skeleton = build_skeleton(model, model_type, dtype)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_weights(path)
        _copy_companions(Path(model.path), path)
        if is_converted(skeleton):
            _write_converted(path, skeleton, tensors)
        else:
            _write_config(path, skeleton, dtype)
            _write_tensors(path, skeleton, tensors, shard_bytes)
    except _WRITE_ERRORS as error:
        raise CheckpointError(f"{path} cannot be written as the model in {model.path}: {error}") from error


def build_skeleton(model: ModelConfig, model_type: ModelType, dtype: torch.dtype) -> Any:
    """Return the model on the meta device: names, shapes and ties without memory for its weights."""
    import transformers

    config = load_hf_config(model)
    auto: Any = getattr(transformers, auto_class_name(config) if model_type == "language_model" else "AutoModel")
    with torch.device("meta"):
        module = auto.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
        module.tie_weights()
        keep_float32(module)
        return module if model_type == "language_model" else ValueModel(module)


def _write_tensors(path: Path, skeleton: nn.Module, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    layout = {
        name: (tuple(parameter.shape), parameter.dtype) for name, parameter in checkpoint_parameters(skeleton).items()
    }
    kinds = find_stacked(transformer(skeleton)) or ()
    writer = SafetensorsWriter(path, layout, shard_bytes)
    try:
        for name, tensor in tensors:
            for source, part in split_stacked(kinds, name, tensor).items():
                writer.write(source, part)
            del tensor, part  # before the next tensor exists
        writer.finish()
    finally:
        writer.close()


def _write_converted(path: Path, skeleton: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters_by_name(skeleton).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    different = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if different:
        name = different[0]
        raise ValueError(f"tensor {name} has shape {shapes.get(name)}; the model's has {expected.get(name)}")
    skeleton.save_pretrained(path, state_dict=state)


def _write_config(path: Path, skeleton: Any, dtype: torch.dtype) -> None:
    config = skeleton.config
    config.dtype = dtype
    if isinstance(skeleton, ValueModel):
        causal = (config.architectures or ["ForCausalLM"])[0]
        config.architectures = [causal.replace("ForCausalLM", "ForTokenClassification")]
        config.num_labels = 1
    else:
        config.architectures = [type(skeleton).__name__]
        if not (path / "generation_config.json").is_file():
            skeleton.generation_config.save_pretrained(path)
    config.save_pretrained(path)


def _remove_weights(path: Path) -> None:
    """Delete the weights of an earlier export, which would otherwise be loaded along with the new ones."""
    for file in [*path.iterdir()]:
        if file.is_file() and holds_weights(file):
            file.unlink()


def _copy_companions(source: Path, target: Path, own: str = "config.json") -> None:
    """Copy tokenizer, templates, processor and custom code, with their subfolders, but no weights in any format.

    A subfolder with weights, such as ``original`` or ``onnx``, is another copy of the untrained model and is left out.

    Args:
        own: name of a file that the export writes itself.
    """
    if source.resolve() == target.resolve():
        return
    for file in sorted(source.iterdir()):
        if file.name.startswith(".") or file.name == "__pycache__":
            continue
        if file.is_file() and not holds_weights(file) and file.name != own:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / file.name)
        elif file.is_dir() and not file.is_symlink() and not _is_model(file, target):
            _copy_companions(file, target / file.name, own="")


def _is_model(folder: Path, target: Path) -> bool:
    """Return True if a subfolder holds weights, or the export itself."""
    return target.resolve().is_relative_to(folder.resolve()) or any(map(holds_weights, folder.iterdir()))
