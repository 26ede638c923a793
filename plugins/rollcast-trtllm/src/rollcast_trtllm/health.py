"""Health check of TensorRT-LLM. It is not imported: that needs an environment which only its server has."""

from __future__ import annotations

from rollcast_serving.engines.health import EngineCheck

__all__ = ["TrtllmCheck"]


class TrtllmCheck(EngineCheck):
    """TensorRT-LLM in this environment."""

    subject = "TensorRT-LLM"
    rollout = "trtllm"
    title = "TensorRT-LLM"
    adapter = "rollcast-trtllm"
    engines = ("tensorrt-llm",)
    module = ""
