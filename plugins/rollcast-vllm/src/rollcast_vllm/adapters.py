"""LoRA adapters: held against the model, and written where vLLM reads them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import AdapterWeights, WeightReport, WeightTally
from rollcast.errors import WeightSyncError
from rollcast_vllm.expected import ExpectedWeights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdapterFolder", "check_adapter"]

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def check_adapter(adapter: AdapterWeights, expected: ExpectedWeights) -> WeightReport:
    """Count an adapter's tensors, and hold them against the model; the report is without a version.

    Raises:
        WeightSyncError: it has no tensors, or one that is not a known weight's A or B, has another shape than
            the weight asks for, or lacks its other half; names the tensor.
    """
    if not adapter.tensors:
        raise WeightSyncError("the adapter came without tensors")
    tally = WeightTally([list(adapter.tensors.items())])
    for bucket in tally:
        for name, tensor in bucket:
            _check_tensor(name, tensor, adapter.tensors, expected)
    return tally.report(0)


def _check_tensor(name: str, tensor: Tensor, all_tensors: Mapping[str, Tensor], expected: ExpectedWeights) -> None:
    half = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    module = name.removeprefix(PREFIX).removesuffix(half or "")
    shape = expected.shapes.get(f"{module}.weight")
    if half is None or not name.startswith(PREFIX) or shape is None or len(shape) != 2:
        raise WeightSyncError(f"adapter tensor {name!r} is not the A or B of a matrix of the model", tensor=name)
    wrong = tensor.ndim != 2 or (tensor.shape[1] != shape[1] if half == SUFFIXES[0] else tensor.shape[0] != shape[0])
    if wrong:
        raise WeightSyncError(
            f"adapter tensor {name!r} came with shape {tuple(tensor.shape)}; the weight that it changes has {shape}",
            tensor=name,
        )
    twin_name = name.removesuffix(half) + SUFFIXES[half == SUFFIXES[0]]
    twin = all_tensors.get(twin_name)
    if twin is None:
        raise WeightSyncError(f"adapter tensor {name!r} came without {twin_name!r}", tensor=twin_name)


class AdapterFolder:
    """The adapter in use, as a PEFT folder: vLLM reads adapters from a path, and may do so at any time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollcast-adapter-", ignore_cleanup_errors=True)
        self._zeros: AdapterWeights | None = None

    @property
    def path(self) -> str:
        """Of the folder."""
        return self._folder.name

    def write(self, adapter: AdapterWeights) -> None:
        """Put an adapter in the place of the one before."""
        import torch

        shapes = {name: torch.zeros(tensor.shape) for name, tensor in adapter.tensors.items()}
        self._zeros = AdapterWeights(adapter.config, shapes)
        self._write(adapter)

    def write_zeros(self) -> None:
        """Put an adapter there that changes nothing; without an adapter before there is nothing to do."""
        if self._zeros is not None:
            self._write(self._zeros)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def _write(self, adapter: AdapterWeights) -> None:
        from safetensors.torch import save_file

        folder = Path(self.path)
        config: dict[str, Any] = {"peft_type": "LORA", **adapter.config}
        (folder / "adapter_config.json").write_text(json.dumps(config, default=_jsonable))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors")


def _jsonable(value: Any) -> Any:
    return list(value) if isinstance(value, (set, frozenset, tuple)) else str(value)
