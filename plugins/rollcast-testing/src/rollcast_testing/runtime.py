"""The conformance suite of runtimes, a class of pytest tests to inherit.

Example, in a plugin's tests::

    from rollcast_testing import RuntimeSuite

    class TestThreads(RuntimeSuite):
        name = "threads"
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from rollcast import (
    ClassWithInitArgs,
    Dispatch,
    DispatchMode,
    ResourcePool,
    Worker,
    WorkerGroup,
    build_section,
    register,
)
from rollcast.contracts.dispatch import Calls
from rollcast.contracts.runtime import Runtime, runtimes
from rollcast.errors import WorkerError, WorkerTimeoutError
from rollcast.protocol import DataProto
from rollcast_testing.checks import require

__all__ = ["RuntimeSuite", "SuiteWorker"]


class PlantedError(ValueError):
    """An error that the suite's worker raises."""


class _Parts(DispatchMode):
    """A dispatch mode that cuts a batch into one part per rank, and joins the parts."""

    name = "suite_parts"

    def dispatch(self, worker_group: Any, data: DataProto) -> Calls:
        return Calls.each(data.chunk(worker_group.world_size))

    def collect(self, worker_group: Any, outputs: Any) -> DataProto:
        joined: DataProto = DataProto.concat(list(outputs))
        return joined


