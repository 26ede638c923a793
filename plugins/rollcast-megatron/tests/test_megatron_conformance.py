"""The core's conformance suite on this engine, on one rank."""

from __future__ import annotations

from rollcast.testing import EngineSuite


class TestMegatronEngine(EngineSuite):
    name = "megatron"
