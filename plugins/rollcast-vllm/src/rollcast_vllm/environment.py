"""The environment variables of vLLM's processes; only this module reads or sets any."""

from __future__ import annotations

import os

from rollcast.contracts.rollout import EngineNode
from rollcast.errors import ConfigError, PluginLoadError
from rollcast_serving.engines.arguments import bind_threads, has_gpu
from rollcast_vllm.schemas import VllmRolloutConfig

__all__ = [
    "engine_owner",
    "image_architecture",
    "pass_images",
    "prepare_environment",
    "process_environment",
    "require_vllm",
]

_IMAGES = "ROLLCAST_VLLM_IMAGES"
_OWNER = "ROLLCAST_VLLM_OWNER"


def process_environment(config: VllmRolloutConfig) -> dict[str, str]:
    """Return the variables that an engine's process needs at its start, on any device; on a GPU vLLM ignores the
    CPU's.
    """
    ranks = config.replica_size
    bound = bind_threads(ranks) if ranks > 1 else None
    return {
        # Engines with several threads each slow one another down by orders of magnitude on a busy CPU.
        "OMP_NUM_THREADS": "1",
        # vLLM needs to know the cores of tensor-parallel ranks.
        "VLLM_CPU_OMP_THREADS_BIND": bound or "nobind",
        # A fork would copy locks that other threads hold.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def prepare_environment(config: VllmRolloutConfig, node: EngineNode) -> None:
    """Set variables that are unset, before vLLM is imported; its engine's processes inherit them."""
    wanted = process_environment(config)
    if node.nodes > 1:
        wanted["VLLM_HOST_IP"] = node.host
    if not has_gpu():
        # Otherwise log-probs are compiled, which needs a C++ compiler.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
        if config.replica_size == 1:
            # AsyncLLM's engine has its own process anyway; on a CPU this keeps it from starting another below it.
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[_OWNER] = str(os.getpid())


def pass_images(architecture: str | None) -> None:
    """Tell the engine's processes the architecture to which rollcast passes images; None for a model of text.

    Raises:
        ConfigError: ``VLLM_PLUGINS`` keeps these processes from loading rollcast's plugin.
    """
    if architecture is None:
        os.environ.pop(_IMAGES, None)
        return
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "rollcast" not in plugins.split(","):
        raise ConfigError(
            f"VLLM_PLUGINS is {plugins!r}, so vLLM does not load the plugin rollcast, which passes it images; add "
            "rollcast to the variable, or unset it"
        )
    os.environ[_IMAGES] = architecture


def engine_owner() -> int:
    """Return the id of the process that started this node's processes of the engine."""
    return int(os.environ[_OWNER])


def image_architecture() -> str | None:
    """Return the architecture of :func:`pass_images`."""
    return os.environ.get(_IMAGES)


def require_vllm() -> None:
    """Import vLLM.

    Raises:
        PluginLoadError: vLLM is not installed, or broken.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise PluginLoadError(
            f"rollout=vllm needs vLLM in the replica's environment, and importing it failed: {error}. "
            'Install it with pip install "rollcast-vllm[cuda]" (on a machine without a GPU as the README of '
            "rollcast-vllm says), or name the interpreter that has it in rollout.replica.python"
        ) from error
