"""A replica's server over scripted rollouts: heartbeats, dead engines, aborts, large answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from aiohttp import web
from serving_tools import make_requests

from rollcast.contracts.rollout import (
    BaseRollout,
    EngineLoad,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    SamplingParams,
)
from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import RequestError, RolloutError
from rollcast_serving.client import ReplicaClient, ReplicaGoneError, ReplicaReceiver
from rollcast_serving.contracts.weight_sync import SyncSettings, weight_syncs
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.manager import ServerManager, Stragglers
from rollcast_serving.server import build_app
from rollcast_serving.testing.weight_syncs import NamedTensors

TOKEN = "token"
#: Prompt of which nothing has been sampled when it is aborted.
EMPTY = 60


class ScriptedRollout(BaseRollout):
    """A rollout that answers at once, unless its engine is dead; with ``ignore_eos`` it answers when it is aborted."""

    def __init__(self) -> None:
        self.dead = ""
        self.aborted: list[str] = []
        self.waiting: dict[str, asyncio.Event] = {}
        self.length = 1
        self.cancelled = 0

    async def report_load(self) -> EngineLoad:
        return EngineLoad(5, 1)

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        if self.dead:
            raise RolloutError("the engine does not answer")
        if request.prompt_ids[0] == 99:
            raise RolloutError("this request only")
        if request.sampling.ignore_eos:
            self.waiting[request.request_id] = asyncio.Event()
            try:
                await self.waiting[request.request_id].wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        was_cut = request.request_id in self.aborted
        length = self.length * (not was_cut or request.prompt_ids[0] != EMPTY)
        sequence = RolloutSequence(
            array("i", [7]) * length,
            array("f", [-1]) * length,
            "abort" if was_cut else "stop",
            array("q", [0]) * length,
        )
        return RolloutOutput(request.request_id, [sequence] * request.sampling.n, request.sampling)

    async def update_weights(self, buckets: Any, version: int) -> WeightReport:
        raise NotImplementedError

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        return WeightReport(version, 0, 0, 0.0, {})

    async def abort(self, request_ids: Any = None) -> None:
        for name in request_ids:
            self.aborted.append(name)
            self.waiting[name].set()

    async def check_health(self) -> None:
        if self.dead:
            raise RolloutError(self.dead)


@contextlib.asynccontextmanager
async def serving(
    rollout: BaseRollout, heartbeat_s: float = 60.0, on_death: Callable[[], None] = lambda: None
) -> AsyncIterator[ReplicaAddress]:
    runner = web.AppRunner(
        build_app(rollout, TOKEN, EngineWatch(rollout, on_death), heartbeat_s), handler_cancellation=True
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield ReplicaAddress(0, "127.0.0.1", "127.0.0.1", runner.addresses[0][1], 0, TOKEN)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def asking(address: ReplicaAddress, silence_s: float = 60.0) -> AsyncIterator[ReplicaClient]:
    client = ReplicaClient(address, silence_s)
    try:
        yield client
    finally:
        await client.close()


async def collect(client: ReplicaClient, requests: list[RolloutRequest]) -> dict[int, Any]:
    return {index: output async for index, output in client.generate(requests)}


def test_a_dead_engine_is_a_dead_replica_for_every_call() -> None:
    rollout, deaths = ScriptedRollout(), []

    async def main() -> None:
        async with serving(rollout, on_death=lambda: deaths.append(1)) as address, asking(address) as client:
            assert len(await collect(client, make_requests(3))) == 3
            await client.call("health")
            rollout.dead = "killed by signal 9"
            for _ in range(2):
                with pytest.raises(ReplicaGoneError, match="its engine is dead: killed by signal 9"):
                    await collect(client, make_requests(3))
            for path, body in (("health", {}), ("release", {"tags": []})):
                with pytest.raises(ReplicaGoneError, match="killed by signal 9"):
                    await client.call(path, body)
            with pytest.raises(ReplicaGoneError, match="killed by signal 9"):
                await asyncio.to_thread(ReplicaReceiver(address).receive_weights, "disk", {"folder": "/no"}, 1)

    asyncio.run(main())
    assert deaths == [1]


def test_one_failed_request_of_a_living_engine_is_that_request_alone() -> None:
    async def main() -> None:
        async with serving(ScriptedRollout()) as address, asking(address) as client:
            requests = [*make_requests(3), RolloutRequest("bad", [99], SamplingParams())]
            unsent = RolloutRequest("no ids", [1.5], SamplingParams())  # type: ignore[list-item]
            answers = await collect(client, [*requests, unsent])
            assert isinstance(answers[4], RequestError)
            assert [type(answers[index]) for index in range(4)] == [RolloutOutput] * 3 + [RolloutError]
            await client.call("health")

    asyncio.run(main())


def test_a_lone_long_answer_is_no_death() -> None:
    """With heartbeats a silence longer than the client's limit is only that of the answer."""
    rollout = ScriptedRollout()

    async def main() -> None:
        # The answer ends with the fifth heartbeat, so its time is at least five intervals, and no more than the limit
        # passes without a byte.
        async with serving(rollout, heartbeat_s=0.05) as address, asking(address, silence_s=30.0) as client:
            long = RolloutRequest("long", [5], SamplingParams(ignore_eos=True))
            beats = []

            def count(load: EngineLoad | None) -> None:
                beats.append(load)
                if beats.count(None) == 5:
                    next(iter(rollout.waiting.values())).set()

            client.on_load = count
            (answer,) = (await collect(client, [long])).values()
            assert list(answer.sequences[0].token_ids) == [7]
            assert beats.count(None) >= 5

    asyncio.run(main())