class SuiteWorker(Worker):
    """A worker that reports where it runs, keeps a number, and fails on request.

    Args:
        label: text that it reports.
        fail_on: rank whose constructor fails; -1 for none.
    """

    def __init__(self, label: str = "", fail_on: int = -1) -> None:
        self.label, self.count = label, 0
        if self.rank == fail_on:
            raise PlantedError(f"planted in the constructor of rank {fail_on}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, str, int, str | None]:
        """Return rank, world size, label, process id and a variable of the environment."""
        return self.rank, self.world_size, self.label, os.getpid(), os.environ.get("ROLLCAST_SUITE")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def increase(self, by: int = 1) -> int:
        """Add to the number and return it."""
        self.count += by
        return self.count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> int:
        """Raise an error on one rank."""
        if self.rank == rank:
            raise PlantedError(f"planted on rank {rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> int:
        """Sleep, then return the rank."""
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=_Parts())
    def double(self, data: DataProto) -> DataProto:
        """Return the batch with the column ``x`` doubled, and the rank of each row."""
        ranks = torch.full((len(data),), self.rank)
        return data.with_columns({"x": data["x"] * 2, "rank": ranks})


class RuntimeSuite:
    """Conformance tests of one runtime, with groups of one and three ranks on this machine; set :attr:`name`."""

    #: Name of the runtime in ``rollcast.runtimes``.
    name: ClassVar[str] = ""
    #: Keys of the section ``runtime`` for the tests.
    options: ClassVar[Mapping[str, Any]] = {}
    #: True if each rank has a process of its own; False if ranks share the caller's.
    own_processes: ClassVar[bool] = True
    #: Number of ranks of the group.
    world_size: ClassVar[int] = 3

    @classmethod
    def build(cls) -> Runtime:
        """Build the runtime from its section, as a run does."""
        runtime_class = runtimes.get(cls.name, requested_by=f"{cls.__name__}.name")
        section = build_section(runtime_class.config_schema, {"name": cls.name, **cls.options}, "runtime")
        return runtime_class.from_config(section, processes=cls.world_size)

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls) -> Iterator[Runtime]:
        """Return the runtime under test, which is shut down after the class's tests."""
        with cls.build() as built:
            yield built

    @pytest.fixture(scope="class")
    @classmethod
    def shared_group(cls, runtime: Runtime) -> Iterator[WorkerGroup]:
        """Return a group for the tests that leave it as it was."""
        with cls.start_group(runtime) as started:
            yield started

    @classmethod
    @contextlib.contextmanager
    def start_group(cls, runtime: Runtime, *args: Any, ranks: int | None = None, **more: Any) -> Iterator[WorkerGroup]:
        """Start a group of :class:`SuiteWorker`; its processes end with the context."""
        pool = ResourcePool([ranks or cls.world_size])
        suite_group = WorkerGroup(pool, ClassWithInitArgs(SuiteWorker, *args), runtime=runtime, name="suite", **more)
        try:
            yield suite_group
        finally:
            suite_group.shutdown()

    def test_shutdown_leaves_nothing(self) -> None:
        before = {thread.name for thread in threading.enumerate() if not thread.daemon}
        runtime = self.build()
        with self.start_group(runtime) as group:
            processes = {place[3] for place in group.place()} - {os.getpid()}
        runtime.shutdown()
        runtime.shutdown()
        left = {thread.name for thread in threading.enumerate() if not thread.daemon} - before
        require(not left, f"no thread is left that keeps the process from ending: {left}")
        deadline = time.monotonic() + 30
        while (alive := {process for process in processes if _is_running(process)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        require(not alive, f"the workers' processes have ended; these run on: {alive}")

    def test_the_cluster_has_nodes(self, runtime: Runtime) -> None:
        nodes = runtime.nodes()
        require(bool(nodes), "a runtime has at least one node")

    def test_each_rank_has_its_place(self, runtime: Runtime) -> None:
        for ranks in sorted({1, self.world_size}):
            with self.start_group(runtime, "mine", ranks=ranks) as group:
                places: Any = group.place()
                require([place[0] for place in places] == list(range(ranks)), f"results are in rank order: {places}")
                require({place[1] for place in places} == {ranks}, f"every rank knows the world size {ranks}: {places}")
                require({place[2] for place in places} == {"mine"}, "every worker has the constructor's arguments")
                processes = {place[3] for place in places}
                if self.own_processes:
                    require(len(processes) == ranks, f"with own_processes, each rank has a process: {places}")
                    require(os.getpid() not in processes, "with own_processes, no rank is in the caller's process")

    def test_the_environment_arrives(self, runtime: Runtime) -> None:
        if not self.own_processes:
            pytest.skip("own_processes is False")
        with self.start_group(runtime, env={"ROLLCAST_SUITE": "here"}) as group:
            nodes = {place[4] for place in group.place()}
            require(nodes == {"here"}, f"processes have the variables of env: {nodes}")

    def test_workers_keep_their_state(self, runtime: Runtime) -> None:
        with self.start_group(runtime) as first, self.start_group(runtime, ranks=1) as second:
            for expected in (2, 4):
                result: Any = first.increase(2)
                require(result == [expected] * self.world_size, f"a worker keeps its state: {result}")
            require(second.increase() == [1], "groups do not share workers")

    def test_calls_are_executed_in_order(self, shared_group: WorkerGroup) -> None:
        start = shared_group.increase(0)[0]
        handles = [shared_group.execute_all_async("increase", by) for by in (1, 10, 100)]
        results = [handle.get() for handle in handles]
        expected = [[start + total] * self.world_size for total in (1, 11, 111)]
        require(results == expected, f"calls run in the order in which they were sent: {results}")

    def test_a_batch_comes_back_in_order(self, shared_group: WorkerGroup) -> None:
        most = 3 * self.world_size
        batch = DataProto.from_dict(
            {"x": torch.arange(float(most))}, {"text": [f"row {n}" for n in range(most)]}, {"step": 3}
        )
        for rows in (0, self.world_size, most):
            inputs = batch.select_idxs(list(range(rows)))
            result: Any = shared_group.double(inputs)
            result = result.get() if hasattr(result, "get") else result
            require(torch.equal(result["x"], inputs["x"] * 2), f"rows come back in order, computed: {result['x']}")
            require(list(result["text"]) == list(inputs["text"]), "objects travel with their rows")
        require(batch["x"].tolist() == list(range(most)), "the caller's batch is not changed")

    def test_an_error_names_its_rank(self, shared_group: WorkerGroup) -> None:
        before: Any = shared_group.increase(0)
        last = self.world_size - 1
        with pytest.raises(WorkerError, match=rf"fail failed on rank {last} .*PlantedError") as caught:
            shared_group.fail(last)
        require(f"planted on rank {last}" in str(caught.value), "the message has the worker's words")
        cause = caught.value.__cause__
        require(isinstance(cause, PlantedError), f"the cause is the worker's exception, not {cause!r}")
        require(shared_group.increase(0) == before, "a group works on after an error")

    def test_a_constructor_that_fails_ends_the_start(self, runtime: Runtime) -> None:
        last = self.world_size - 1
        law = f"planted in the constructor of rank {last}"
        with pytest.raises(WorkerError, match=law), self.start_group(runtime, "", last):
            pass
        with self.start_group(runtime) as group:
            require(len(group.place()) == self.world_size, "the runtime works on after it")

    def test_a_deadline_ends_the_wait_and_not_the_call(self, shared_group: WorkerGroup) -> None:
        if not self.own_processes:
            pytest.skip("own_processes is False: a call may run while it is sent")
        handle = shared_group.execute_all_async("sleep", 1.0)
        with pytest.raises(WorkerTimeoutError):
            handle.get(timeout=0.05)
        result = handle.get(timeout=60.0)
        require(result == list(range(self.world_size)), f"the call ends by itself, and its result is there: {result}")


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
