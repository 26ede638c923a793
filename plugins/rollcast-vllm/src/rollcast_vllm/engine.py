"""vLLM's AsyncLLM on its own event loop, and detection of the death of its processes.

The loop has its own thread, because AsyncLLM is bound to the loop in which it was created, while callers use different
loops. All state of the rollout is touched in that thread only, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rollcast.contracts.rollout import EnginePart
from rollcast.errors import ConfigError, RollcastError, RolloutError
from rollcast_vllm.load import LoadReader

if TYPE_CHECKING:
    from rollcast_data.vision.model_inputs import ImageInputs

__all__ = ["EngineThread", "NodePart", "build_llm", "call_workers", "prepare_llm"]

T = TypeVar("T")

#: Seconds between checks of the engine's processes, and seconds that vLLM then has to fail its own calls.
WATCH_S = 0.2
GRACE_S = 1.0
#: Seconds that an engine has to end by itself.
STOP_S = 2.0


class EngineThread:
    """A thread with an event loop that runs an AsyncLLM and coroutines.

    Args:
        build: returns the AsyncLLM; called in the thread.
        prepare: called with the AsyncLLM before anything else.

    Raises:
        RolloutError: the engine did not start; the cause is chained.
    """

    def __init__(self, build: Callable[[], Any], prepare: Callable[[Any], Awaitable[None]]) -> None:
        self.llm: Any = None
        self._build, self._prepare = build, prepare
        self._processes: list[Any] = []
        self._death: RolloutError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollcast-vllm", daemon=True)
        self._thread.start()
        self._watcher: asyncio.Task[None] | None = None
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException as error:
            self._stop_loop()
            if isinstance(error, RollcastError) or not isinstance(error, Exception):
                raise
            raise RolloutError(f"vLLM's engine did not start: {type(error).__name__}: {error}") from error

    @property
    def death(self) -> RolloutError | None:
        """Error that describes the engine's death; None while it lives."""
        return self._death

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the engine's own processes; tensor-parallel workers are their children."""
        return [process.pid for process in self._processes]

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs in the engine's thread; called from any loop.

        A caller that is cancelled cancels the coroutine.

        Raises:
            RolloutError: the engine is dead, or died meanwhile.
        """
        if self._death is not None:
            coroutine.close()
            raise self._copy_death()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._guard(coroutine), self._loop))

    def close(self) -> None:
        """End the engine; callers that still wait for it get a RolloutError."""
        if self._loop.is_closed():
            return
        self._death = self._death or RolloutError("the rollout is closed")
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._stop_loop()
        for process in self._processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()

    async def _start(self) -> None:
        self.llm = self._build()
        self._processes = list(self.llm.engine_core.resources.engine_manager.processes)
        await self._prepare(self.llm)
        self._watcher = self._loop.create_task(self._watch())

    async def _guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await coroutine
        except RollcastError:
            raise
        except asyncio.CancelledError:
            # Cancelled by the watcher or by close(), not by the caller.
            if self._death is not None:
                raise self._copy_death() from None
            raise
        except Exception as error:
            if self.llm.errored:
                self._mark_dead()
            if self._death is not None:
                raise self._copy_death() from error
            raise RolloutError(f"vLLM failed: {type(error).__name__}: {error}") from error

    async def _watch(self) -> None:
        """Wait for the engine's death, then cancel everything that waits for the engine."""
        while not self.llm.errored and all(process.is_alive() for process in self._processes):
            await asyncio.sleep(WATCH_S)
        self._mark_dead()
        await asyncio.sleep(GRACE_S)
        self._cancel_tasks()

    def _mark_dead(self) -> None:
        if self._death is None:
            ends = [
                f"process {process.pid} ended with code {process.exitcode}"
                for process in self._processes
                if process.exitcode
            ]
            self._death = RolloutError(f"vLLM's engine died: {', '.join(ends) or 'see its output for the cause'}")

    def _copy_death(self) -> RolloutError:
        # A new error each time, because a shared one would accumulate tracebacks.
        return RolloutError(str(self._death))

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _shut_down(self) -> None:
        """End the engine and everything on the loop, including vLLM's own tasks."""
        if self._watcher is not None:
            self._watcher.cancel()
        waiting = list(self._tasks)
        self._cancel_tasks()
        await asyncio.gather(*waiting, return_exceptions=True)
        self.llm.shutdown(timeout=STOP_S)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def build_llm(arguments: Any, load: LoadReader) -> Any:
    """Return an AsyncLLM for vLLM's engine arguments.

    Args:
        arguments: engine arguments.
        load: reader of the scheduler's statistics.

    Raises:
        ConfigError: vLLM rejects a value, such as a ``max_model_len`` above the model's.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    config = _engine_config(arguments)
    llm = AsyncLLM.from_vllm_config(config, stat_loggers=[load.logger_class()], disable_log_stats=True)
    # vLLM adds a Prometheus logger to any other, which costs time in each step and is not read here.
    manager = llm.logger_manager
    manager.stat_loggers = [
        stat_logger for stat_logger in manager.stat_loggers if "Prometheus" not in type(stat_logger).__name__
    ]
    return llm


def _engine_config(arguments: Any, **options: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext

    try:
        return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT, **options)
    except ValueError as error:
        raise ConfigError(f"vLLM rejects values of the rollout section: {error}") from error


class NodePart(EnginePart):
    """vLLM's processes on a node other than the first.

    They are workers of the first node's scheduler, or data-parallel ranks with schedulers of their own, to which the
    first node sends requests.

    Args:
        arguments: engine arguments with this node's rank.

    Raises:
        ConfigError: vLLM rejects a value.
    """

    def __init__(self, arguments: Any) -> None:
        config = _engine_config(arguments, headless=True)
        self._manager: Any
        if config.parallel_config.node_rank_within_dp:
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            self._manager = MultiprocExecutor(config, monitor_workers=False)
            self._processes = [worker.proc for worker in self._manager.workers]
        else:
            self._manager = _start_ranks(config)
            self._processes = list(self._manager.processes)

    def check_health(self) -> None:
        ended = [process for process in self._processes if not process.is_alive()]
        if ended:
            raise RolloutError(f"vLLM's process {ended[0].pid} ended with code {ended[0].exitcode}")

    def close(self) -> None:
        self._manager.shutdown()


def _start_ranks(config: Any) -> Any:
    """Start this node's data-parallel ranks, as ``vllm serve --headless`` does."""
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=f"tcp://{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}",
        executor_class=Executor.get_class(config),
        log_stats=True,
    )


