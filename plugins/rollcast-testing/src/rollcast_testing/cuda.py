"""Marks of tests that need a CUDA device, which ``nox -s gpu`` selects.

Example::

    @pytest.mark.parametrize("device", DEVICES)  # on a CPU always, on CUDA with `-m gpu`
    def test_a_kernel(device: str) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., Any])

__all__ = ["DEVICES", "needs_cuda", "needs_devices", "on_cuda"]


def needs_devices(count: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that needs so many CUDA devices; NCCL refuses two ranks on one device."""
    visible = torch.cuda.device_count()
    reason = (
        f"needs {count} CUDA device{'s' if count > 1 else ''}, and there {'is' if visible == 1 else 'are'} {visible}"
    )
    return [pytest.mark.gpu, pytest.mark.skipif(visible < count, reason=reason)]


#: Marks of a test that needs one device; a module assigns them to ``pytestmark``.
needs_cuda = needs_devices(1)
#: Parameters of a test that runs on a CPU, and as a second test on CUDA.
DEVICES = ("cpu", pytest.param("cuda", marks=needs_cuda))


def on_cuda(test: Test) -> Test:
    """Mark one test as :data:`needs_cuda`."""
    gpu, skip = needs_cuda
    marked: Test = skip(gpu(test))
    return marked
