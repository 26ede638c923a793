"""The environment of SGLang's server process, and the location of SGLang."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import PluginLoadError
from rollcast_serving.engines.arguments import bind_threads

__all__ = ["SERVER_VARIABLE", "STOP_STRINGS", "find_sglang", "server_environment"]

#: Variable that is set only in SGLang processes that rollcast starts; only those are changed by this package's hooks.
#: Its value is a JSON list: the model's folder, and whether its code may run.
SERVER_VARIABLE = "ROLLCAST_SGLANG_SERVER"
#: Key of SGLang's ``custom_params`` that passes a request's stop strings to the server's processes.
STOP_STRINGS = "rollcast_stop"

_STAND_INS = Path(__file__).parent / "stand_ins"


def find_sglang() -> Path:
    """Return the folder of SGLang's package without importing it, which takes seconds and half a gigabyte.

    Raises:
        PluginLoadError: it is not installed here.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PluginLoadError(
            "rollout=sglang needs SGLang in the replica's environment, and it is not installed there. Install it "
            'with pip install "rollcast-sglang[cuda]" (on a machine without a GPU as the README of '
            "rollcast-sglang says), or name the interpreter that has it in rollout.replica.python"
        )
    return Path(spec.submodule_search_locations[0])


def server_environment(setup: RolloutSetup, base: Mapping[str, str], gpu: bool) -> dict[str, str]:
    """Return the environment variables of the server's process.

    Args:
        setup: setup of the rollout.
        base: inherited variables; they override defaults that users may change.
        gpu: True if it runs on a GPU. Otherwise packages that are not installed are replaced by stand-ins.
    """
    wanted = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # /health then only reports whether the server is up; the default generates a token and takes a second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if setup.node.nodes > 1:
        wanted["SGLANG_HOST_IP"] = setup.node.host
    if gpu:
        # SGLang would set 0, and NCCL connects only processes that map memory alike. -2 is NCCL's own default, which
        # the trainer has unless the user sets the variable for both.
        wanted["NCCL_CUMEM_ENABLE"] = "-2"
    ranks = setup.config.tensor_model_parallel_size
    if not gpu and ranks > 1 and (bound := bind_threads(ranks)) is not None:
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = bound
    # SGLang reserves a position or two of its context, so its context must exceed the model's.
    model = json.dumps([setup.model_path, setup.trust_remote_code])
    forced = {SERVER_VARIABLE: model, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if not gpu:
        forced["SGLANG_USE_CPU_ENGINE"] = "1"
        folders = [str(_STAND_INS / name) for name in ("sgl_kernel", "torchvision") if not _is_installed(name)]
        forced["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [base.get("PYTHONPATH")])])
    return {**wanted, **base, **forced}


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
