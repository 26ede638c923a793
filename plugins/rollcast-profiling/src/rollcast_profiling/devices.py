"""What a worker's device is, and how many operations a second its vendor promises."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast import Worker

__all__ = ["PEAK_TFLOPS", "DeviceInfo", "describe_device", "find_peak"]

#: Part of a device's name → its vendor's figure for dense bfloat16 matrix products with float32 sums, in
#: TFLOP/s; figures that are only given with sparsity are halved. Of several parts the longest counts.
PEAK_TFLOPS: dict[str, float] = {
    "A10": 125.0,
    "A100": 312.0,
    "A40": 149.7,
    "A800": 312.0,
    "B200": 2250.0,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "H800": 989.4,
    "L4": 121.0,
    "L40S": 362.0,
    "MI300X": 1307.4,
}


@dataclass(frozen=True)
class DeviceInfo:
    """A device.

    Attributes:
        name: as its driver gives it; ``cpu`` where there is none.
        memory_bytes: of the device; of the machine where there is none.
        peak_flops: dense bfloat16 operations a second; None where that is not known.
    """

    name: str
    memory_bytes: int
    peak_flops: float | None = None


def find_peak(name: str) -> float | None:
    """Dense bfloat16 operations a second of the device with this name; None where that is not known."""
    words = f" {name.replace('-', ' ')} ".lower()
    known = [part for part in PEAK_TFLOPS if f" {part.lower()} " in words]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def describe_device(worker: Worker) -> DeviceInfo:
    """The device on which a worker computes; runs in its process."""
    import os

    import torch

    from rollcast.contracts.device import device_name, local_device

    if device_name() != "cuda":
        return DeviceInfo(device_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    properties = torch.cuda.get_device_properties(local_device(worker.context.local_rank))
    return DeviceInfo(str(properties.name), int(properties.total_memory), find_peak(str(properties.name)))
