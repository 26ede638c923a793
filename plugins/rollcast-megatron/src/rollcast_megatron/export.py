"""Whole models from gathered weights: a Hugging Face folder written in shards, or a module in memory.

No more than one shard is in memory at a time, beside the parameter that comes next.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollcast.errors import CapabilityError, CheckpointError
from rollcast_engine.hf import WEIGHT_PATTERNS, load_hf_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import ModelConfig, ModelType

__all__ = ["SHARD_BYTES", "whole_module", "write_folder"]

#: Largest file of weights, unless one parameter is larger.
SHARD_BYTES = 1 << 30


def write_folder(
    path: Path,
    model: ModelConfig,
    model_type: ModelType,
    tensors: Iterable[tuple[str, Tensor]],
    is_writer: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config, ``model*.safetensors`` and what else ``model.path`` holds (tokenizer, own code).

    Args:
        path: the folder to make.
        model: where the weights were first loaded from.
        model_type: a value model is written as ``...ForTokenClassification`` with one label.
        tensors: every parameter once; gone through to the end on every rank, for others may wait in it.
        is_writer: this rank writes; the others only go through ``tensors``.
        shard_bytes: size of a file of weights.

    Raises:
        CheckpointError: on the writing rank, the folder cannot be written.
    """
    if not is_writer:
        for _ in tensors:
            pass
        return
    problem: OSError | SafetensorError | None = None
    shards = _Shards(path, shard_bytes)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_weights(path)
        _copy_companions(Path(model.path), path)
    except OSError as error:
        problem = error
    for name, tensor in tensors:
        # The other ranks are in this loop too: it has to go on to its end.
        if problem is None:
            try:
                shards.add(name, tensor)
            except (OSError, SafetensorError) as error:
                problem = error
    try:
        if problem is None:
            dtype = shards.finish()
            _write_config(path, model, model_type, dtype)
    except (OSError, SafetensorError) as error:
        problem = error
    if problem is not None:
        raise CheckpointError(f"{path} cannot be written: {problem}") from problem


def whole_module(model: ModelConfig, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> nn.Module:
    """The causal LM of transformers with these weights, in evaluation mode on ``device``.

    Raises:
        CapabilityError: the weights are of no causal LM, such as a value model's.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    module: Any = None
    parameters: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if module is None:
            options = {"dtype": tensor.dtype, "attn_implementation": model.attn_implementation}
            with torch.random.fork_rng(devices=[]), torch.device(device):
                module = auto.from_config(load_hf_config(model), trust_remote_code=model.trust_remote_code, **options)
            parameters = dict(module.named_parameters())
        if name not in parameters:
            raise CapabilityError(f"{name} is no parameter of {type(module).__name__}: a value model cannot generate")
        with torch.no_grad():
            parameters[name].copy_(tensor)
    whole: nn.Module = module.eval().requires_grad_(False)
    return whole


class _Shards:
    """Weights on their way into files; a file is named when it is known how many there are."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.names: list[list[str]] = []
        self.bytes = 0
        self.dtype = torch.float32
        self._open: dict[str, Tensor] = {}
        self._size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._open and self._size + size > self.limit:
            self._flush()
        # A copy: what was gathered may be the live parameter, or memory that is used again.
        self._open[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._size += size
        self.dtype = tensor.dtype

    def finish(self) -> torch.dtype:
        """Write the last file and the index; gives the dtype of the weights."""
        self._flush()
        count = len(self.names)
        if count == 1:
            self._part(0).replace(self.path / "model.safetensors")
            return self.dtype
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.names):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).replace(self.path / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self.dtype

    def _part(self, number: int) -> Path:
        return self.path / f"part-{number}.tmp"

    def _flush(self) -> None:
        save_file(self._open, self._part(len(self.names)), {"format": "pt"})
        self.names.append(list(self._open))
        self.bytes += self._size
        self._open, self._size = {}, 0


def _remove_weights(path: Path) -> None:
    """What an earlier export left would be loaded along with this one."""
    for pattern in WEIGHT_PATTERNS:
        for file in path.glob(pattern):
            file.unlink()


def _copy_companions(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    weights = {file for pattern in WEIGHT_PATTERNS for file in source.glob(pattern)}
    for file in sorted(source.iterdir()):
        if file.is_file() and file not in weights and file.name != "config.json" and not file.name.startswith("."):
            shutil.copy2(file, target / file.name)


def _write_config(path: Path, model: ModelConfig, model_type: ModelType, dtype: torch.dtype) -> None:
    config = load_hf_config(model)
    config.dtype = dtype
    if model_type == "value_model":
        causal = (config.architectures or ["ForCausalLM"])[0]
        config.architectures = [causal.replace("ForCausalLM", "ForTokenClassification")]
        config.num_labels = 1
    config.save_pretrained(path)