async def call_workers(llm: Any, method: str, *args: Any) -> list[Any]:
    """Return the answers of all workers, by data-parallel rank and rank; ``collective_rpc`` drops all but the first's.

    Args:
        llm: the AsyncLLM.
        method: method of the workers, with positional arguments.
    """
    if llm.vllm_config.parallel_config.data_parallel_size == 1:
        return list(await llm.collective_rpc(method, args=args))
    client, call = llm.engine_core, ("collective_rpc", method, None, args, None)
    answers = await asyncio.gather(
        *(client._call_utility_async(*call, engine=engine) for engine in client.core_engines)
    )
    return [answer for engine in answers for answer in engine]


async def prepare_llm(llm: Any, images: ImageInputs | None = None) -> None:
    """Make a new engine's processes watch those that started them, and set its weight version to 0.

    Args:
        llm: the AsyncLLM.
        images: image inputs of a vision-language model; the engine then reads sampled placeholders as the trainer does.
    """
    await llm.collective_rpc("rollcast_watch_owner")
    if llm.vllm_config.parallel_config.pipeline_parallel_size > 1:
        await llm.collective_rpc("rollcast_allocate_inputs")
    if images is not None:
        await llm.collective_rpc("rollcast_neutralize", args=(list(images.placeholder_ids), images.neutral_id))
    await llm.update_weight_version("0")
