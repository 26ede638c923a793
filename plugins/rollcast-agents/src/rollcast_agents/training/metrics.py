"""Metrics of a step's rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rollcast_agents.contracts.trajectory import ENDS, Trajectory

__all__ = ["agent_metrics"]

_COUNTED = ("turns", "tool_calls", "tool_errors", "forks")


def agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over rollouts, shares of ends, failures by boundary, and seconds per call by tool.

    Args:
        trajectories: trajectories of complete rollouts; metrics of a rollout count once.
    """
    rollouts = {trajectory.rollout_id: trajectory for trajectory in trajectories}
    count = max(len(rollouts), 1)
    metrics = {"agent/rollouts": float(len(rollouts)), "agent/trajectories": len(trajectories) / count}
    numbers = [rollout.metrics for rollout in rollouts.values()]
    for name in _COUNTED:
        values = [metrics_of_rollout.get(name, 0.0) for metrics_of_rollout in numbers]
        metrics[f"agent/{name}_mean"] = sum(values) / count
        metrics[f"agent/{name}_max"] = max(values, default=0.0)
    ends = Counter(rollout.end for rollout in rollouts.values())
    metrics |= {f"agent/ends/{end}": ends[end] / count for end in ENDS}
    failures = Counter(rollout.failure.boundary for rollout in rollouts.values() if rollout.failure is not None)
    metrics["agent/failures"] = float(failures.total())
    # Reported to the model; not a failure of the rollout.
    metrics["agent/tool_failures"] = float(
        sum(len(rollout.extra.get("tool_failures", ())) for rollout in rollouts.values())
    )
    metrics |= {f"agent/failures/{boundary}": float(number) for boundary, number in failures.items()}
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    behind = sum(len(trajectory.token_ids) - trajectory.prompt_length for trajectory in trajectories)
    metrics["agent/trained_share"] = sampled / max(behind, 1)
    return metrics | _tools(numbers) | _others(numbers)


def _tools(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return calls per rollout and seconds per call for each tool."""
    sums: Counter[str] = Counter()
    for metrics_of_rollout in numbers:
        sums.update({name: value for name, value in metrics_of_rollout.items() if _is_time(name) or _is_count(name)})
    metrics = {}
    for name in {key.rpartition("/")[0] for key in sums}:
        calls = sums[f"{name}/calls"]
        metrics[f"agent/{name}/calls"] = calls / max(len(numbers), 1)
        metrics[f"agent/{name}/seconds"] = sums[f"{name}/seconds"] / max(calls, 1)
    return metrics


def _others(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every other metric over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for metrics_of_rollout in numbers:
        for name, value in metrics_of_rollout.items():
            if name not in _COUNTED and not _is_time(name) and not _is_count(name):
                values.setdefault(name, []).append(float(value))
    return {f"agent/{name}": sum(samples) / len(samples) for name, samples in values.items()}


def _is_time(name: str) -> bool:
    return name.startswith("tool/") and name.endswith("/seconds")


def _is_count(name: str) -> bool:
    return name.startswith("tool/") and name.endswith("/calls")
