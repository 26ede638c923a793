"""Parts that adapters of engines share."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.device import devices
from rollcast.contracts.rollout import EngineNode
from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import ConfigError, RolloutError, WeightSyncError
from rollcast_serving.bucket_memory import BucketMemory, SharedBucket
from rollcast_serving.engines import arguments
from rollcast_serving.engines.arguments import bind_threads, join_arguments, limit_positions
from rollcast_serving.engines.http_client import EngineClient, RefusedError
from rollcast_serving.engines.server_process import ServerProcess
from rollcast_serving.engines.updates import dump_remote, join_reports, same_report, share_buckets
from rollcast_serving.engines.weight_state import WeightState
from rollcast_serving.requests import ModelLimits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def buckets(draw: Any) -> list[tuple[str, torch.Tensor]]:
    named = []
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        named.append((f"layer.{number}", (torch.randn(shape) * 50).to(dtype)))
    return named


@settings(max_examples=40, deadline=None)
@given(st.lists(buckets(), min_size=1, max_size=4))
def test_a_bucket_arrives_as_it_was_put(batches: list[list[tuple[str, torch.Tensor]]]) -> None:
    memory = BucketMemory()
    try:
        for bucket in batches:
            shared: SharedBucket = pickle.loads(pickle.dumps(memory.put(WeightBucket(bucket, {bucket[0][0]: "sum"}))))
            (arrived,) = shared
            assert [name for name, _ in arrived] == [name for name, _ in bucket]
            assert arrived.expected == {bucket[0][0]: "sum"}
            for (_, sent), (_, got) in zip(bucket, arrived, strict=True):
                assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
                assert torch.equal(got, sent)
    finally:
        memory.close()


def test_another_process_reads_a_bucket_and_nothing_is_left() -> None:
    memory = BucketMemory()
    shared = memory.put([("w", torch.arange(6.0).view(2, 3))])
    code = "import pickle, sys; ((_, t),), = pickle.load(sys.stdin.buffer); print(t.sum().item(), tuple(t.shape))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(shared), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "15.0 (2, 3)"
    memory.close()
    assert not Path(shared.path).exists()


@dataclass(frozen=True)
class Remote:
    """Buckets that can be pickled."""

    names: Sequence[str]
    broken: Any = None

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        return iter([[(name, torch.zeros(1))] for name in self.names])


def test_only_buckets_of_another_process_are_pickled() -> None:
    remote = Remote(["a"])
    assert dump_remote(remote, lambda: pickle.dumps(remote), EngineNode()) is not None
    held = [[("a", torch.zeros(1))]]
    assert dump_remote(held, lambda: pickle.dumps(held), EngineNode()) is None
    assert dump_remote(iter(held), lambda: pickle.dumps(held), EngineNode()) is None
    unpicklable = Remote(["a"], broken=lambda: None)
    assert dump_remote(unpicklable, lambda: pickle.dumps(unpicklable), EngineNode()) is None


def test_buckets_are_shared_one_by_one_and_a_failing_source_is_named() -> None:
    def source() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [("a", torch.ones(2))]
        yield [("b", torch.ones(3))]
        raise OSError("the disk is gone")

    seen: list[str] = []

    async def main() -> None:
        async with aclosing(share_buckets(source(), EngineNode())) as shared:
            async for bucket in shared:
                ((name, _),) = next(iter(bucket))
                seen.append(name)

    with pytest.raises(WeightSyncError, match="could not be read: OSError: the disk is gone"):
        asyncio.run(main())
    assert seen == ["a", "b"]


def report(checksum: str, tensors: int = 1) -> WeightReport:
    return WeightReport(3, tensors, 8 * tensors, 0.5, {"0": checksum}, 0.25)


def test_reports_of_parts_and_of_ranks() -> None:
    joined = join_reports([report("x"), report("y", 2)], 3)
    assert (joined.tensors, joined.bytes, joined.checksums) == (3, 24, {"0": "x", "1": "y"})
    assert joined.load_seconds == 0.5
    assert same_report([report("x"), report("x")], 3) == report("x")
    with pytest.raises(WeightSyncError, match="rank 1 of the engine got weights of version 3 unlike"):
        same_report([report("x"), report("y")], 3)
    with pytest.raises(WeightSyncError, match="no such tensor"):
        same_report([report("x"), WeightSyncError("no such tensor")], 3)


def test_a_failed_update_forbids_generating_until_the_next_one() -> None:
    state = WeightState("the folder has no weights")
    with pytest.raises(WeightSyncError, match=r"the folder has no weights; generation is blocked until"):
        state.check()
    state.accept("weights")
    state.check()
    failure = state.fail("adapter", 4, WeightSyncError("rank 8", tensor="q.lora_A"))
    assert failure.tensor == "q.lora_A"
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"update of the adapter to version 4 failed: rank 8") as caught:
            state.check()
        assert caught.value.tensor == "q.lora_A"
        assert caught.value is not failure
    state.fail("weights", 5, TimeoutError())
    state.accept("adapter")
    with pytest.raises(WeightSyncError, match="version 5 failed: TimeoutError"):
        state.check()
    state.fail("adapter", 6, ValueError("x"))
    state.accept("weights")  # the full model replaces the adapter too
    state.check()


def test_engine_kwargs_are_checked_by_name() -> None:
    config = SimpleNamespace(
        engine_kwargs={"chunk_prefill": 1}, max_model_len=5, device_arguments={"tp": "tensor_size", "nnodes": ""}
    )

    def join(**kwargs: Any) -> dict[str, Any]:
        config.engine_kwargs = kwargs
        own = {"max_seq_len": 5, "quiet": True}
        return join_arguments(own, config, ["chunk_size", "quiet"], "Engine's Args", {"max_seq_len": "max_model_len"})

    assert join(chunk_size=4) == {"chunk_size": 4, "max_seq_len": 5, "quiet": True}
    with pytest.raises(
        ConfigError, match=r"engine_kwargs\.chunk_siz is not an argument of Engine's Args; did you mean ch"
    ):
        join(chunk_siz=4)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.max_seq_len: set rollout\.max_model_len instead"):
        join(max_seq_len=4)
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs\.tp: set rollout\.tensor_size instead"):
        join(tp=2)
    with pytest.raises(
        ConfigError, match=r"rollout\.engine_kwargs\.nnodes cannot be set: rollcast depends on its value"
    ):
        join(nnodes=2)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.quiet cannot be set"):
        join(quiet=False)


def test_limits_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ModelLimits(100, 512)
    assert limit_positions(limits, None, "rollout.x") == limits == limit_positions(limits, 600, "rollout.x")
    assert limit_positions(limits, 64, "rollout.x") == ModelLimits(100, 64, "rollout.x")
    assert limit_positions(ModelLimits(100, None), 64, "rollout.x").max_positions == 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 7}, raising=False)
    assert bind_threads(2) == "2|5"
    assert bind_threads(4) is None


SERVER = """
from aiohttp import web
from rollcast_serving.engines.server_process import read_spec

