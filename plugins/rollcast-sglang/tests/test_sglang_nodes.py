"""An engine on two nodes: here two processes, each with its own folder and server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollcast.contracts.rollout import EngineNode, RolloutSetup
from rollcast.errors import WeightSyncError
from rollcast_sglang.rollout import SglangRollout
from rollcast_sglang.schemas import SglangRolloutConfig
from rollcast_testing.rollout_tools import (
    EOS,
    GREEDY,
    PAD,
    greedy_tokens,
    load_model,
    make_prompts,
    only_sequence,
    run_prompts,
    write_model,
)

pytest.importorskip("sglang")
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

#: The second node's process, which ends with exit code 3 if its part of the engine ends.
PART = """
import sys, time
from rollcast.contracts.rollout import EngineNode, RolloutSetup
from rollcast.errors import RolloutError
from rollcast_sglang.rollout import SglangRollout
from rollcast_sglang.schemas import SglangRolloutConfig

folder, port = sys.argv[1], int(sys.argv[2])
config = SglangRolloutConfig(tensor_model_parallel_size=2, dtype="bfloat16")
part = SglangRollout.join(RolloutSetup(config, folder, 3, 0, 2, node=EngineNode(1, 2, port=port)))
try:
    while True:
        part.check_health()
        time.sleep(0.2)
except RolloutError:
    part.close()
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "first", seed=0)


@pytest.fixture(scope="module")
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangRollout, Any]]:
    """The rollout of the first node, and the process of the second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    part = subprocess.Popen([sys.executable, "-c", PART, str(folder), str(port)])
    # bfloat16 is what SGLang's CPU communication has.
    config = SglangRolloutConfig(tensor_model_parallel_size=2, dtype="bfloat16")
    rollout = SglangRollout(RolloutSetup(config, str(folder), 3, PAD, EOS, node=EngineNode(0, 2, port=port)))
    try:
        yield rollout, part
    finally:
        rollout.close()
        part.kill()
        part.wait()


def agree(rollout: SglangRollout, model: Any) -> bool:
    """True if nearly all first tokens are those of ``model`` in float32."""
    prompts = make_prompts(12)
    outputs = run_prompts(rollout, prompts, replace(GREEDY, max_tokens=1))
    first = [only_sequence(output).token_ids[0] for output in outputs]
    return sum(token == greedy_tokens(model, prompt, 1)[0] for prompt, token in zip(prompts, first, strict=True)) >= 10


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # a minute on a quiet machine, several on a busy one
def test_it_answers_takes_updates_and_ends_as_a_whole(
    nodes: tuple[SglangRollout, Any], folder: Path, tmp_path: Path
) -> None:
    rollout, part = nodes
    assert agree(rollout, load_model(folder))
    other = load_model(write_model(tmp_path / "other", seed=1))
    named = list(other.named_parameters())
    report = asyncio.run(rollout.update_weights([named], 1))
    assert report.tensors == len(named)
    assert agree(rollout, other)
    with pytest.raises(WeightSyncError, match="norm"):
        asyncio.run(rollout.update_weights([[(n, t) for n, t in named if n != "model.norm.weight"]], 2))
    assert part.poll() is None
    asyncio.run(rollout.update_weights([named], 3))
    assert agree(rollout, other)

    schedulers = [each for each in psutil.Process(part.pid).children(recursive=True) if "scheduler" in each.name()]
    schedulers[0].send_signal(signal.SIGKILL)
    assert part.wait(60) == 3
