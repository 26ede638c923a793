"""Kernels in Triton: compiled for the device by Triton's own compiler, and not run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from rollcast_dryrun.mode import DryRunMode

__all__ = ["kernel_replacements"]


def kernel_replacements(mode: DryRunMode, capability: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of Triton's launches and of its driver, which needs a device; nothing without Triton.

    Args:
        mode: mode that records the launches.
        capability: compute capability of the device that kernels are compiled for.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.runtime import driver  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.runtime.jit import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        JITFunction,
        MockTensor,
    )

    major, minor = capability
    run = JITFunction.run

    def without_content(argument: Any) -> Any:
        return MockTensor(argument.dtype) if isinstance(argument, torch.Tensor) else argument

    def compile_and_note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        named = {name: without_content(value) for name, value in options.items()}
        compiled = run(kernel, *map(without_content, args), grid=grid, warmup=True, **named)
        if not warmup:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            mode.note_kernel(kernel.__name__, tensors)
        return compiled

    yield JITFunction, "run", compile_and_note
    yield driver, "_active", _Driver(GPUTarget("cuda", 10 * major + minor, 32))


class _Driver:
    """Stands for Triton's driver of one device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)
