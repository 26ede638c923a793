"""Runtime ``ray``: worker groups in Ray actors; and records of calls, which can be replayed in one process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_ray.pools import RayResourcePool
    from rollcast_ray.recording import CallRecorder
    from rollcast_ray.runtime import RayRuntime, RayWorkerGroup

__all__ = ["CallRecorder", "RayResourcePool", "RayRuntime", "RayWorkerGroup"]

_HOMES = {
    "CallRecorder": "recording",
    "RayResourcePool": "pools",
    "RayRuntime": "runtime",
    "RayWorkerGroup": "runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
