"""Parallel sizes of a replica, and the nodes that replicas use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rollcast.contracts.rollout import RolloutCapabilities
from rollcast.errors import CapabilityError, ConfigError

__all__ = ["ReplicaShape", "check_shape", "check_spans", "split_nodes"]


@dataclass(frozen=True)
class ReplicaShape:
    """Parallel sizes of a replica; see the keys of :class:`~rollcast.contracts.sections.RolloutConfig`.

    Attributes:
        tensor, pipeline, data: sizes whose product is the number of devices.
        expert: devices over which whole experts are distributed; 1 for none.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @classmethod
    def of(cls, config: Any) -> ReplicaShape:
        """Return the sizes of a ``rollout`` section."""
        sizes = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.data_parallel_size)
        return cls(*sizes, config.expert_parallel_size)

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.tensor * self.pipeline * self.data

    def keys(self) -> dict[str, int]:
        """Return the size of each key of the section."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "data_parallel_size": self.data,
            "expert_parallel_size": self.expert,
        }

    def describe(self, section: str) -> str:
        """Return a clause with the number of devices and the keys that determine it."""
        sizes = {key: size for key, size in self.keys().items() if size > 1 and key != "expert_parallel_size"}
        if len(sizes) < 2:
            key, size = next(iter(sizes.items()), ("tensor_model_parallel_size", 1))
            return f"{section}.{key} is {size}"
        factors = " x ".join(f"{key}={size}" for key, size in sizes.items())
        return f"{section}.{factors} is {self.size} devices"


def check_shape(shape: ReplicaShape, capabilities: RolloutCapabilities, rollout: str, section: str = "rollout") -> None:
    """Check that a rollout has the kinds of parallelism that a replica's sizes need.

    Args:
        shape: sizes of a replica.
        capabilities: features of the rollout.
        rollout: registry name of the rollout.
        section: dotted key of the replicas' section.

    Raises:
        CapabilityError: it lacks one; the message names the key.
        ConfigError: the expert-parallel size does not fit the other sizes.
    """
    problem = shape_problem(shape, capabilities, rollout, section)
    if problem is not None:
        raise CapabilityError(problem)
    ranks = shape.tensor * shape.data
    if shape.expert not in (1, ranks):
        raise ConfigError(
            f"{section}.expert_parallel_size is {shape.expert}; valid: 1, or {section}.tensor_model_parallel_size x "
            f"data_parallel_size, which is {ranks}"
        )


def shape_problem(shape: ReplicaShape, capabilities: RolloutCapabilities, rollout: str, section: str) -> str | None:
    """Return the kind of parallelism that a rollout lacks, as a sentence with its key; None if it has all."""
    kinds = {
        "tensor_model_parallel_size": ("tensor", capabilities.tensor_parallel),
        "pipeline_model_parallel_size": ("pipeline", capabilities.pipeline_parallel),
        "data_parallel_size": ("data", capabilities.data_parallel),
        "expert_parallel_size": ("expert", capabilities.expert_parallel),
    }
    for key, size in shape.keys().items():
        kind, has = kinds[key]
        if size > 1 and not has:
            return f"rollout {rollout!r} has no {kind} parallelism ({section}.{key})"
    return None


def split_nodes(size: int, processes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the devices of each replica on each of its nodes.

    Args:
        size: devices of a replica.
        processes: processes on each node of the pool, as many as all replicas together have devices.
    """
    ends = list(accumulate(processes))
    cuts = sorted({0, *ends, *range(0, ends[-1], size)})
    parts: list[list[int]] = [[] for _ in range(ends[-1] // size)]
    for start, end in pairwise(cuts):
        parts[start // size].append(end - start)
    return [tuple(part) for part in parts]


def check_spans(
    shape: ReplicaShape, processes: Sequence[int], multi_node: bool, rollout: str, section: str = "rollout"
) -> bool:
    """Check that replicas fill their pool, and that those that span nodes can.

    An engine uses the devices of consecutive ranks, and as many on each of its nodes.

    Args:
        shape: sizes of a replica.
        processes: processes on each node of the pool.
        multi_node: True if the rollout's engines can span nodes.
        rollout: registry name of the rollout.
        section: dotted key of the replicas' section.

    Returns:
        True if a replica spans nodes.

    Raises:
        ConfigError: replicas do not fill the pool, or a replica's nodes do not have equal parts of it; the message
            names the keys.
        CapabilityError: a replica spans nodes, and an engine of the rollout cannot.
    """
    total, role, sizes = sum(processes), section.partition(".")[0], shape.describe(section)
    if total % shape.size:
        raise ConfigError(f"{sizes}, which does not divide the {total} processes of the {role}'s pool")
    replicas = split_nodes(shape.size, processes)
    widest = max(replicas, key=len)
    if len(widest) == 1:
        return False
    pool = f"the {role}'s pool has {list(processes)} processes on its nodes, so a replica would span nodes"
    if not multi_node:
        fitting = [str(size) for size in range(1, max(processes) + 1) if not any(n % size for n in processes)]
        raise CapabilityError(
            f"{sizes}, but {pool}, and an engine of rollout {rollout!r} runs on one node. Devices of a replica that "
            f"fit: {', '.join(fitting)}"
        )
    for parts in replicas:
        nodes = len(parts)
        if len(set(parts)) > 1:
            raise ConfigError(
                f"{sizes}, but {pool} with {' and '.join(map(str, parts))} of its devices, and an engine needs as many "
                f"on each node. Devices of a replica that fit: {', '.join(map(str, _fitting(processes)))}"
            )
        if shape.data > 1 and shape.data % nodes:
            raise ConfigError(
                f"{section}.data_parallel_size is {shape.data}, but a replica spans {nodes} nodes, and each rank must "
                f"fit on one of them; choose a multiple of {nodes}"
            )
        if shape.data == 1 and nodes % shape.pipeline and shape.pipeline % nodes:
            raise ConfigError(
                f"{section}.pipeline_model_parallel_size is {shape.pipeline}, but a replica spans {nodes} nodes, and "
                "its stages must fill whole nodes, or its nodes whole stages; choose a divisor or a multiple of "
                f"{nodes}"
            )
    return True


def _fitting(processes: Sequence[int]) -> list[int]:
    """Return the numbers of devices with which every replica has equal parts on its nodes."""
    total = sum(processes)
    return [
        size
        for size in range(1, total + 1)
        if total % size == 0 and all(len(set(parts)) == 1 for parts in split_nodes(size, processes))
    ]
