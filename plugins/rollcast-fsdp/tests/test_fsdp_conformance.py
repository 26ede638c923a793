"""The core's conformance suite on this engine, in the ways that one rank can hold a model."""

from __future__ import annotations

from typing import ClassVar

from rollcast.testing import EngineSuite


class TestFsdpEngine(EngineSuite):
    name = "fsdp"


class TestFsdpEngineThatOffloads(EngineSuite):
    name = "fsdp"
    engine_config: ClassVar = {"param_offload": True, "optimizer_offload": True, "enable_gradient_checkpointing": True}


class TestFsdpEngineThatSharesPrompts(EngineSuite):
    name = "fsdp"
    engine_config: ClassVar = {"share_prompts": True}
