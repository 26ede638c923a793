"""Writing a Hugging Face folder from gathered weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollcast.errors import CheckpointError
from rollcast_engine.hf import WEIGHT_PATTERNS, ValueModel, load_hf_config, parameters_by_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import ModelConfig, ModelType

__all__ = ["write_folder"]


def write_folder(path: Path, model: ModelConfig, model_type: ModelType, tensors: dict[str, Tensor]) -> None:
    """Write config, ``model.safetensors`` and what else ``model.path`` holds (tokenizer, own code).

    Args:
        path: the folder to make.
        model: where the weights were first loaded from.
        model_type: a value model is written as ``...ForTokenClassification`` with one label.
        tensors: all parameters by name, whole, in host memory; tied ones once.

    Raises:
        CheckpointError: the tensors are not those of ``model``, or the folder cannot be written.
    """
    dtype = next((tensor.dtype for tensor in tensors.values()), torch.float32)
    skeleton = _skeleton(model, model_type, dtype)
    _compare(model, skeleton, tensors)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _copy_companions(Path(model.path), path)
        if isinstance(skeleton, ValueModel):
            _write_value_model(path, skeleton.config, tensors)
        else:
            skeleton.save_pretrained(path, state_dict=tensors)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _skeleton(model: ModelConfig, model_type: ModelType, dtype: torch.dtype) -> Any:
    """The model without memory for its weights; transformers needs it to name and tie them."""
    from transformers import AutoModel, AutoModelForCausalLM

    config = load_hf_config(model)
    auto: Any = AutoModelForCausalLM if model_type == "language_model" else AutoModel
    with torch.device("meta"):
        module = auto.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
        return module if model_type == "language_model" else ValueModel(module)


def _compare(model: ModelConfig, skeleton: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in parameters_by_name(skeleton).items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if different:
        name = different[0]
        raise CheckpointError(
            f"the weights are not of the model in {model.path}: {len(different)} parameters differ, such as {name} "
            f"({given.get(name, 'absent')}, where the folder's config has {expected.get(name, 'none')})"
        )


def _copy_companions(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    weights = {file for pattern in WEIGHT_PATTERNS for file in source.glob(pattern)}
    for file in sorted(source.iterdir()):
        if file.is_file() and file not in weights and file.name != "config.json" and not file.name.startswith("."):
            shutil.copy2(file, target / file.name)


def _write_value_model(path: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    causal = (config.architectures or ["ForCausalLM"])[0]
    config.architectures = [causal.replace("ForCausalLM", "ForTokenClassification")]
    config.num_labels = 1
    config.save_pretrained(path)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
