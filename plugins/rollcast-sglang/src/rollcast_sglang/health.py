"""Health check of SGLang. It is not imported: that needs an environment which only its server has."""

from __future__ import annotations

from rollcast_serving.engines.health import EngineCheck

__all__ = ["SglangCheck"]


class SglangCheck(EngineCheck):
    """SGLang in this environment."""

    subject = "SGLang"
    rollout = "sglang"
    title = "SGLang"
    adapter = "rollcast-sglang"
    engines = ("sglang",)
    module = ""
