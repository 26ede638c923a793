"""Dispatch modes that split a DataProto over data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_dispatch.dp import DpComputeProto
    from rollcast_dispatch.mesh import NdMesh, make_nd_compute_dataproto_dispatch_fn

__all__ = ["DpComputeProto", "NdMesh", "make_nd_compute_dataproto_dispatch_fn"]


def __getattr__(name: str) -> Any:
    if name == "DpComputeProto":
        from rollcast_dispatch.dp import DpComputeProto

        return DpComputeProto
    if name in __all__:
        from rollcast_dispatch import mesh

        return getattr(mesh, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
