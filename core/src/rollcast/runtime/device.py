"""The one place that knows which accelerator there is, so that the same code runs on any."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "HIDE_ACCELERATORS",
    "collective_backend",
    "device_count",
    "device_name",
    "empty_cache",
    "local_device",
    "synchronize",
]

HIDE_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that is to compute on the CPU whatever its machine has."""


def device_name() -> str:
    """``cuda`` where a CUDA or ROCm device is visible, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count() -> int:
    """Visible accelerators; 0 on a machine without."""
    import torch

    return torch.cuda.device_count() if device_name() == "cuda" else 0


def local_device(local_rank: int) -> torch.device:
    """The device of the process with this rank on its node.

    With one visible device (Ray hides the others) that is device 0 whatever the rank.
    """
    import torch

    if device_name() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def collective_backend() -> str:
    """The backend string for ``torch.distributed.init_process_group``."""
    return "gloo" if device_name() == "cpu" else "cpu:gloo,cuda:nccl"


def synchronize() -> None:
    """Wait for the accelerator; nothing on a CPU."""
    import torch

    if device_name() == "cuda":
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give cached accelerator memory back; nothing on a CPU."""
    import torch

    if device_name() == "cuda":
        torch.cuda.empty_cache()
