"""Weight syncs with planted faults, in a module that the processes of replicas import quickly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import WeightSyncError
from rollcast_serving.contracts.weight_sync import WeightSyncCapabilities
from rollcast_serving.syncs.disk import DiskSync

__all__ = ["Forgiving", "Lazy", "Placeless", "Rounding", "Trusting", "Unbounded"]


class Rounding(DiskSync):
    """A sync that sends everything in float32."""

    name: ClassVar[str] = "rounding"

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        for bucket in super().open(source):
            yield WeightBucket([(name, tensor.float()) for name, tensor in bucket])


class Unbounded(DiskSync):
    """A sync that sends one bucket."""

    name: ClassVar[str] = "unbounded"

    async def sync(self, version: int, only_adapter: bool = False) -> Any:
        self.settings = replace(self.settings, bucket_bytes=1 << 40)
        return await super().sync(version, only_adapter)


class Lazy(DiskSync):
    """A sync that gathers no weights on a rank that has no target."""

    name: ClassVar[str] = "lazy"

    async def sync(self, version: int, only_adapter: bool = False) -> Any:
        return await super().sync(version, only_adapter) if self.targets else []


class Trusting(DiskSync):
    """A sync that sends nothing and reports success."""

    name: ClassVar[str] = "trusting"

    async def sync(self, version: int, only_adapter: bool = False) -> Any:
        for _ in self.engine.get_per_tensor_param():
            pass
        return [WeightReport(version, 0, 0, 0.0, {}) for _ in self.targets]


class Forgiving(DiskSync):
    """A sync that reports success after a refusal."""

    name: ClassVar[str] = "forgiving"

    async def sync(self, version: int, only_adapter: bool = False) -> Any:
        try:
            return await super().sync(version, only_adapter)
        except WeightSyncError:
            return [WeightReport(version, 0, 0, 0.0, {}) for _ in self.targets]


class Placeless(DiskSync):
    """A sync that names no mode in which it works."""

    name: ClassVar[str] = "placeless"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(modes=frozenset())