args, listening = read_spec()
print("arguments", args, flush=True)
if args.get("refuse_to_start"):
    raise SystemExit("no such attention backend")

async def events(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(3):
        await response.write(f'data: {{"n": {number}}}\\n\\n'.encode())
        if args.get("die_at") == number:
            import os
            os._exit(5)
    await response.write(b"data: [DONE]\\n\\n")
    return response

async def refuse(request):
    assert request.headers["Authorization"] == f"Bearer {listening['api_key']}"
    return web.Response(status=400, text=(await request.text()))

app = web.Application()
app.add_routes([web.get("/health", lambda request: web.Response()), web.post("/events", events), web.post("/no", refuse)])
web.run_app(app, host=listening["host"], port=listening["port"], reuse_address=True)
"""


@dataclass
class Server:
    folder: Path
    processes: list[ServerProcess] = field(default_factory=list)

    def __call__(self, **args: Any) -> tuple[ServerProcess, EngineClient]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        server = ServerProcess("Engine", "toy_server", args, environment, self.folder)
        self.processes.append(server)
        return server, EngineClient(server)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "toy_server.py").write_text(SERVER)
    server = Server(tmp_path)
    yield server
    for process in server.processes:
        process.stop()


def test_a_server_answers_streams_and_refuses(start: Server) -> None:
    server, client = start()

    async def main() -> list[dict[str, Any]]:
        await client.wait_ready(60)
        with pytest.raises(RefusedError, match=r'Engine answered /no with 400: \{"a": 1\}'):
            await client.post("/no", {"a": 1})
        with pytest.raises(RefusedError, match="with 404"):
            await client.get("/absent", 5)
        return [event async for event in client.stream("/events", {})]

    assert asyncio.run(main()) == [{"n": 0}, {"n": 1}, {"n": 2}]
    server.stop()
    assert not server.is_alive


def test_a_server_that_dies_is_told_with_its_log(start: Server) -> None:
    _, client = start(die_at=1)

    async def main() -> None:
        await client.wait_ready(60)
        async for _ in client.stream("/events", {}):
            pass

    with pytest.raises(RolloutError, match=r"Engine's server died, its process ended with exit code 5.*\n.*arguments"):
        asyncio.run(main())


def test_a_server_that_does_not_start_says_why(start: Server) -> None:
    _, client = start(refuse_to_start=True)
    with pytest.raises(RolloutError, match=r"(?s)Engine's server did not start.*no such attention backend"):
        asyncio.run(client.wait_ready(60))


@pytest.mark.parametrize("name", ["npu", "xpu", "cpu"])
def test_an_engine_runs_on_any_accelerator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = devices.get(name)
    monkeypatch.setattr(arguments, "current_device", lambda: kind)
    assert arguments.has_gpu() == (name != "cpu")


def test_buckets_for_the_processes_of_other_nodes() -> None:
    """They are fetched over the network by a token, each reader the whole bucket, and the memory is reused."""
    node = EngineNode(0, 2, "127.0.0.1", "127.0.0.1", 1)
    sent = [[("a", torch.randn(3, 5)), ("b", torch.arange(7, dtype=torch.bfloat16))], [("c", torch.randn(40_000))]]
    assert dump_remote(SimpleNamespace(), lambda: "read it here", EngineNode()) == "read it here"
    assert dump_remote(SimpleNamespace(), lambda: "read it here", node) is None

    async def fetch() -> None:
        number = 0
        async with aclosing(share_buckets(iter(sent), node)) as shared:
            async for bucket in shared:
                copies = [pickle.loads(pickle.dumps(bucket)) for _ in range(2)]
                for copy in copies:
                    (fetched,) = await asyncio.to_thread(list, copy)
                    assert [name for name, _ in fetched] == [name for name, _ in sent[number]]
                    assert all(
                        torch.equal(one, other[1]) for (_, one), other in zip(fetched, sent[number], strict=True)
                    )
                stranger = dataclasses.replace(copies[0], token="0" * len(copies[0].token))
                with pytest.raises(WeightSyncError, match="closed the connection"):
                    await asyncio.to_thread(list, stranger)
                number += 1

    asyncio.run(fetch())
