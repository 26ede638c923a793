"""The core's conformance suite on this engine: on one rank in each way to hold a model, and on several."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rollcast_testing import EngineSuite, Layout

pytestmark = pytest.mark.long

PACKS = {"use_remove_padding": True}


@pytest.mark.cases(2)
class TestFsdpEngine(EngineSuite):
    name = "fsdp"
    packing_config: ClassVar = PACKS
    layouts: ClassVar = {
        "two ranks": Layout(2),
        "two ranks of one sequence": Layout(2, {"ulysses_sequence_parallel_size": 2, **PACKS}),
        "four ranks": Layout(4, {"use_fused_kernels": True, "forward_prefetch": True, **PACKS}),
        "two copies on two ranks, from host memory": Layout(4, {"fsdp_size": 2, "offload_policy": True}),
        "two copies, two ranks a sequence": Layout(
            4,
            {
                "fsdp_size": 2,
                "ulysses_sequence_parallel_size": 2,
                "use_fused_kernels": True,
                "enable_gradient_checkpointing": True,
                **PACKS,
            },
        ),
    }


@pytest.mark.cases(1)
class TestFsdpEngineThatSavesMemory(EngineSuite):
    name = "fsdp"
    engine_config: ClassVar = {
        "param_offload": True,
        "optimizer_offload": True,
        "enable_gradient_checkpointing": True,
        "enable_activation_offload": True,
        "use_fused_kernels": True,
    }
    packing_config: ClassVar = PACKS


class TestFsdpEngineThatSharesPrompts(EngineSuite):
    name = "fsdp"
    engine_config: ClassVar = {"share_prompts": True}


@pytest.mark.cases(1)
class TestFsdpEngineOfAMixture(EngineSuite):
    name = "fsdp"
    model_options: ClassVar = {"experts": 4}
    packing_config: ClassVar = PACKS
    layouts: ClassVar = {
        "two ranks of one sequence": Layout(
            2, {"ulysses_sequence_parallel_size": 2, "enable_gradient_checkpointing": True, **PACKS}
        ),
        "two ranks": Layout(2),
    }
