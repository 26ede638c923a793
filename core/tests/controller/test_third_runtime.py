"""A runtime of another distribution, chosen by ``runtime=threads`` with keys of its own: a rank is a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from controller_workers import Counter, Probe, Refusal

from rollcast import ClassWithInitArgs, ResourcePool, ResourcePoolManager, WorkerGroup, start_groups
from rollcast.config import build_section, compose
from rollcast.contracts.runtime import Runtime, runtimes
from rollcast.errors import ConfigError, ResourceError, WorkerError, WorkerTimeoutError

RUNTIME = '''
    """One thread a rank; imports nothing but the declared surface."""

    from concurrent.futures import ThreadPoolExecutor, TimeoutError, wait

    from rollcast import WorkerHost
    from rollcast.contracts.config import Positive, config
    from rollcast.contracts.pools import NodeResources
    from rollcast.contracts.runtime import CallFailed, Host, Runtime, RuntimeConfig, WorkerRaised
    from rollcast.contracts.worker import WorkerContext
    from rollcast.errors import ResourceError


    @config
    class ThreadsConfig(RuntimeConfig):
        name: str = "threads"
        max_ranks: Positive = 8
        """Largest number of ranks."""


    class ThreadsRuntime(Runtime):
        config_schema = ThreadsConfig

        def __init__(self, max_ranks):
            self.max_ranks = max_ranks
            self.running = []

        @classmethod
        def from_config(cls, config, *, processes, run_dir=None):
            if processes > config.max_ranks:
                raise ResourceError(f"runtime.max_ranks is {config.max_ranks}, the run has {processes} ranks")
            return cls(config.max_ranks)

        def nodes(self):
            return [NodeResources("here", float(self.max_ranks), 0.0)]

        def launch(self, pool, spec, timeout):
            size = pool.world_size
            hosts = []
            for rank in range(size):
                context = WorkerContext(rank, size, rank, size, node="here", group=spec.name)
                worker = WorkerHost()
                host = Host((worker, ThreadPoolExecutor(1)), worker.describe("here"), context)
                hosts.append(host)
            self.running += hosts
            built = [h.handle[1].submit(h.handle[0].build, h.context, spec.roles) for h in hosts]
            self.gather(built, timeout)
            return hosts

        def call(self, host, role, method, call, outcome="send"):
            worker, thread = host.handle
            return thread.submit(worker.call, role, method, call.args, call.kwargs, outcome)

        def put(self, value):
            return value

        def gather(self, refs, timeout):
            done, late = wait(refs, timeout)
            if late:
                numbers = [i for i, ref in enumerate(refs) if ref in late]
                raise CallFailed(numbers[0], None, f"no answer within {timeout:g} s", timed_out=True, late=numbers)
            errors = [(ref.exception(), i) for i, ref in enumerate(refs) if ref.exception() is not None]
            for error, index in sorted(errors, key=lambda entry: entry[0].failure.when):
                raise CallFailed(index, error.failure) from error
            return [ref.result() for ref in refs]

        def fetch(self, refs, timeout):
            return list(refs)

        def ready(self, refs):
            return all(ref.done() for ref in refs)

        def install_plugins(self, hosts, snapshot, timeout):
            pass

        def cancel(self, refs, hosts):
            return ["ended" if ref.cancel() or ref.done() else "interrupted" for ref in refs]

        def stop(self, hosts):
            for host in hosts:
                host.handle[1].submit(host.handle[0].close).result()
                host.handle[1].shutdown()
            self.running = [host for host in self.running if all(host is not other for other in hosts)]

        def shutdown(self):
            self.stop(self.running)
'''
CONF = """
    from rollcast.contracts.config import ConfigSchema
    from threads_runtime.core import ThreadsConfig

    SCHEMAS = (ConfigSchema(path="runtime", schema=ThreadsConfig, group="runtime", option="threads"),)
