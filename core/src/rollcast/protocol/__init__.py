"""The batch that travels between controller and workers, its bytes, and handles to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast._lazy import lazy_exports

if TYPE_CHECKING:
    from rollcast.protocol.dataproto import DataProto as DataProto
    from rollcast.protocol.future import DataProtoFuture as DataProtoFuture

# Importing the package must not cost the second that torch and tensordict take.
__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"rollcast.protocol.dataproto": ["DataProto"], "rollcast.protocol.future": ["DataProtoFuture"]}
)
