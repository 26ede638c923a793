"""The batch that travels between controller and workers, its bytes, and handles to it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcast.protocol.dataproto import DataProto
    from rollcast.protocol.future import DataProtoFuture

__all__ = ["DataProto", "DataProtoFuture"]

# Importing the package must not cost the second that torch and tensordict take.
_HOMES = {
    "DataProto": "rollcast.protocol.dataproto",
    "DataProtoFuture": "rollcast.protocol.future",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
