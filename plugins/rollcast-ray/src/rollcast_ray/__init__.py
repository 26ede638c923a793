"""Runtime ``ray``, which runs worker groups in Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_ray.pools import RayResourcePool as RayResourcePool
    from rollcast_ray.runtime import RayRuntime as RayRuntime
    from rollcast_ray.runtime import RayWorkerGroup as RayWorkerGroup

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"pools": ["RayResourcePool"], "runtime": ["RayRuntime", "RayWorkerGroup"]},
)