def test_silence_without_heartbeats_is_death() -> None:
    async def main() -> None:
        async with serving(ScriptedRollout(), heartbeat_s=600.0) as address, asking(address, silence_s=0.2) as client:
            with pytest.raises(ReplicaGoneError, match="was silent for"):
                await collect(client, [RolloutRequest("long", [5], SamplingParams(ignore_eos=True))])

    asyncio.run(main())


def test_stragglers_are_cut_with_what_they_sampled() -> None:
    """The long request of this batch, and neither its empty one for good nor one of another batch."""
    rollout = ScriptedRollout()
    waits = SamplingParams(ignore_eos=True)
    quick = [RolloutRequest(f"0.{index}", [5 + index], SamplingParams()) for index in range(8)]
    late = [RolloutRequest("0.8", [50], waits), RolloutRequest("0.9", [EMPTY], waits)]
    stranger = RolloutRequest("1.8", [50], waits)

    async def main() -> None:
        async with serving(rollout) as address:
            manager = ServerManager([address])
            other = asyncio.ensure_future(manager.generate_many([stranger]))
            batch = asyncio.ensure_future(manager.generate_many([*quick, *late], stragglers=Stragglers(0.2, 0.05)))
            async with asyncio.timeout(60):
                while len(rollout.waiting) < 4:  # the empty one is asked again, and is not cut then
                    await asyncio.sleep(0.01)
                assert not batch.done()
                await manager.abort(["0.9"])
                outputs = [each for each in await batch if isinstance(each, RolloutOutput)]
            assert [each.request_id for each in outputs] == [each.request_id for each in [*quick, *late]]
            reasons = [each.sequences[0].finish_reason for each in outputs]
            assert reasons == ["stop"] * 8 + ["abort"] * 2
            assert manager.take_metrics()["rollout/stragglers"] == 1
            assert not other.done()
            await manager.abort()
            await other
            await manager.close()

    asyncio.run(main())


def test_more_stragglers_than_their_share_are_waited_for() -> None:
    rollout = ScriptedRollout()
    quick = [RolloutRequest(f"0.{index}", [5 + index], SamplingParams()) for index in range(8)]
    late = [RolloutRequest(f"0.{8 + index}", [50 + index], SamplingParams(ignore_eos=True)) for index in range(2)]

    async def main() -> None:
        async with serving(rollout) as address:
            manager = ServerManager([address])
            batch = asyncio.ensure_future(manager.generate_many([*quick, *late], stragglers=Stragglers(0.19, 0.01)))
            async with asyncio.timeout(60):
                while len(rollout.waiting) < 2:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                assert not rollout.aborted
                await manager.abort(["0.8"])
                await batch  # the other is one of ten, and is cut
            assert len(set(rollout.aborted)) == 2
            await manager.close()

    asyncio.run(main())


