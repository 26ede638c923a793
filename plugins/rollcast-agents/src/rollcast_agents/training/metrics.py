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
    rollouts = {each.rollout_id: each for each in trajectories}
    count = max(len(rollouts), 1)
    found = {"agent/rollouts": float(len(rollouts)), "agent/trajectories": len(trajectories) / count}
    numbers = [each.metrics for each in rollouts.values()]
    for name in _COUNTED:
        values = [given.get(name, 0.0) for given in numbers]
        found[f"agent/{name}_mean"] = sum(values) / count
        found[f"agent/{name}_max"] = max(values, default=0.0)
    ends = Counter(each.end for each in rollouts.values())
    found |= {f"agent/ends/{end}": ends[end] / count for end in ENDS}
    failures = Counter(each.failure.boundary for each in rollouts.values() if each.failure is not None)
    found["agent/failures"] = float(failures.total())
    # Reported to the model; not a failure of the rollout.
    found["agent/tool_failures"] = float(sum(len(each.extra.get("tool_failures", ())) for each in rollouts.values()))
    found |= {f"agent/failures/{boundary}": float(number) for boundary, number in failures.items()}
    sampled = sum(each.sampled_tokens for each in trajectories)
    behind = sum(len(each.token_ids) - each.prompt_length for each in trajectories)
    found["agent/trained_share"] = sampled / max(behind, 1)
    return found | _tools(numbers) | _others(numbers)


def _tools(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return calls per rollout and seconds per call for each tool."""
    sums: Counter[str] = Counter()
    for given in numbers:
        sums.update({name: value for name, value in given.items() if _is_time(name) or _is_count(name)})
    found = {}
    for name in {key.rpartition("/")[0] for key in sums}:
        calls = sums[f"{name}/calls"]
        found[f"agent/{name}/calls"] = calls / max(len(numbers), 1)
        found[f"agent/{name}/seconds"] = sums[f"{name}/seconds"] / max(calls, 1)
    return found


def _others(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every other metric over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for given in numbers:
        for name, value in given.items():
            if name not in _COUNTED and not _is_time(name) and not _is_count(name):
                values.setdefault(name, []).append(float(value))
    return {f"agent/{name}": sum(each) / len(each) for name, each in values.items()}


def _is_time(name: str) -> bool:
    return name.startswith("tool/") and name.endswith("/seconds")


def _is_count(name: str) -> bool:
    return name.startswith("tool/") and name.endswith("/calls")
