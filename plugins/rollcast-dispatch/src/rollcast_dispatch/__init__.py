"""Dispatch modes that split a DataProto over data-parallel ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_dispatch.direct import DirectRolloutMethod
    from rollcast_dispatch.dp import DpCompute, DpComputeMetric, DpComputeProto, DpComputeProtoWithFunc
    from rollcast_dispatch.megatron import (
        MegatronCompute,
        MegatronComputeProto,
        MegatronPpAsDp,
        MegatronPpAsDpProto,
        MegatronPpOnly,
    )
    from rollcast_dispatch.mesh import NdMesh, make_nd_compute_dataproto_dispatch_fn
    from rollcast_dispatch.token_balanced import TokenBalanced, make_token_balanced_dispatch_fn

__all__ = [
    "DirectRolloutMethod",
    "DpCompute",
    "DpComputeMetric",
    "DpComputeProto",
    "DpComputeProtoWithFunc",
    "MegatronCompute",
    "MegatronComputeProto",
    "MegatronPpAsDp",
    "MegatronPpAsDpProto",
    "MegatronPpOnly",
    "NdMesh",
    "TokenBalanced",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_token_balanced_dispatch_fn",
]

_MODULES = {
    "direct": ("DirectRolloutMethod",),
    "dp": ("DpCompute", "DpComputeMetric", "DpComputeProto", "DpComputeProtoWithFunc"),
    "megatron": (
        "MegatronCompute",
        "MegatronComputeProto",
        "MegatronPpAsDp",
        "MegatronPpAsDpProto",
        "MegatronPpOnly",
    ),
    "mesh": ("NdMesh", "make_nd_compute_dataproto_dispatch_fn"),
    "token_balanced": ("TokenBalanced", "make_token_balanced_dispatch_fn"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
