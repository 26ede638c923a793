"""The engine's conformance suite on a CUDA device, one rank."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rollcast_testing import EngineSuite
from rollcast_testing.cuda import needs_cuda

pytestmark = [pytest.mark.long, *needs_cuda]


class TestFsdpOnCuda(EngineSuite):
    name = "fsdp"
    packing_config: ClassVar = {"use_remove_padding": True}


class TestFsdpFromHostMemoryOnCuda(EngineSuite):
    name = "fsdp"
    engine_config: ClassVar = {"offload_policy": True, "use_fused_kernels": True}


class TestFsdpThatSavesMemoryOnCuda(EngineSuite):
    name = "fsdp"
    engine_config: ClassVar = {
        "param_offload": True,
        "optimizer_offload": True,
        "enable_gradient_checkpointing": True,
        "enable_activation_offload": True,
        "use_fused_kernels": True,
    }
    packing_config: ClassVar = {"use_remove_padding": True}