"""


@pytest.fixture
def installed(make_dist) -> None:
    make_dist(
        "threads-runtime",
        {
            "rollcast.runtimes": {"threads": "threads_runtime.core:ThreadsRuntime"},
            "rollcast.configs": {"threads": "threads_runtime.conf"},
        },
        {
            "threads_runtime/__init__.py": "",
            "threads_runtime/core.py": RUNTIME,
            "threads_runtime/conf/__init__.py": CONF,
            "threads_runtime/conf/runtime/threads.yaml": "# @package runtime\nname: threads\n",
        },
    )


def build(*overrides: str, processes: int = 3) -> Runtime:
    config = compose(["runtime=threads", *overrides]).config
    runtime = runtimes.get(config.runtime.name)
    settings = build_section(runtime.config_schema, config.runtime, "runtime")
    return runtime.from_config(settings, processes=processes)


@pytest.fixture
def runtime(installed) -> Iterator[Runtime]:
    with build("runtime.max_ranks=4") as made:
        yield made


def test_its_keys_are_its_own(installed) -> None:
    assert compose(["runtime=threads"]).config.runtime.max_ranks == 8
    with pytest.raises(ConfigError, match=r"runtime\.adress.*max_ranks"):
        compose(["runtime=threads", "runtime.adress=x"])
    with pytest.raises(ConfigError, match=r"there is no key .runtime\.max_ranks."):
        compose(["runtime=local", "runtime.max_ranks=2"])
    with pytest.raises(ResourceError, match="max_ranks is 2, the run has 3 ranks"):
        build("runtime.max_ranks=2")


def test_a_group_runs_on_every_rank(runtime) -> None:
    group = WorkerGroup(ResourcePool([3]), ClassWithInitArgs(Probe), runtime=runtime)
    assert [context.rank for context in group.contexts] == [0, 1, 2]
    assert group.execute_func(lambda worker: worker.rank) == [0, 1, 2]
    assert len(set(group.execute_func(lambda worker: threading.get_ident()))) == 3
    group.shutdown()
    with pytest.raises(WorkerError, match="is shut down"):
        group.execute_func(lambda worker: None)


def test_roles_share_the_ranks_of_their_pool(runtime) -> None:
    manager = ResourcePoolManager({"one": [2], "two": [1]}, {"a": "one", "b": "one", "c": "two"})
    roles = {role: ClassWithInitArgs(Counter) for role in "abc"}
    groups = start_groups(manager, roles, runtime=runtime)
    assert {role: group.world_size for role, group in groups.items()} == {"a": 2, "b": 2, "c": 1}
    assert groups["a"].execute_func(lambda worker: sorted(worker.colocated)) == [["a", "b"]] * 2
    with pytest.raises(ResourceError, match="ask for 5 CPUs, the cluster has 4"):
        start_groups(ResourcePoolManager({"x": [4], "y": [1]}, {"a": "x", "b": "y", "c": "y"}), roles, runtime=runtime)


def test_failures_name_the_rank(runtime) -> None:
    def fail(worker) -> None:
        if worker.rank == 1:
            raise Refusal("no")

    group = WorkerGroup(ResourcePool([3]), ClassWithInitArgs(Probe), runtime=runtime)
    with pytest.raises(WorkerError, match=r"failed on rank 1 \(node here\): Refusal: no") as caught:
        group.execute_func(fail)
    assert isinstance(caught.value.__cause__, Refusal)
    stop = threading.Event()
    handle = group.execute_all_async("run_function", lambda worker: stop.wait(20), ("worker",))
    for _ in range(2):
        with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.05 s. The call goes on"):
            handle.get(timeout=0.05)
    assert group.poisoned == ""
    stop.set()
    assert handle.get(timeout=20) == [True] * 3


def test_a_call_that_ends_in_the_middle_poisons_the_group(runtime) -> None:
    group = WorkerGroup(ResourcePool([3]), ClassWithInitArgs(Probe), runtime=runtime, name="g")
    stop = threading.Event()
    with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.05 s$"):
        group.with_timeout(0.05).execute_func(lambda worker: stop.wait(20))
    with pytest.raises(
        WorkerError, match=r"is refused: worker\.run_function passed its deadline while ranks 0, 1, 2 were"
    ):
        group.execute_func(lambda worker: None)
    stop.set()
    group.restart()
    assert group.execute_func(lambda worker: worker.rank) == [0, 1, 2]
    stop.clear()
    handle = group.execute_rank_zero_async("run_function", lambda worker: stop.wait(20), ("worker",))
    assert handle.cancel() is True
    assert group.poisoned == ""  # no other rank was in the call
    stop.set()
    group.shutdown()
