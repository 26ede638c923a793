"""What needs an engine, or a failed start, of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_tools import LONG, SHORT, TOLERANCE, FolderBuckets, build, gap_to, require_versions, under_way

from rollcast.contracts.rollout import EngineNode, RolloutRequest
from rollcast.errors import ConfigError, RequestError, RolloutError, WeightSyncError
from rollcast_testing.rollout_tools import (
    GREEDY,
    all_tokens,
    generate_all,
    greedy_tokens,
    make_prompts,
    only_sequence,
    run_prompts,
)
from rollcast_testing.rollout_updates import _make_adapter, _merge
from rollcast_testing.tiny import tiny_model_folder

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"enable_chunked_prefil": True},
            r"enable_chunked_prefil is not an argument.*did you mean enable_chunked_prefill",
        ),
        ({"max_num_seqs": 3}, r"set rollout\.max_num_seqs instead"),
        ({"tensor_parallel_size": 2}, r"set rollout\.tensor_model_parallel_size instead"),
        ({"nnodes": 2}, r"nnodes cannot be set"),
        ({"logprobs_mode": "raw_logprobs"}, r"logprobs_mode cannot be set"),
    ],
    ids=["misspelt", "has-a-key", "has-another-key", "devices", "ours"],
)
def test_engine_kwargs_that_cannot_be(folders: list[Path], extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(folders[0], engine_kwargs=extra)


def test_a_value_that_vllm_refuses(folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"100000"):
        build(folders[0], max_model_len=100_000)


def test_a_folder_without_weights(tmp_path: Path, models: list[Any]) -> None:
    """The engine starts, waits for the first update, and ends with all of its processes."""
    before = set(psutil.Process().children(recursive=True))
    folder = tiny_model_folder(tmp_path / "bare", weights=False, head_dim=32)
    rollout = build(folder, max_model_len=64, engine_kwargs={"block_size": 32})
    try:
        with pytest.raises(WeightSyncError, match="started without weights"):
            generate_all(rollout, [SHORT])
        asyncio.run(rollout.update_weights([list(models[1].named_parameters())], 1))
        prompts = make_prompts(3)
        expected = [greedy_tokens(models[1], prompt, 12) for prompt in prompts]
        assert all_tokens(run_prompts(rollout, prompts, GREEDY)) == expected
        with pytest.raises(RequestError, match=r"64 \(rollout\.max_model_len\)"):
            generate_all(rollout, [RolloutRequest("long", [5] * 60, GREEDY)])
        started = set(psutil.Process().children(recursive=True)) - before

        async def close_meanwhile() -> list[Any]:
            tasks = [asyncio.create_task(rollout.generate(replace(SHORT, request_id=str(i)))) for i in range(4)]
            await asyncio.sleep(0.01)
            await asyncio.to_thread(rollout.close)
            return await asyncio.gather(*tasks, return_exceptions=True)

        late = [each for each in asyncio.run(close_meanwhile()) if isinstance(each, BaseException)]
        assert all(isinstance(each, RolloutError) for each in late)
    finally:
        rollout.close()
    with pytest.raises(RolloutError, match="closed"):
        generate_all(rollout, [SHORT])
    # Python's own tracker of shared memory lives as long as this process.
    engines = [process for process in started if "resource_tracker" not in " ".join(_command(process))]
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert not alive


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_adapter_does_not_outlive_full_weights(folders: list[Path], models: list[Any]) -> None:
    """Not even in requests that came with it, and are still under way."""
    rollout = build(folders[0], enable_lora=True, max_lora_rank=8)
    try:
        require_versions(rollout)
        adapter = _make_adapter(models[0], 1)
        base = [models[0], _merge(folders[0], adapter), models[1]]
        prompts = make_prompts(3)

        async def update_meanwhile() -> list[list[Any]]:
            without = await under_way(rollout, prompts)
            await rollout.update_adapter(adapter, 1)
            assert all(task.done() for task in without)
            tasks = await under_way(rollout, prompts)
            await rollout.update_weights([list(models[1].named_parameters())], 2)
            return [await asyncio.gather(*without), await asyncio.gather(*tasks)]

        without, outputs = asyncio.run(update_meanwhile())
        for prompt, early, output in zip(prompts, without, outputs, strict=True):
            assert set(only_sequence(early).weight_versions) == {0}
            assert set(only_sequence(output).weight_versions) == {1, 2}
            assert gap_to(dict(enumerate(base)), prompt, only_sequence(output)) <= TOLERANCE
    finally:
        rollout.close()


#: The second node's process of an engine.
PART = """
import sys, time
from vllm_tools import build_part

