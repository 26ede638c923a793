"""Step metrics for the cost of its passes: model FLOPs utilization, throughput and memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollcast import WorkerGroup
from rollcast.errors import ConfigError
from rollcast_automap.profiling.devices import DeviceInfo, describe_device
from rollcast_automap.profiling.flops import ModelFlops, Pass, read_model_flops
from rollcast_automap.profiling.memory_watch import Peak, start_watch, take_peaks
from rollcast_trainer.api import Meter, Role, is_served

__all__ = ["PHASES", "StepMeter"]

logger = logging.getLogger(__name__)
#: Methods of the workers → the phase of a step that calls them, as in ``time/<phase>_s``.
PHASES = {
    "generate_sequences": "generate",
    "compute_rm_score": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref_log_prob",
    "compute_values": "values",
    "run_function": "",
    "query_mesh": "",
}
#: Method of the workers → its name in ``perf/mfu/<name>``; verl's name if verl has one.
_NAMES = {
    "update_actor": "actor",
    "update_critic": "critic",
    "compute_log_prob": "actor_infer",
    "compute_ref_log_prob": "ref",
    "compute_values": "critic_infer",
    "compute_rm_score": "reward_model",
}
_GB = 1e9


class StepMeter(Meter):
    """A meter of worker calls that counts their operations, and collects the workers' peak memory once per step.

    Args:
        groups: started workers by role.
        models: role → folder of its model; roles without an entry use the first folder.
        trust_remote_code: allow the folders' own Python code.
    """

    def __init__(
        self, groups: Mapping[str, WorkerGroup], models: Mapping[str, str], trust_remote_code: bool = False
    ) -> None:
        # Roles of one pool share its processes, so keep one group per pool.
        self._processes = {group.name: group for role, group in groups.items() if not is_served(role)}
        self._ranks = {role: group.world_size for role, group in groups.items()}
        self._all_ranks = sum({group.name: group.world_size for group in groups.values()}.values())
        self._models = dict(models)
        self._trusts = trust_remote_code
        self._counters: dict[tuple[str, bool], ModelFlops | None] = {}
        self._device: DeviceInfo | None = None
        #: Operations of a rank in the calls of each method.
        self._work: dict[str, float] = {}
        self._tokens = 0
        for group in self._processes.values():
            group.execute_func(start_watch)

    @property
    def device(self) -> DeviceInfo:
        """Device of the first role's first rank, queried once."""
        if self._device is None:
            first = next(iter(self._processes.values()))
            self._device = first.execute_func_rank_zero(describe_device)
        return self._device

    def count_tokens(self, tokens: int) -> None:
        """Add ``tokens`` to the tokens of this step, prompts included."""
        self._tokens += tokens

    def count_pass(
        self,
        role: str,
        host_role: str,
        method: str,
        lengths: Sequence[int],
        head_tokens: int,
        kind: Pass = "forward",
    ) -> None:
        """Count a call that sends rows through a role's model.

        Args:
            role: role whose model computes.
            host_role: role whose workers compute.
            method: method of the workers that is called.
            lengths: tokens of each row, repeated if the row goes through the model several times.
            head_tokens: response tokens of the rows; only these go through the head.
            kind: ``forward``, or ``train`` for forward and backward.
        """
        counter = self._counter(role)
        if counter is None:
            return
        operations = counter.count(lengths, head_tokens, kind) / self._ranks[host_role]
        self._work[method] = self._work.get(method, 0.0) + operations

    def _counter(self, role: str) -> ModelFlops | None:
        path = self._models.get(role) or next(iter(self._models.values()))
        gives_values = role in (Role.CRITIC, Role.REWARD_MODEL)
        key = (path, gives_values)
        if key not in self._counters:
            try:
                self._counters[key] = read_model_flops(Path(path), gives_values, self._trusts)
            except ConfigError as error:
                logger.warning("there will be no perf/tflops and perf/mfu: %s", error)
                self._counters[key] = None
        return self._counters[key]

    def metrics(self, step_seconds: float) -> dict[str, float]:
        """Return the metrics of the step that ends now, and reset the counters.

        Args:
            step_seconds: duration of the step in seconds.
        """
        figures: dict[str, float] = {}
        if self._tokens:
            figures["perf/total_num_tokens"] = float(self._tokens)
            figures["perf/throughput"] = self._tokens / max(step_seconds, 1e-9) / self._all_ranks
        # This call is queued behind all calls of the step, so peaks of calls still in flight are included.
        by_method = self._take_peaks()
        for method, operations in self._work.items():
            name, seconds = _NAMES.get(method, method), by_method.get(method, Peak()).seconds
            rate = operations / max(seconds, 1e-9)
            figures[f"perf/tflops/{name}"] = rate / 1e12
            if self.device.peak_flops is not None:
                figures[f"perf/mfu/{name}"] = rate / self.device.peak_flops
        self._work, self._tokens = {}, 0
        return {**figures, **_memory(by_method)}

    def _take_peaks(self) -> dict[str, Peak]:
        """Return method → largest memory and time of a rank in its calls since the previous request."""
        peak_by_phase: dict[str, Peak] = {}
        for group in self._processes.values():
            for peaks in group.execute_func(take_peaks):
                for method, peak in peaks.items():
                    peak_by_phase[method] = peak_by_phase.get(method, Peak()) | peak
        return peak_by_phase


def _memory(by_method: Mapping[str, Peak]) -> dict[str, float]:
    phases: dict[str, Peak] = {}
    whole = Peak()
    for method, peak in by_method.items():
        phase = PHASES.get(method, method)
        if phase:
            phases[phase] = phases.get(phase, Peak()) | peak
            whole |= peak
    metrics = _as_metrics(whole, "")
    for phase, peak in phases.items():
        metrics |= _as_metrics(peak, f"/{phase}")
    return metrics


def _as_metrics(peak: Peak, suffix: str) -> dict[str, float]:
    values = {
        "max_memory_allocated_gb": peak.allocated,
        "max_memory_reserved_gb": peak.reserved,
        "cpu_memory_used_gb": peak.resident,
    }
    return {f"perf/{name}{suffix}": value / _GB for name, value in values.items() if value}
