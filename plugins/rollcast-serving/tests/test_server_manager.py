"""Routing over real replicas, and over scripted ones where the order of events matters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving_tools import greedy, load_model, make_requests

from rollcast.contracts.rollout import EngineLoad, RolloutOutput, RolloutRequest, RolloutSequence
from rollcast.errors import RequestError, RolloutError
from rollcast_serving.client import ReplicaGoneError
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.manager import RoutingSettings, ServerManager


class ScriptedClient:
    """A replica that answers at once, or as told: ``die_after`` outputs, ``hold`` until released."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self.seen: list[str] = []
        self.sizes: list[int] = []
        self.die_after: int | None = None
        self.hold: asyncio.Event | None = None
        self.limit = 4
        self.at_once = self.most_at_once = 0
        self.on_load: Any = None

    async def first_load(self) -> EngineLoad:
        return EngineLoad(self.limit)

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[tuple[int, Any]]:
        self.sizes.append(len(requests))
        self.at_once += len(requests)
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.hold is not None:
            await self.hold.wait()
        for place, request in enumerate(requests):
            if self.die_after == 0:
                raise ReplicaGoneError(f"replica {self.address.index} went away")
            if self.die_after is not None:
                self.die_after -= 1
            await asyncio.sleep(0)
            self.seen.append(request.request_id)
            self.at_once -= 1
            if not request.prompt_ids:
                yield place, RequestError(f"{request.request_id} is empty")
            else:
                yield (
                    place,
                    RolloutOutput(request.request_id, [RolloutSequence([1], [0.0], "stop", [0])], request.sampling),
                )

    async def call(self, path: str, body: Any = None) -> Any:
        if self.die_after == 0:
            raise ReplicaGoneError("gone")
        return {}

    async def close(self) -> None:
        pass


def scripted(count: int, revive: Any = None, **settings: Any) -> tuple[ServerManager, list[ScriptedClient]]:
    addresses = [ReplicaAddress(index, "n", "h", 1, 2, "t") for index in range(count)]
    manager = ServerManager(addresses, RoutingSettings(**settings), revive)
    clients = [ScriptedClient(address) for address in addresses]
    for replica, client in zip(manager._replicas, clients, strict=True):
        replica.client = client  # type: ignore[assignment]
    return manager, clients


