"""Kinds of torch devices, and the device of this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.errors import ConfigError
from rollcast.plugins import Registry, instance_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPU",
    "CUDA",
    "NPU",
    "XPU",
    "Device",
    "configured_device",
    "collective_backend",
    "current_device",
    "device_count",
    "device_name",
    "device_rng_state",
    "devices",
    "disable_tf32",
    "empty_cache",
    "find_device",
    "hide_accelerators",
    "local_device",
    "set_device",
    "set_device_rng_state",
    "synchronize",
    "use_device",
]


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        name: torch's name of the device type, and its name in ``placement.device``.
        module: module with ``is_available``, ``device_count``, ``set_device``, ``get_rng_state``, ``set_rng_state``,
            ``synchronize`` and ``empty_cache``; may be missing.
        collective: ``torch.distributed`` backend for tensors on the device.
        resource: name under which a cluster counts these devices; empty for the CPU.
        visibility: environment variables that select visible devices. The first one is set for a process that is
            assigned devices by number.
        hidden: environment variables that hide all devices of this kind from a process.
        files: absolute glob patterns of device files on Linux. A machine where none exists has no such device, which
            is then known without importing torch. Empty if torch has to be asked.
    """

    name: str
    module: str
    collective: str = "gloo"
    resource: str = ""
    visibility: tuple[str, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict, hash=False)
    files: tuple[str, ...] = ()

    def may_exist(self) -> bool:
        """Return False if the machine has no such device, judged by its files; does not import torch."""
        if not self.files or sys.platform != "linux":
            return True
        return any(any(Path("/").glob(pattern.removeprefix("/"))) for pattern in self.files)

    def torch_module(self) -> Any:
        """Return torch's module of the device; None if torch has none or no such device is visible."""
        package, _, attribute = self.module.rpartition(".")
        module = getattr(importlib.import_module(package), attribute, None)
        return module if module is not None and module.is_available() else None


CPU = Device("cpu", "torch.cpu")
CUDA = Device(  # ROCm too
    "cuda",
    "torch.cuda",
    "nccl",
    "GPU",
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
    ("/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*"),  # the last ones on Jetson
)
NPU = Device(
    "npu",
    "torch.npu",
    "hccl",
    "NPU",
    ("ASCEND_RT_VISIBLE_DEVICES",),
    {"ASCEND_RT_VISIBLE_DEVICES": ""},
    ("/dev/davinci*",),
)
XPU = Device(
    "xpu",
    "torch.xpu",
    "xccl",
    "GPU",
    ("ONEAPI_DEVICE_SELECTOR",),
    {"ONEAPI_DEVICE_SELECTOR": "*:cpu"},
    ("/dev/dri/renderD*", "/dev/dxg"),
)

devices: Registry[Device] = Registry(
    "rollcast.devices", instance_of(Device), description="kinds of devices: variables, collective backend, torch module"
)
_chosen: int | None = None


def _accelerators() -> list[Device]:
    return [devices.get(name) for name in devices.names() if name != CPU.name]


def current_device() -> Device:
    """Return the first kind of accelerator that has a device visible to this process, else the CPU."""
    return next((device for device in _accelerators() if device.torch_module() is not None), CPU)


def find_device(name: str, requested_by: str = "placement.device") -> Device:
    """Return the device called ``name``; ``auto`` stands for :func:`current_device`.

    Args:
        name: name of the device.
        requested_by: config key to name in an error.

    Raises:
        ConfigError: no such device is registered; lists the registered ones.
    """
    if name == "auto":
        return current_device()
    if name not in devices:
        raise ConfigError(f"{requested_by} is {name!r}; valid: auto, {', '.join(devices.names())}")
    return devices.get(name)


def configured_device(name: str) -> str:
    """Return the kind of device that ``placement.device`` stands for, as :func:`find_device`.

    Imports torch only for ``auto``, and only on a machine that may have an accelerator.

    Raises:
        ConfigError: no such device is registered.
    """
    if name == "auto" and not any(device.may_exist() for device in _accelerators()):
        return CPU.name
    return find_device(name).name


def hide_accelerators() -> dict[str, str]:
    """Return environment variables that hide all accelerators from a process."""
    return {key: value for device in _accelerators() for key, value in device.hidden.items()}


def device_name() -> str:
    """Return torch's name of :func:`current_device`, such as ``cuda`` (ROCm too) or ``cpu``."""
    return current_device().name


def device_count() -> int:
    """Return the number of visible accelerators."""
    device = current_device()
    return 0 if device is CPU else int(device.torch_module().device_count())


def use_device(index: int | None) -> None:
    """Set this process's device to the visible device number ``index``; None to choose by local rank."""
    global _chosen  # noqa: PLW0603  # a process has one device
    _chosen = index


def local_device(local_rank: int) -> torch.device:
    """Return the torch device of the process with ``local_rank`` on its node.

    If only one device is visible (a cluster hides the others), return device 0 whatever the rank. After
    :func:`use_device`, return the device set there.
    """
    import torch

    device = current_device()
    if device is CPU:
        return torch.device("cpu")
    return torch.device(device.name, local_rank % device.torch_module().device_count() if _chosen is None else _chosen)


def disable_tf32() -> None:
    """Compute convolutions of float32 tensors in float32 on CUDA, as torch does with matrix products.

    By default cuDNN rounds their inputs to TF32, so that log-probs of prompts with images differ between engines.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False


def set_device(device: torch.device) -> None:
    """Make ``device`` the one on which this process computes by default; do nothing on a CPU."""
    if device.type != CPU.name:
        devices.get(device.type).torch_module().set_device(device)


def device_rng_state() -> dict[str, Any]:
    """Return the random state of this process's accelerator by the device's name; empty on a CPU."""
    device = current_device()
    return {} if device is CPU else {device.name: device.torch_module().get_rng_state()}


def set_device_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state of :func:`device_rng_state`; do nothing if it is of another kind of device."""
    device = current_device()
    if device is not CPU and device.name in state:
        device.torch_module().set_rng_state(state[device.name])


def collective_backend() -> str:
    """Return the ``backend`` argument of ``torch.distributed.init_process_group``."""
    device = current_device()
    return "gloo" if device is CPU else f"cpu:gloo,{device.name}:{device.collective}"


def synchronize() -> None:
    """Wait until the accelerator has finished its queued work; do nothing on a CPU."""
    device = current_device()
    if device is not CPU:
        device.torch_module().synchronize()


def empty_cache() -> None:
    """Release cached accelerator memory to the device; do nothing on a CPU."""
    device = current_device()
    if device is not CPU:
        device.torch_module().empty_cache()
