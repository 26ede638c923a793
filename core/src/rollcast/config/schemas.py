"""Dataclass schemas of the core's own configuration keys, and how plugins announce theirs.

A config package (an entry point in ``rollcast.configs``) holds YAML files by config group and a
tuple ``SCHEMAS`` that says which dataclass each section of the tree follows. Nothing here or there
may import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ConfigSchema", "PlacementConfig", "PoolConfig"]


@dataclass(frozen=True)
class ConfigSchema:
    """The dataclass that a section of the config follows.

    Attributes:
        path: dotted path of the section, such as ``actor.engine``.
        schema: the dataclass; its fields are the valid keys and their types.
        group, option: the section follows it where the config group has this option (any option if
            empty; always if ``group`` is empty too).
    """

    path: str
    schema: type
    group: str = ""
    option: str = ""


@dataclass
class PoolConfig:
    """A pool with options, in ``placement.pools``.

    Attributes:
        processes: processes on each node, such as ``[8, 8]``.
        max_colocate_count: worker groups that may share the pool's devices.
        cpus_per_process: CPU cores that a process reserves in the cluster's book-keeping.
        accelerator_type: take only nodes with this type of device, such as ``H100``.
        strategy: ``STRICT_PACK`` keeps the processes of one entry on one node; ``PACK`` does so where it can.
        resources: custom resources that each process reserves, by name.
    """

    processes: list[int] = field(default_factory=list)
    max_colocate_count: int = 1
    cpus_per_process: float = 1.0
    accelerator_type: str | None = None
    strategy: str = "STRICT_PACK"
    resources: dict[str, float] = field(default_factory=dict)


@dataclass
class PlacementConfig:
    """How many worker processes, on how many nodes.

    Attributes:
        nnodes: number of nodes.
        n_gpus_per_node: processes a node (verl's name; without a GPU they are CPU processes).
        device: a registered device (``cuda``, ``npu``, ``xpu``, ``cpu``), or ``auto`` for the machine's accelerator.
        pools: further pools: name → processes on each node, as in ``{critic_pool: [8, 8]}``, or the keys of
            :class:`PoolConfig`, as in ``{critic_pool: {processes: [8, 8], accelerator_type: H100}}``.
        mapping: role → pool; roles that are not in it share the pool of the numbers above.
    """

    nnodes: int = 1
    n_gpus_per_node: int = 1
    device: str = "auto"
    pools: dict[str, Any] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)


@dataclass
class RootConfig:
    """The keys at the top of the tree.

    Attributes:
        run_dir: where everything of the run is written.
        trackers: names of the trackers that watch it.
        tracker_kwargs: options of trackers, by their names.
    """

    run_dir: str = "runs/run"
    trackers: list[str] = field(default_factory=list)
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
