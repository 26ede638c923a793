"""The device of a worker and its published peak rate."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast import Worker
from rollcast_automap.costs.device_kinds import PEAK_TFLOPS, find_part

__all__ = ["PEAK_TFLOPS", "DeviceInfo", "describe_device", "find_peak"]


@dataclass(frozen=True)
class DeviceInfo:
    """A device.

    Attributes:
        name: name that the driver reports; ``cpu`` without an accelerator.
        memory_bytes: memory of the device, or of the machine without an accelerator.
        peak_flops: peak of dense bfloat16 operations per second; None if not known.
    """

    name: str
    memory_bytes: int
    peak_flops: float | None = None


def find_peak(name: str) -> float | None:
    """Return the peak of dense bfloat16 operations per second of the device with this name; None if not known."""
    part = find_part(name)
    return None if part is None else PEAK_TFLOPS[part] * 1e12


def describe_device(worker: Worker) -> DeviceInfo:
    """Return the device on which a worker computes; runs in the worker's process."""
    import os

    import torch

    from rollcast.contracts.device import device_name, local_device

    if device_name() != "cuda":
        return DeviceInfo(device_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    properties = torch.cuda.get_device_properties(local_device(worker.context.local_rank))
    return DeviceInfo(str(properties.name), int(properties.total_memory), find_peak(str(properties.name)))