async def until(condition: Callable[[], bool]) -> None:
    """Let the other tasks go on until it holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def test_fewest_in_flight_and_sticky_sessions() -> None:
    async def main() -> None:
        manager, clients = scripted(3, max_sessions=2)
        for client in clients:
            client.hold = asyncio.Event()
        (request,) = make_requests(1)
        tasks = [asyncio.ensure_future(manager.generate(request)) for _ in range(6)]
        await until(lambda: manager.in_flight == [2, 2, 2])
        for client in clients:
            client.hold.set()  # type: ignore[union-attr]
        await asyncio.gather(*tasks)
        assert manager.in_flight == [0, 0, 0]
        clients[0].hold = asyncio.Event()
        busy = asyncio.ensure_future(manager.generate(request, "a"))  # the first of equals
        await until(lambda: manager.in_flight == [1, 0, 0])
        await manager.generate(request, "b")
        again = asyncio.ensure_future(manager.generate(request, "a"))
        await until(lambda: manager.in_flight == [2, 0, 0])  # though others are idle
        clients[0].hold.set()
        await asyncio.gather(busy, again)
        for name in "cd":
            await manager.generate(request, name)
        assert list(manager._sessions) == ["c", "d"]

    asyncio.run(main())


def test_a_batch_is_spread_longest_first_and_comes_back_in_order() -> None:
    async def main() -> None:
        manager, clients = scripted(2)
        requests = make_requests(30)
        told: list[tuple[int, int]] = []
        outputs = await manager.generate_many(requests, lambda done, of: told.append((done, of)))
        assert [output.request_id for output in outputs] == [request.request_id for request in requests]
        assert told == [(done, 30) for done in range(1, 31)]
        assert Counter(clients[0].seen + clients[1].seen) == Counter(request.request_id for request in requests)
        assert all(client.seen for client in clients)
        assert max(client.most_at_once for client in clients) == 4  # no more than the engine computes at once
        longest = max(len(request.prompt_ids) for request in requests)
        first = {client.seen[0] for client in clients}
        assert longest in {len(request.prompt_ids) for request in requests if request.request_id in first}
        assert await manager.generate_many([]) == []

    asyncio.run(main())


def test_a_slow_replica_takes_less() -> None:
    async def main() -> None:
        manager, clients = scripted(2)
        clients[0].limit = 2
        clients[0].hold = asyncio.Event()
        batch = asyncio.ensure_future(manager.generate_many(make_requests(20)))
        await until(lambda: len(clients[1].seen) == 18)
        clients[0].hold.set()
        assert len(await batch) == 20

    asyncio.run(main())


def test_what_a_dead_replica_had_is_answered_by_another() -> None:
    async def main() -> None:
        manager, clients = scripted(2)
        clients[0].die_after = 3
        outputs = await manager.generate_many(make_requests(40))
        assert len(outputs) == 40
        assert len(clients[0].seen) == 3
        assert len(clients[1].seen) == 37
        assert [address.index for address in manager.addresses] == [1]
        assert manager.in_flight == [0, 0]
        assert (await manager.generate(make_requests(1)[0], "s")).sequences
        clients[1].die_after = 0
        with pytest.raises(RolloutError, match="all 2 replicas are lost"):
            await manager.generate_many(make_requests(3))
        with pytest.raises(RolloutError, match="all 2 replicas are lost"):
            await manager.generate(make_requests(1)[0])

    asyncio.run(main())


def test_a_request_that_kills_is_given_up() -> None:
    async def main() -> None:
        async def revive(index: int) -> ReplicaAddress:
            return ReplicaAddress(index, "n", "h", 1, 2, "t", 1)

        manager, clients = scripted(1, revive, max_attempts=2, max_restarts=5)
        clients[0].die_after = 0
        manager._client = lambda address: clients[0]  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(RolloutError, match="'r0' failed: 2 replicas died"):
            await manager.generate(make_requests(1)[0])
        (given_up,) = await manager.generate_many(make_requests(1))
        assert "failed: 2 replicas died" in str(given_up)
        with pytest.raises(RolloutError, match="max_restarts=5"):
            for _ in range(3):
                try:
                    await manager.generate(make_requests(1)[0])
                except RolloutError as error:
                    if "all 1" in str(error):
                        raise

    asyncio.run(main())


def test_a_bad_request_is_told_and_harms_none() -> None:
    async def main() -> None:
        manager, clients = scripted(2)
        good = make_requests(6)
        bad = RolloutRequest("empty", [], good[0].sampling)
        *outputs, error = await manager.generate_many([*good, bad])
        assert [output.request_id for output in outputs] == [request.request_id for request in good]
        assert isinstance(error, RequestError)
        assert "empty is empty" in str(error)
        with pytest.raises(RequestError, match="empty is empty"):
            await manager.generate(bad)
        assert len(clients[0].seen + clients[1].seen) == 8

    asyncio.run(main())


def test_a_failed_restart_is_tried_again_as_long_as_max_restarts_allows() -> None:
    tries: list[int] = []
    ended: list[int] = []

    async def revive(index: int) -> ReplicaAddress:
        tries.append(index)
        if len(tries) in (1, 3, 4):
            raise RolloutError("no room yet")
        return ReplicaAddress(index, "n", "h", 1, 2, "t", 1)

    async def end(index: int) -> None:
        ended.append(index)

    async def main() -> None:
        manager, clients = scripted(2, revive, max_restarts=4)
        manager._end = end
        manager._client = lambda address: clients[0]  # type: ignore[method-assign,assignment,return-value]
        clients[0].die_after = 0
        await manager.lose({0: ReplicaGoneError("gone")})
        await manager.settle()
        assert (len(tries), len(manager.addresses), ended) == (2, 2, [])
        await manager.lose({0: ReplicaGoneError("gone")})  # two restarts are left, and both fail
        await manager.settle()
        assert (len(tries), len(manager.addresses)) == (4, 1)
        assert ended == [0]  # so that its devices are free, whatever its process does

    asyncio.run(main())


def test_a_replica_that_dies_of_a_call_is_asked_again_after_its_restart() -> None:
    async def main() -> None:
        async def revive(index: int) -> ReplicaAddress:
            clients[index].die_after = None
            return ReplicaAddress(index, "n", "h", 1, 2, "t", 1)

        manager, clients = scripted(2, revive)
        manager._client = lambda address: clients[address.index]  # type: ignore[method-assign,assignment,return-value]
        clients[1].die_after = 0
        assert len(await manager.generate_on_each(make_requests(1)[0])) == 2
        assert [address.generation for address in manager.addresses] == [0, 1]

    asyncio.run(main())


def test_health(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        manager, clients = scripted(2)
        await manager.check_health()
        clients[0].die_after = 0
        await manager.check_health()
        assert [address.index for address in manager.addresses] == [1]
        clients[1].die_after = 0
        with pytest.raises(RolloutError, match="all 2 replicas are lost"):
            await manager.check_health()

    asyncio.run(main())
    assert "it is lost" in caplog.text


def test_kill_9_of_one_of_two_under_64_requests(start_replica: Callable[..., Any], model_folder: Path) -> None:
    processes = {index: start_replica(index) for index in range(2)}

    async def revive(index: int) -> ReplicaAddress:
        processes[index] = await asyncio.to_thread(start_replica, index)
        return processes[index][1]

    async def main() -> list[Any]:
        addresses = [address for _, address in processes.values()]
        manager = ServerManager(addresses, RoutingSettings(), revive)
        killed = processes[1][0].popen

        def progress(done: int, of: int) -> None:
            if done == 10:
                os.kill(killed.pid, signal.SIGKILL)

        try:
            outputs = await manager.generate_many(make_requests(64, max_tokens=24), progress)
            await manager.check_health()
            assert len(manager.addresses) == 2
            assert processes[1][0].popen is not killed
            assert len(await manager.generate_many(make_requests(8))) == 8
            return outputs
        finally:
            await manager.close()

    outputs = asyncio.run(main())
    model = load_model(model_folder)
    for request, output in zip(make_requests(64, max_tokens=24), outputs, strict=True):
        assert list(output.sequences[0].token_ids) == greedy(model, request.prompt_ids, 24)


def test_a_group_goes_to_one_replica_in_one_message() -> None:
    async def main() -> None:
        manager, clients = scripted(2)
        for client in clients:
            client.limit = 3
        prompts = [[number + 1] * 4 for number in range(6)]
        sampling = make_requests(1)[0].sampling
        requests = [
            RolloutRequest(f"{number}/{sample}", list(prompt), sampling, seed=sample)
            for number, prompt in enumerate(prompts)
            for sample in range(8)
        ]
        outputs = await manager.generate_many(requests)
        assert [output.request_id for output in outputs] == [request.request_id for request in requests]
        for client in clients:
            assert set(Counter(name.split("/")[0] for name in client.seen).values()) == {8}
        assert sorted(clients[0].sizes + clients[1].sizes) == [8] * 6
        assert manager.in_flight == [0, 0]

    asyncio.run(main())


def test_loads_resize_windows_and_become_metrics() -> None:
    async def main() -> None:
        manager, clients = scripted(1)
        clients[0].limit = 32
        assert manager.take_metrics() == {}
        clients[0].hold = asyncio.Event()
        batch = asyncio.ensure_future(manager.generate_many(make_requests(80)))
        await until(lambda: manager.in_flight == [32])
        clients[0].on_load(EngineLoad(32, running=20, waiting=12, kv_cache_usage=0.99, preemptions=3))
        clients[0].on_load(None)
        clients[0].hold.set()
        assert len(await batch) == 80
        assert manager.take_metrics() == {
            "rollout/running_max": 20.0,
            "rollout/waiting_max": 12.0,
            "rollout/kv_cache_usage_max": 0.99,
            "rollout/preemptions": 3.0,
            "rollout/window": 17.0,
        }

    asyncio.run(main())


def test_a_caller_that_goes_takes_its_requests_out_of_the_queue() -> None:
    async def main() -> None:
        manager, clients = scripted(1)
        clients[0].hold = asyncio.Event()
        gone = asyncio.ensure_future(manager.generate_many(make_requests(20)))
        stays = asyncio.ensure_future(manager.generate_many(make_requests(5)))
        await until(lambda: manager.in_flight == [4])
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        clients[0].hold.set()
        assert len(await stays) == 5
        assert len(clients[0].seen) == 5
        assert manager.in_flight == [0]

    asyncio.run(main())