def test_an_abort_reaches_the_callers_own_requests_only() -> None:
    rollout = ScriptedRollout()
    request = RolloutRequest("0", [5], SamplingParams(ignore_eos=True))  # the same id from both callers

    async def main() -> None:
        async with serving(rollout) as address, asking(address) as mine, asking(address) as stranger:
            tasks = [asyncio.ensure_future(collect(client, [request])) for client in (mine, stranger)]
            async with asyncio.timeout(60):
                while len(rollout.waiting) < 2:
                    await asyncio.sleep(0)
            await mine.abort(["0"])
            await tasks[0]
            assert len(rollout.aborted) == 1
            assert not tasks[1].done()
            await stranger.abort()
            await tasks[1]
            assert len(set(rollout.aborted)) == 2
            await mine.abort()  # nothing of its own is left
            assert len(rollout.aborted) == 2

    asyncio.run(main())


def test_eight_answers_of_131k_tokens() -> None:
    rollout = ScriptedRollout()
    rollout.length = 131_072

    async def main() -> None:
        async with serving(rollout) as address, asking(address) as client:
            request = RolloutRequest("long", [5], SamplingParams(n=8))
            (answer,) = (await collect(client, [request])).values()
            assert [len(sequence.token_ids) for sequence in answer.sequences] == [131_072] * 8

    asyncio.run(main())


def test_an_adapter_update_leaves_the_event_loop_free() -> None:
    """The buckets come only after another request was answered meanwhile."""
    answered = threading.Event()

    class Late(NamedTensors):
        def get_per_tensor_param(self) -> Any:
            raise NotImplementedError

    engine = Late([])
    tensors = {f"layer.{index}.lora_A.weight": torch.ones(4, 8) for index in range(3)}

    class LateTensors(dict[str, Any]):
        def items(self) -> Any:
            for index, entry in enumerate(super().items()):
                if index == 2:
                    assert answered.wait(60)
                yield entry

    engine.adapter = AdapterWeights({"r": 4}, LateTensors(tensors))

    async def main() -> None:
        async with serving(ScriptedRollout()) as address, asking(address) as client:
            sync = weight_syncs.get("shared_memory")(
                engine,  # type: ignore[arg-type]
                [ReplicaReceiver(address)],
                SyncSettings(bucket_bytes=1, timeout_s=60.0),
            )
            update = asyncio.create_task(asyncio.to_thread(asyncio.run, sync.sync(1, only_adapter=True)))
            assert len(await collect(client, make_requests(1))) == 1
            answered.set()
            (report,) = await update
            assert (report.version, report.tensors) == (1, 3)
            sync.close()

    asyncio.run(main())


def test_all_requests_of_a_client_share_a_connection_and_leave_with_their_caller() -> None:
    rollout = ScriptedRollout()
    long = RolloutRequest("long", [5], SamplingParams(ignore_eos=True))

    async def main() -> None:
        async with serving(rollout) as address, asking(address) as client:
            gone, stays = (asyncio.ensure_future(collect(client, [long])) for _ in range(2))
            async with asyncio.timeout(60):
                while len(rollout.waiting) < 2:
                    await asyncio.sleep(0)
            stream = client._stream
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert len(await collect(client, make_requests(3))) == 3
            assert client._stream is stream
            async with asyncio.timeout(60):
                while rollout.cancelled != 1:
                    await asyncio.sleep(0)
            await client.abort()
            await stays

    asyncio.run(main())


def test_the_load_comes_first_and_a_message_that_is_none_ends_the_stream() -> None:
    async def main() -> None:
        async with serving(ScriptedRollout()) as address, asking(address) as client:
            assert await client.first_load() == EngineLoad(5, 1)
            assert client._stream is not None
            await client._stream.send(b"\xc1")
            async with asyncio.timeout(60):
                while not client._stream.end:
                    await asyncio.sleep(0)
            assert "not a valid request" in client._stream.end
            assert len(await collect(client, make_requests(2))) == 2  # over a new connection

    asyncio.run(main())


def test_a_wrong_token_is_refused() -> None:
    async def main() -> None:
        async with serving(ScriptedRollout()) as address, asking(replace(address, token="wrong")) as client:
            with pytest.raises(RolloutError, match="answered 401"):
                await collect(client, make_requests(1))

    asyncio.run(main())
