"""verl's platform ``cpu``: workers on a machine without an accelerator, with the backend gloo."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch

__all__ = ["make_platform"]


def make_platform(base: type) -> type:  # noqa: C901  # one class with many short methods
    """Return the platform class; ``base`` is ``verl.plugin.platform.PlatformBase``, which may be half imported."""

    class PlatformCPU(base):  # type: ignore[misc]
        """A platform without devices. Pools with ``use_gpu=True`` reserve Ray's logical GPUs."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module: ModuleType = torch.cpu

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # only chosen by name

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 0

        def set_device(self, device_index: int) -> None:
            return None

        def synchronize(self, device_index: int | None = None) -> None:
            return None

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            return None

        def empty_cache(self) -> None:
            return None

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        def nvtx_range(self, msg: str) -> Any:
            return contextlib.nullcontext()

        def profiler_start(self) -> None:
            return None

        def profiler_stop(self) -> None:
            return None

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    return PlatformCPU
