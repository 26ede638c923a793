"""The process of a replica: started, asked, updated, ended; and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving_tools import EOS, greedy, load_model, make_requests, write_model

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.errors import ConfigError, PluginNotFoundError, RequestError, RolloutError, WeightSyncError
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_serving.client import ReplicaClient, ReplicaGoneError, ReplicaReceiver
from rollcast_serving.contracts.weight_sync import SyncSettings, weight_syncs
from rollcast_serving.launcher import ReplicaAddress, ReplicaProcess, ReplicaSpec, find_cause
from rollcast_serving.testing.weight_syncs import NamedTensors

pytestmark = pytest.mark.long

Started = tuple[ReplicaProcess, ReplicaAddress]
Start = Callable[..., Started]


def ask(address: ReplicaAddress, requests: list[RolloutRequest]) -> dict[int, Any]:
    async def collect() -> dict[int, Any]:
        client = ReplicaClient(address)
        try:
            return {index: output async for index, output in client.generate(requests)}
        finally:
            await client.close()

    return asyncio.run(collect())


def post(url: str, body: Any, token: str | None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_serves_updates_and_ends(start_replica: Start, model_folder: Path, tmp_path: Path) -> None:
    process, address = start_replica()
    model, requests = load_model(model_folder), make_requests(12)
    outputs = ask(address, [*requests, RolloutRequest("bad", [], SamplingParams())])
    assert isinstance(outputs.pop(12), RequestError)
    for index, request in enumerate(requests):
        (sequence,) = outputs[index].sequences
        assert outputs[index].request_id == request.request_id
        assert list(sequence.token_ids) == greedy(model, request.prompt_ids, 8)
        assert list(sequence.weight_versions) == [0] * len(sequence.token_ids)
        assert len(sequence.log_probs) == len(sequence.token_ids)
    other = load_model(write_model(tmp_path / "other", seed=1))
    named = list(other.named_parameters())
    for version, name in enumerate(["shared_memory", "collective", "disk", "delta", "delta"], 4):
        sync = weight_syncs.get(name)(NamedTensors(named), [ReplicaReceiver(address)], SyncSettings(50_000, 30.0))  # type: ignore[arg-type]
        (report,) = asyncio.run(sync.sync(version))
        assert (report.version, report.tensors) == (version, len(named))
        assert report.load_seconds <= report.seconds
        (sequence,) = ask(address, requests[:1])[0].sequences
        assert list(sequence.token_ids) == greedy(other, requests[0].prompt_ids, 8)
        assert set(sequence.weight_versions) == {version}
        sync.close()
    process.stop()
    assert not process.is_alive
    with pytest.raises(ReplicaGoneError, match="replica 0 on"):
        ask(address, requests[:1])


@pytest.mark.exhaustive
def test_stops_at_every_stop_token(start_replica: Start, model_folder: Path) -> None:
    (request,) = make_requests(1)
    tokens = greedy(load_model(model_folder), request.prompt_ids, 8)
    stop = tokens[1]
    _, address = start_replica(stop_token_ids=(EOS, stop))
    (sequence,) = ask(address, [request])[0].sequences
    assert (list(sequence.token_ids), sequence.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")


def test_wrong_weights_stop_it_until_right_ones_come(shared_replica: Started, model_folder: Path) -> None:
    _, address = shared_replica
    named = list(load_model(model_folder).named_parameters())
    engine = NamedTensors([*named, ("model.no_such.weight", named[0][1])])
    sync = weight_syncs.get("shared_memory")(engine, [ReplicaReceiver(address)], SyncSettings(timeout_s=30.0))  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match=r"replica 0.*no_such\.weight") as caught:
        asyncio.run(sync.sync(1))
    assert caught.value.tensor == "model.no_such.weight"
    assert isinstance(ask(address, make_requests(1))[0], WeightSyncError)
    engine.named = named
    asyncio.run(sync.sync(2))
    assert ask(address, make_requests(1))[0].sequences
    sync.close()


def test_nothing_without_the_token(shared_replica: Started) -> None:
    process, address = shared_replica
    openai = f"http://127.0.0.1:{address.openai_port}/v1/completions"
    for url in (f"{address.url}/generate", f"{address.url}/update_weights", openai):
        for token in (None, "wrong", address.token[:-1], "ü"):
            if token == "ü":
                continue  # no such header can be sent
            assert post(url, {"requests": []}, token)[0] == 401
    assert post(f"{address.url}/abort", b"{no json", address.token)[0] == 400
    assert address.token not in " ".join(psutil.Process(process.popen.pid).cmdline())
    assert address.token not in repr(address)


def test_openai_endpoint(shared_replica: Started, model_folder: Path) -> None:
    _, address = shared_replica
    base = f"http://127.0.0.1:{address.openai_port}/v1"
    model = load_model(model_folder)
    body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    status, answer = post(f"{base}/completions", body, address.token)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["token_ids"][:3] == greedy(model, [5, 6, 7], 6)[:3]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 6
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    status, answer = post(f"{base}/completions", {**body, "prompt": [[5], [6]], "n": 2}, address.token)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    status, answer = post(f"{base}/completions", {"prompt": "a b", "max_tokens": 3}, address.token)
    assert status == 200
    assert isinstance(answer["choices"][0]["text"], str)
    for wrong in (
        {"prompt": 5},
        {"prompt": []},
        {**body, "tools": [1]},
        {**body, "temperature": "x"},
        {**body, "n": 0},
        [],
    ):
        assert post(f"{base}/completions", wrong, address.token)[0] == 400


@pytest.mark.exhaustive
def test_ends_with_its_parent(replica_spec: ReplicaSpec, tmp_path: Path) -> None:
    code = (
        "import json, sys, os, signal\n"
        "from rollcast_serving.launcher import ReplicaProcess, ReplicaSpec\n"
        "process = ReplicaProcess(ReplicaSpec(**json.loads(sys.argv[1])))\n"
        "process.wait_ready()\n"
        "print(process.popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    spec = json.dumps({**asdict(replica_spec), "log_dir": str(tmp_path)})
    out = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True, check=False).stdout
    pid = int(out)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_replica_is_told(start_replica: Start) -> None:
    process, address = start_replica()

    async def kill_while_asked() -> None:
        client = ReplicaClient(address)
        answers = client.generate(make_requests(4, max_tokens=400, ignore_eos=True))
        asyncio.get_running_loop().call_later(0.3, os.kill, process.popen.pid, signal.SIGKILL)
        try:
            async for _ in answers:
                pass
        finally:
            await client.close()

    with pytest.raises(ReplicaGoneError):
        asyncio.run(kill_while_asked())
    process.popen.wait()
    assert process.describe_end() == "killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"python": "/no/such/python"}, RolloutError, "rollout.replica.python='/no/such/python'"),
        ({"python": "/bin/false"}, RolloutError, "exit code 1"),
        (
            {"rollout": {**asdict(HfRolloutConfig()), "max_batch_size": 0}},
            ConfigError,
            "max_batch_size must be at least 1, got 0",
        ),
        ({"rollout": {"name": "no_such"}}, PluginNotFoundError, "no_such"),
        ({"env": {"ROLLCAST_LOGGING_LEVEL": "loud"}}, ConfigError, "ROLLCAST_LOGGING_LEVEL is 'loud'"),
        ({"launch_timeout_s": 0.05}, RolloutError, r"launch_timeout_s=0.05"),
    ],
)
@pytest.mark.cases(1)
def test_what_cannot_start_says_why(start_replica: Start, changes: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        start_replica(**changes)


def test_a_model_that_is_not_there(start_replica: Start) -> None:
    _, address = start_replica(model_path="/no/such/model")  # the hf rollout loads it when it is needed
    assert isinstance(ask(address, make_requests(1))[0], OSError)


def test_a_failed_start_quotes_the_cause_in_its_log() -> None:
    log = """INFO loading
(EngineCore pid=7) ERROR [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR [core.py:1510] ValueError: To serve one request, 0.35 GiB are needed
RuntimeError: Engine core initialization failed. See root cause above.
rollcast.errors.RolloutError: the engine did not start: RuntimeError: Engine core initialization failed.
"""
    message = (
        "replica 0: the engine did not start: RuntimeError: Engine core initialization failed. See root cause above."
    )
    assert find_cause(log, message) == "ValueError: To serve one request, 0.35 GiB are needed"
    assert find_cause("INFO no Error: here\n", message) == ""
