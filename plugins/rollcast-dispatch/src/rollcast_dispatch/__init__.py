"""Dispatch modes that split a DataProto over data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_dispatch.megatron import MegatronCompute as MegatronCompute
    from rollcast_dispatch.megatron import MegatronComputeProto as MegatronComputeProto
    from rollcast_dispatch.megatron import MegatronPpAsDp as MegatronPpAsDp
    from rollcast_dispatch.megatron import MegatronPpAsDpProto as MegatronPpAsDpProto
    from rollcast_dispatch.megatron import MegatronPpOnly as MegatronPpOnly
    from rollcast_dispatch.modes import DirectRolloutMethod as DirectRolloutMethod
    from rollcast_dispatch.modes import DpCompute as DpCompute
    from rollcast_dispatch.modes import DpComputeMetric as DpComputeMetric
    from rollcast_dispatch.modes import DpComputeProto as DpComputeProto
    from rollcast_dispatch.modes import DpComputeProtoWithFunc as DpComputeProtoWithFunc
    from rollcast_dispatch.modes import NdMesh as NdMesh
    from rollcast_dispatch.modes import make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn
    from rollcast_dispatch.token_balanced import ROW_TOKENS as ROW_TOKENS
    from rollcast_dispatch.token_balanced import TokenBalanced as TokenBalanced
    from rollcast_dispatch.token_balanced import make_token_balanced_dispatch_fn as make_token_balanced_dispatch_fn

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "megatron": [
            "MegatronCompute",
            "MegatronComputeProto",
            "MegatronPpAsDp",
            "MegatronPpAsDpProto",
            "MegatronPpOnly",
        ],
        "modes": [
            "DirectRolloutMethod",
            "DpCompute",
            "DpComputeMetric",
            "DpComputeProto",
            "DpComputeProtoWithFunc",
            "NdMesh",
            "make_nd_compute_dataproto_dispatch_fn",
        ],
        "token_balanced": ["ROW_TOKENS", "TokenBalanced", "make_token_balanced_dispatch_fn"],
    },
)
