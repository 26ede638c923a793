"""Hugging Face folders and their models, as far as all engines need them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollcast.contracts.weights import checkpoint_tensors, find_stacked
from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelConfig

__all__ = [
    "DTYPES",
    "WEIGHT_PATTERNS",
    "ValueModel",
    "checkpoint_parameters",
    "holds_weights",
    "is_converted",
    "load_hf_config",
    "parameters_by_name",
    "transformer",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Files of weights that an engine can load.
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
#: Ends of the names of files with weights in any format, and of files that describe such weights.
_WEIGHT_ENDS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data"),
    *(".onnx.data", ".pb", ".tflite", ".ot", ".index.json", "adapter_config.json"),
)


def holds_weights(file: Path) -> bool:
    """Return True if a file, by its name, has weights in any format, or describes such weights, as an index does."""
    name = file.name.lower()
    return name.endswith(_WEIGHT_ENDS) and not name.startswith("tokenizer")


class ValueModel(nn.Module):
    """A transformer body with a linear head that starts at zero: one value per position.

    Parameters are named as in transformers' ``...ForTokenClassification`` with one label (``model.*``, ``score.*``), so
    that class can load an export if the architecture has one.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.config = body.config
        #: Name of the body, for which transformers and PEFT ask.
        self.base_model_prefix: str = body.base_model_prefix or "model"
        self.add_module(self.base_model_prefix, body)
        self.score = nn.Linear(self.config.get_text_config().hidden_size, 1, dtype=body.dtype)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    @property
    def body(self) -> Any:
        """The transformer without its vocabulary head."""
        return self.get_submodule(self.base_model_prefix)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **for_attention: Any
    ) -> Tensor:
        """Return the values ``[B, S, 1]`` of the states after each of ``S`` positions.

        Args:
            input_ids, attention_mask, position_ids: int64 ``[B, S]``.
            for_attention: arguments that the body passes to its attention.
        """
        hidden = self.body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            **for_attention,
        ).last_hidden_state
        # FSDP2 registers a hook on the model's output, and warns if the output is a view.
        values: Tensor = self.score(hidden).clone()
        return values


def load_hf_config(model: ModelConfig) -> Any:
    """Return the folder's ``config.json`` as a transformers config.

    Raises:
        ConfigError: the folder or file does not exist, or its architecture is unknown.
    """
    from transformers import AutoConfig

    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"model.path is {model.path!r}, which is not a folder; set it to a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path {folder} has no config.json; set it to a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{folder / 'config.json'} names no model that transformers knows: {error}") from error


def parameters_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by state-dict name; tied tensors appear once, under their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def transformer(module: nn.Module) -> Any:
    """Return the transformers model in ``module``: the module itself, or a value model's body."""
    return module.body if isinstance(module, ValueModel) else module


def is_converted(module: nn.Module) -> bool:
    """Return True if transformers changes this model's tensors in files in other ways than to stack experts."""
    return find_stacked(transformer(module)) is None


def checkpoint_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return :func:`parameters_by_name` with the names of a checkpoint: stacked experts become views."""
    return checkpoint_tensors(transformer(module), parameters_by_name(module))
