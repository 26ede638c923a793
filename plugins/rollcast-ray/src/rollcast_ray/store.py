"""Ray's object store, as controller and workers use it, and what is said when it is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from rollcast.errors import ResourceError

__all__ = ["FULL", "ObjectStore", "explain_full"]

#: Raised where neither the store nor the disk beneath it has room.
FULL = (ObjectStoreFullError, OutOfDiskError)


class ObjectStore:
    """Where workers keep what they do not send."""

    def put(self, value: Any) -> Any:
        """Keep a value; the reference works in every process of the cluster.

        Raises:
            ResourceError: the store and the disk beneath it are full.
        """
        try:
            return ray.put(value)
        except FULL as error:
            raise ResourceError(explain_full("a result that is to be kept", value)) from error

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """What the references stand for."""
        return list(ray.get(list(refs), timeout=timeout))


def explain_full(what: str, value: Any = None) -> str:
    """Why something could not be stored, and what to do.

    Args:
        what: for the message.
        value: tells its size by ``nbytes``, if it has one.
    """
    size = getattr(value, "nbytes", 0)
    amount = f" ({_megabytes(size)})" if size else ""
    stores = {
        node["NodeManagerAddress"]: _megabytes(node["Resources"].get("object_store_memory", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    }
    sizes = ", ".join(f"{address}: {store}" for address, store in stores.items())
    return (
        f"{what}{amount} does not fit into Ray's object store ({sizes}), and the disk to which it spills is full. Free "
        "disk space, let go of handles that are not needed, send less at once, or give the store more memory: "
        "runtime.object_store_memory for a Ray of this run's own, `ray start --object-store-memory` for a cluster"
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
