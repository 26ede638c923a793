"""TensorRT-LLM's HTTP server as a child of a rollout: ``python -m rollcast_trtllm.server``."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from rollcast_serving.engines.server_process import read_spec


def control_arguments(server_class: Any, api_key: str) -> dict[str, Any]:
    """Return the arguments that enable the endpoints for memory and weights; in older versions they are always on."""
    known = inspect.signature(server_class).parameters
    wanted = {"enable_rl_control_endpoints": True, "rl_control_api_key": api_key}
    return wanted if wanted.keys() <= known.keys() else {}


async def serve(args: dict[str, Any], listening: dict[str, Any]) -> None:
    """Serve an engine with these arguments until killed."""
    from tensorrt_llm import AsyncLLM
    from tensorrt_llm.serve import OpenAIServer

    # Only AsyncLLM can change its memory and weights.
    llm = await AsyncLLM(**args)
    server = OpenAIServer(
        generator=llm,
        model=args["model"],
        tool_parser=None,
        server_role=None,
        metadata_server_cfg=None,
        **control_arguments(OpenAIServer, listening["api_key"]),
    )
    await server(listening["host"], listening["port"])


# Workers import this module under another name.
if __name__ == "__main__":
    asyncio.run(serve(*read_spec()))
