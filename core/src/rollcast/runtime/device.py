"""The one place that knows which accelerator there is, so that the same code runs on any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    "use_device",
]

HIDE_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
"""Environment of a process that is to compute on the CPU whatever its machine has."""

_COLLECTIVES = {"cuda": "nccl", "npu": "hccl"}
_chosen: int | None = None


def _accelerator() -> tuple[str, Any] | None:
    """Name and torch module of the accelerator; None on a machine without."""
    import torch

    for name in _COLLECTIVES:
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name, module
    return None


def device_name() -> str:
    """``cuda`` where a CUDA or ROCm device is visible, ``npu`` where an Ascend device is, else ``cpu``."""
    found = _accelerator()
    return found[0] if found else "cpu"


def device_count() -> int:
    """Visible accelerators; 0 on a machine without."""
    found = _accelerator()
    return int(found[1].device_count()) if found else 0


def use_device(index: int | None) -> None:
    """Say which of the visible devices is this process's own; None leaves it to the local rank."""
    global _chosen  # noqa: PLW0603  # one for the process, as the device is
    _chosen = index


def local_device(local_rank: int) -> torch.device:
    """The device of the process with this rank on its node.

    With one visible device (Ray hides the others) that is device 0 whatever the rank; where the
    process was told its device (:func:`use_device`), it is that.
    """
    import torch

    found = _accelerator()
    if found is None:
        return torch.device("cpu")
    name, module = found
    return torch.device(name, local_rank % module.device_count() if _chosen is None else _chosen)


def collective_backend() -> str:
    """The backend string for ``torch.distributed.init_process_group``."""
    name = device_name()
    return "gloo" if name == "cpu" else f"cpu:gloo,{name}:{_COLLECTIVES[name]}"


def synchronize() -> None:
    """Wait for the accelerator; nothing on a CPU."""
    found = _accelerator()
    if found:
        found[1].synchronize()


def empty_cache() -> None:
    """Give cached accelerator memory back; nothing on a CPU."""
    found = _accelerator()
    if found:
        found[1].empty_cache()
