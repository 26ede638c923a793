"""LoRA adapters: held against the model, and written in PEFT's layout, which SGLang reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import WeightSyncError
from rollcast_sglang.weights import ModelWeights

__all__ = ["check_adapter", "write_adapter"]

_PREFIX = "base_model.model."
_HALVES = {".lora_A.weight": "A", ".lora_B.weight": "B"}


def check_adapter(adapter: AdapterWeights, model: ModelWeights) -> None:
    """Make sure that each matrix belongs to a weight of the model; SGLang would pass over those that do not.

    Raises:
        WeightSyncError: names the first that is wrong.
    """
    rank = int(adapter.config["r"])
    for name, tensor in adapter.tensors.items():
        suffix = next((each for each in _HALVES if name.endswith(each)), "")
        weight = name.removeprefix(_PREFIX).removesuffix(suffix) + ".weight"
        shape = model.shapes.get(weight)
        if not suffix or not name.startswith(_PREFIX) or shape is None or len(shape) != 2:
            raise WeightSyncError(f"adapter tensor {name!r} belongs to no matrix of the model", tensor=name)
        wanted = (rank, shape[1]) if _HALVES[suffix] == "A" else (shape[0], rank)
        if tuple(tensor.shape) != wanted:
            raise WeightSyncError(
                f"adapter tensor {name!r} came with shape {tuple(tensor.shape)}; with r={rank} it has to be {wanted}",
                tensor=name,
            )


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write an adapter's two files."""
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(config), default=_plain))


def _plain(value: Any) -> Any:
    """What JSON has for a value of a PEFT config: sets become lists, and enums their values."""
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
