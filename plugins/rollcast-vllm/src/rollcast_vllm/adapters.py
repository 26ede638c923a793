"""The current LoRA adapter, written to a folder for vLLM."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollcast.contracts.weights import AdapterWeights
from rollcast_serving.model_weights import write_adapter

__all__ = ["AdapterFolder"]


class AdapterFolder:
    """The current adapter as a PEFT folder: vLLM reads adapters from a path, and may do so at any time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollcast-adapter-", ignore_cleanup_errors=True)
        self._zeros: AdapterWeights | None = None

    @property
    def path(self) -> str:
        """Path of the adapter folder."""
        return self._folder.name

    def write(self, adapter: AdapterWeights) -> None:
        """Write an adapter, replacing the previous one."""
        import torch

        shapes = {name: torch.zeros(tensor.shape) for name, tensor in adapter.tensors.items()}
        self._zeros = AdapterWeights(adapter.config, shapes)
        write_adapter(Path(self.path), adapter)

    def write_zeros(self) -> None:
        """Write an adapter of zeros, which changes nothing; does nothing if there was no adapter."""
        if self._zeros is not None:
            write_adapter(Path(self.path), self._zeros)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