if __name__ == "__main__":
    part = build_part(sys.argv[1], int(sys.argv[2]), **{sys.argv[3]: 2})
    while True:
        part.check_health()
        time.sleep(0.5)
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("key", ["pipeline_model_parallel_size", "data_parallel_size"])
def test_two_nodes(
    folders: list[Path], models: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Two processes, as on two nodes, answer like one engine, before and after an update of the weights."""
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tmp_path / "part.py"
    script.write_text(PART)
    paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    part = subprocess.Popen([sys.executable, str(script), str(folders[0]), str(port), key], env=environment)
    rollout = None
    try:
        rollout = build(folders[0], EngineNode(0, 2, port=port), **{key: 2})
        prompts = make_prompts(6)
        assert all_tokens(run_prompts(rollout, prompts, GREEDY)) == [greedy_tokens(models[0], p, 12) for p in prompts]
        report = asyncio.run(rollout.update_weights([list(models[1].named_parameters())], 1))
        assert report.tensors == len(list(models[1].named_parameters()))
        assert all_tokens(run_prompts(rollout, prompts, GREEDY)) == [greedy_tokens(models[1], p, 12) for p in prompts]
        assert part.poll() is None
    finally:
        part.kill()
        part.wait()
        if rollout is not None:
            rollout.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_tensor_parallel(folders: list[Path], models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks answer like one, take updates both ways, and die together."""
    # Set by an engine of one rank that ran in this process before.
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    rollout = build(folders[0], tensor_model_parallel_size=2)
    try:
        prompts = make_prompts(6)
        assert all_tokens(run_prompts(rollout, prompts, GREEDY)) == [greedy_tokens(models[0], p, 12) for p in prompts]
        for version, weights in ((1, FolderBuckets(folders[1])), (2, [list(models[1].named_parameters())])):
            report = asyncio.run(rollout.update_weights(weights, version))
            assert report.tensors == len(list(models[1].named_parameters()))
            outputs = run_prompts(rollout, prompts, GREEDY)
            assert all_tokens(outputs) == [greedy_tokens(models[1], prompt, 12) for prompt in prompts]
            assert set(only_sequence(outputs[0]).weight_versions) == {version}
        with pytest.raises(WeightSyncError) as caught:
            asyncio.run(rollout.update_weights(FolderBuckets(folders[0], spoil="model.norm.weight"), 3))
        assert caught.value.tensor == "model.norm.weight"
        asyncio.run(rollout.update_weights(FolderBuckets(folders[0]), 4))
        engine = psutil.Process(rollout.process_ids[0])
        workers = [each for each in engine.children(recursive=True) if "spawn_main" in " ".join(_command(each))]
        assert len(workers) == 2

        async def lose_a_worker() -> list[Any]:
            tasks = [asyncio.create_task(rollout.generate(RolloutRequest(f"r{i}", [5], LONG))) for i in range(3)]
            await rollout.generate(SHORT)
            workers[1].kill()
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

        assert all(isinstance(answer, RolloutError) for answer in asyncio.run(lose_a_worker()))
        with pytest.raises(RolloutError, match="died"):
            asyncio.run(rollout.check_health())
    finally:
        rollout.close()
    _, alive = psutil.wait_procs([engine, *workers], timeout=10)
    assert not alive


USER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tools!r})
if __name__ == "__main__":
    from vllm_tools import build
    rollout = build(Path({folder!r}))
    print("engines", *rollout.process_ids, flush=True)
    time.sleep(600)
"""


def test_an_engine_ends_with_its_killed_user(folders: list[Path], tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER.format(tools=str(Path(__file__).parent), folder=str(folders[0])))
    user = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        line = next(line for line in user.stdout if line.startswith("engines"))
        engines = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        assert engines
        assert all(each.is_running() for each in engines)
    finally:
        os.kill(user.pid, signal.SIGKILL)
        user.wait()
    _, alive = psutil.wait_procs(engines, timeout=20)
    assert not alive
