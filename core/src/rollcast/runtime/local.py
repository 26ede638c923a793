"""Runtime ``local``: a group of one rank in this process, so that a breakpoint in a worker's method works."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar, Self

from rollcast.contracts.config import Positive, config
from rollcast.contracts.device import device_count
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.pools import NodeResources, ResourcePool
from rollcast.contracts.runtime import (
    CallFailed,
    Cancelled,
    Host,
    LaunchSpec,
    Outcome,
    Runtime,
    RuntimeCapabilities,
    RuntimeConfig,
    WorkerRaised,
    runtimes,
)
from rollcast.contracts.worker import WorkerContext
from rollcast.controller.hosting import WorkerHost
from rollcast.errors import ResourceError

__all__ = ["LocalRuntime", "LocalRuntimeConfig"]

logger = logging.getLogger(__name__)

#: Largest number of coroutine methods that run at the same time.
_CALLS_BESIDE = 64


@config
class LocalRuntimeConfig(RuntimeConfig):
    """Workers in the driver's own process."""

    name: str = "local"
    """Registry name of the runtime."""
    num_cpus: Positive | None = None
    """CPU threads for torch; null to keep torch's setting."""


class LocalRuntime(Runtime):
    """A runtime that runs calls synchronously in the caller's thread; a deadline cannot interrupt them.

    Coroutine methods of workers with ``concurrent_async`` run concurrently with the caller in an event loop, as on
    other runtimes.

    Args:
        num_cpus: CPU threads for torch in this process; None to keep torch's setting.
    """

    config_schema: ClassVar[type[RuntimeConfig]] = LocalRuntimeConfig
    capabilities = RuntimeCapabilities(chained_calls=True)

    def __init__(self, num_cpus: int | None = None) -> None:
        self._num_cpus = num_cpus
        self._hosts: list[Host] = []
        self._saved_env: dict[str, str | None] = {}
        self._threads: ThreadPoolExecutor | None = None

    @classmethod
    def from_config(cls, config: LocalRuntimeConfig, *, processes: int, run_dir: Path | None = None) -> Self:  # noqa: ARG003
        return cls(config.num_cpus)

    def nodes(self) -> list[NodeResources]:
        return [NodeResources("localhost", float(os.cpu_count() or 1), float(device_count()))]

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        if pool.world_size != 1:
            raise ResourceError(
                f"runtime 'local' runs one process, pool {pool.name!r} asks for {pool.world_size}; "
                f"{_name_others()}, or set placement.n_gpus_per_node=1 and placement.nnodes=1"
            )
        if spec.detached:
            raise ResourceError(f"group {spec.name!r} cannot be detached: runtime 'local' ends with this process")
        runtime_env = dict(spec.runtime_env)
        variables = runtime_env.pop("env_vars", {})
        if runtime_env:
            raise ResourceError(
                f"group {spec.name!r} asks for a runtime_env with {', '.join(runtime_env)}, but runtime 'local' runs "
                f"in this process as it is; {_name_others()}"
            )
        threads = spec.threads or self._num_cpus
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        worker_host = WorkerHost()
        info = worker_host.describe("localhost")
        context = WorkerContext(
            master_port=info.free_port, node="localhost", group=spec.name, threads=threads or os.cpu_count() or 1
        )
        self._set_env({**context.environment(), **variables, **spec.env})
        try:
            worker_host.build(context, spec.roles)
        except WorkerRaised as raised:
            self._close(worker_host)
            raise CallFailed(0, raised.failure) from raised
        host = Host(worker_host, info, context)
        self._hosts.append(host)
        return [host]

    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: Outcome = "send") -> Any:
        def run() -> Any:
            try:
                return host.handle.call(role, method, call.args, call.kwargs, outcome)
            except WorkerRaised as raised:
                # The traceback would keep the caller's frames alive, and with them the future of this call.
                raised.__context__ = None
                return raised.with_traceback(None)

        if not host.handle.runs_beside(role, method):
            return run()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_CALLS_BESIDE, thread_name_prefix="rollcast-call")
        return self._threads.submit(run)

    def put(self, value: Any) -> Any:
        return value

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        calls = [ref for ref in refs if isinstance(ref, Future)]
        if late := wait(calls, timeout).not_done:
            indices = [index for index, ref in enumerate(refs) if ref in late]
            detail = f"no answer within {timeout:g} s from {len(late)} of {len(refs)} ranks (indices {indices})"
            raise CallFailed(indices[0], None, detail, timed_out=True, late=indices)
        values = self.fetch(refs, None)
        for index, value in enumerate(values):
            if isinstance(value, WorkerRaised):
                raise CallFailed(index, value.failure)
        return values

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        return [ref.result(timeout) if isinstance(ref, Future) else ref for ref in refs]

    def ready(self, refs: Sequence[Any]) -> bool:
        return all(ref.done() for ref in refs if isinstance(ref, Future))

    def wait_any(self, refs: Sequence[Any], timeout: float | None) -> list[int]:
        calls = [ref for ref in refs if isinstance(ref, Future)]
        if len(calls) == len(refs):
            wait(calls, timeout, FIRST_COMPLETED)
        return [index for index, ref in enumerate(refs) if not isinstance(ref, Future) or ref.done()]

    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        """Do nothing, because the workers share this process's registries."""

    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> list[Cancelled]:
        """Do nothing, because every call has already ended."""
        return ["ended"] * len(refs)

    def stop(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            if any(other is host for other in self._hosts):
                self._hosts = [other for other in self._hosts if other is not host]
                self._close(host.handle)

    def _close(self, worker_host: WorkerHost) -> None:
        try:
            worker_host.close()
        except WorkerRaised as raised:
            logger.warning("close() of a worker raised: %s", raised)
        if not self._hosts:
            self._restore_env()

    def shutdown(self) -> None:
        self.stop(list(self._hosts))
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _set_env(self, variables: dict[str, str]) -> None:
        for key, value in variables.items():
            self._saved_env.setdefault(key, os.environ.get(key))
            os.environ[key] = value

    def _restore_env(self) -> None:
        for key, value in self._saved_env.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._saved_env.clear()


def _name_others() -> str:
    others = [name for name in runtimes.names() if name != LocalRuntimeConfig.name]
    return f"use another runtime; installed: {', '.join(others) or 'none'}"
