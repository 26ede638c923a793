"""Published figures of device kinds; the only table of peak figures in this repository."""

from __future__ import annotations

from rollcast_automap.contract import DeviceKind

__all__ = ["ACCELERATOR_TYPES", "DEVICE_KINDS", "LINK_BANDWIDTHS", "PEAK_TFLOPS", "find_part"]

_GIB, _GB = 2**30, 10**9
#: Part of a device's name → its vendor's figure for dense bfloat16 matrix products with float32 accumulation, in
#: TFLOP/s. Figures that are published only with sparsity are halved. If several parts match, the longest counts.
PEAK_TFLOPS: dict[str, float] = {
    "A10": 125.0,
    "A100": 312.0,
    "A40": 149.7,
    "A800": 312.0,
    "B200": 2250.0,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H20": 148.0,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "H800": 989.4,
    "L4": 121.0,
    "L40S": 362.0,
    "MI300X": 1307.4,
}


def _kind(
    name: str, memory: int, float32_tflops: float, memory_gb_s: float, host_gb_s: float, source: str
) -> DeviceKind:
    """Return a device kind with the bfloat16 peak of ``PEAK_TFLOPS``; bandwidths in GB/s, the host's one way."""
    flops = {"bfloat16": PEAK_TFLOPS[name.upper()] * 1e12, "float32": float32_tflops * 1e12}
    return DeviceKind(name, memory, flops, memory_gb_s * _GB, host_gb_s * _GB, source)


#: Device kinds by name. FLOP per second are dense; host bandwidths are those of 16 lanes of PCIe 4 or 5.
DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        _kind("a10", 24 * _GIB, 31.2, 600, 32, "NVIDIA A10 datasheet"),
        _kind("a100", 80 * _GIB, 19.5, 2039, 32, "NVIDIA A100 datasheet, SXM 80GB"),
        _kind("a800", 80 * _GIB, 19.5, 2039, 32, "NVIDIA A800 datasheet, SXM 80GB"),
        _kind("b200", 180 * _GB, 75, 8000, 64, "NVIDIA DGX B200 datasheet, divided by its 8 GPUs"),
        _kind("h100", 80 * _GIB, 67, 3350, 64, "NVIDIA H100 datasheet, SXM"),
        _kind("h20", 96 * _GB, 44, 4000, 64, "NVIDIA H20 datasheet, SXM 96GB"),
        _kind("h200", 141 * _GB, 67, 4800, 64, "NVIDIA H200 datasheet, SXM"),
        _kind("h800", 80 * _GIB, 67, 3350, 64, "NVIDIA H800 datasheet, SXM"),
        _kind("l4", 24 * _GIB, 30.3, 300, 32, "NVIDIA L4 datasheet"),
        _kind("l40s", 48 * _GB, 91.6, 864, 32, "NVIDIA L40S datasheet"),
        _kind("mi300x", 192 * _GB, 163.4, 5300, 64, "AMD Instinct MI300X datasheet"),
        DeviceKind("cpu", 12 * _GIB, {"bfloat16": 5e10, "float32": 5e10}, 1e10, 1e10, "rough figures of a core"),
    )
}
#: Bytes per second from a device to the others of its node, one way. NVLink counts half of the datasheet's two-way
#: figure; an MI300X has seven links of 64 GB/s; devices without a link of their own use PCIe.
LINK_BANDWIDTHS = {
    "a100": 300e9,
    "a800": 200e9,
    "b200": 900e9,
    "h100": 450e9,
    "h20": 450e9,
    "h200": 450e9,
    "h800": 200e9,
    "a10": 32e9,
    "l4": 32e9,
    "l40s": 32e9,
    "mi300x": 448e9,
    "cpu": 1e10,
}
#: Kind → its name in ``placement.pools.NAME.accelerator_type``, as Ray calls it; a CPU has none.
ACCELERATOR_TYPES: dict[str, str] = {
    **{name: name.upper() for name in DEVICE_KINDS if name not in ("cpu", "mi300x")},
    "mi300x": "AMD-Instinct-MI300X-OAM",
}


def find_part(name: str) -> str | None:
    """Return the key of ``PEAK_TFLOPS`` that the name of a device contains as words; None if there is none."""
    words = f" {name.replace('-', ' ')} ".lower()
    known = [part for part in PEAK_TFLOPS if f" {part.lower()} " in words]
    return max(known, key=len) if known else None
