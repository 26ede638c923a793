"""The scheduler's load, read from the statistics that vLLM passes to its loggers after each step."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.rollout import EngineLoad

__all__ = ["LoadReader"]


class LoadReader:
    """The latest statistics of an engine's scheduler."""

    def __init__(self) -> None:
        self._running = self._waiting = self._preemptions = 0
        self._usage = 0.0

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Record vLLM's ``SchedulerStats`` and ``IterationStats``; either may be None."""
        if scheduler is not None:
            self._running, self._waiting = int(scheduler.num_running_reqs), int(scheduler.num_waiting_reqs)
            self._usage = float(scheduler.kv_cache_usage)
        if iteration is not None:
            self._preemptions += int(iteration.num_preempted_reqs)

    def report(self, limit: int) -> EngineLoad:
        """Return the load of an engine that computes ``limit`` sequences at once."""
        return EngineLoad(limit, self._running, self._waiting, self._usage, self._preemptions)

    def logger_class(self) -> type[Any]:
        """Return a class of vLLM stat loggers that records to this reader."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        reader = self

        class LoadLogger(StatLoggerBase):  # type: ignore[misc,unused-ignore]
            """A stat logger that passes statistics to a :class:`LoadReader`."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Do nothing; vLLM calls it with these arguments."""

            def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **more: Any) -> None:
                reader.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Do nothing."""

        return LoadLogger
