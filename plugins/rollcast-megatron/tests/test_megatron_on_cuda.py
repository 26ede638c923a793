"""The engine's conformance suite on a CUDA device, one rank."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rollcast_testing import EngineSuite
from rollcast_testing.cuda import needs_cuda

pytestmark = [pytest.mark.long, *needs_cuda]


class TestMegatronOnCuda(EngineSuite):
    name = "megatron"
    packing_config: ClassVar = {"use_remove_padding": True}


class TestMegatronMixtureOnCuda(EngineSuite):
    name = "megatron"
    packing_config: ClassVar = {"use_remove_padding": True}
    model_options: ClassVar = {"experts": 4}
