"""Metrics of the engines' load between two readings."""

from __future__ import annotations

from collections.abc import Sequence

from rollcast.contracts.rollout import EngineLoad

__all__ = ["LoadFigures"]


class LoadFigures:
    """Maxima of the loads that replicas reported, and the number of preemptions, between two readings."""

    def __init__(self) -> None:
        self._last: dict[int, EngineLoad] = {}
        self._peaks = {"running": 0, "waiting": 0}
        self._usage = 0.0
        self._preemptions = 0
        self._heard = False

    def add(self, place: int, load: EngineLoad) -> None:
        """Add the load of a replica.

        Args:
            place: number of the replica.
            load: its load; a lower count of preemptions than before comes from a new engine.
        """
        before, self._last[place] = self._last.get(place), load
        new = load.preemptions - (before.preemptions if before is not None else load.preemptions)
        self._preemptions += new if new >= 0 else load.preemptions
        self._usage = max(self._usage, load.kv_cache_usage)
        for name in self._peaks:
            self._peaks[name] = max(self._peaks[name], sum(getattr(figures, name) for figures in self._last.values()))
        self._heard = True

    def take(self, caps: Sequence[int]) -> dict[str, float]:
        """Return metrics since the last call: the size of the windows, and the load if any was reported.

        Args:
            caps: sizes of the replicas' windows; empty before the first request, when there are no metrics.
        """
        window = {"rollout/window": float(sum(caps))} if caps else {}
        if not self._heard:
            return window
        metrics = {
            **window,
            "rollout/running_max": float(self._peaks["running"]),
            "rollout/waiting_max": float(self._peaks["waiting"]),
            "rollout/kv_cache_usage_max": self._usage,
            "rollout/preemptions": float(self._preemptions),
        }
        self._peaks, self._usage = dict.fromkeys(self._peaks, 0), 0.0
        self._preemptions, self._heard = 0, False
        return metrics
