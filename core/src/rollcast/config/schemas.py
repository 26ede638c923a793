"""Dataclass schemas of the core's own configuration keys, and how plugins announce theirs.

A config package (an entry point in ``rollcast.configs``) holds YAML files by config group and a
tuple ``SCHEMAS`` that says which dataclass each section of the tree follows. Nothing here or there
may import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ConfigSchema", "PlacementConfig", "RuntimeConfig"]


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
class RuntimeConfig:
    """What hosts the workers.

    Attributes:
        name: ``ray`` or ``local``, or what a plugin registers in ``rollcast.runtimes``.
        address: of a Ray cluster to join; empty for ``RAY_ADDRESS`` or a Ray of our own.
        num_cpus: logical CPUs of an embedded Ray; empty for all cores.
        object_store_memory: bytes of an embedded Ray's object store.
        log_to_driver: show what workers print.
        call_timeout_s: deadline of every blocking call.
        launch_timeout_s: deadline for placing and starting a worker group.
        threads_per_worker: CPU threads a worker; empty shares a node's cores evenly.
        record: a method (``role.method:2`` for its second call) to record in RUN_DIR/records.
    """

    name: str = "ray"
    address: str | None = None
    num_cpus: int | None = None
    object_store_memory: int | None = None
    log_to_driver: bool = False
    call_timeout_s: float = 3600.0
    launch_timeout_s: float = 300.0
    threads_per_worker: int | None = None
    record: str | None = None


@dataclass
class PlacementConfig:
    """How many worker processes, on how many nodes.

    Attributes:
        nnodes: number of nodes.
        n_gpus_per_node: processes a node (verl's name; without a GPU they are CPU processes).
        device: ``auto`` takes GPUs where the machine has them, ``cpu`` or ``cuda`` insist.
        pools: further pools: name → processes on each node, as in ``{critic_pool: [8, 8]}``.
        mapping: role → pool; roles that are not in it share the pool of the numbers above.
    """

    nnodes: int = 1
    n_gpus_per_node: int = 1
    device: str = "auto"
    pools: dict[str, list[int]] = field(default_factory=dict)
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
