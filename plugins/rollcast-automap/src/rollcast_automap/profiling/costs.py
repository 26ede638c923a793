"""The table of measured costs that ``rollcast profile`` writes, and its JSON format.

A file is one object::

    {
      "schema": "rollcast.costs", "version": 1, "created": "2026-01-31T12:00:00+00:00",
      "versions": {"rollcast": "...", "torch": "...", "transformers": "..."},
      "device": {"name": "...", "memory_bytes": 0, "peak_flops": null},
      "nodes": [8],
      "roles": {"actor": {...RoleLayout}, "rollout": {...}},
      "measurements": [{...Measurement}, ...]
    }

All files of a version have the same keys; a change of the keys changes the version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rollcast.contracts.files import replace_file
from rollcast.errors import ConfigError, DataError
from rollcast_automap.profiling.devices import DeviceInfo

__all__ = ["PHASES", "SCHEMA", "VERSION", "CostTable", "Measurement", "Phase", "RoleLayout", "read_costs"]

SCHEMA, VERSION = "rollcast.costs", 1
Phase = Literal["prefill", "decode", "forward", "forward_backward", "backward", "optimizer", "sync"]
#: Phases that can be measured.
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class RoleLayout:
    """The layout of a role on devices.

    Attributes:
        engine: registry name of the engine or rollout.
        model_path: folder of the model.
        parameters: number of the model's parameters; None if not known.
        world_size: number of devices; of processes if there are no accelerators.
        data_parallel: data-parallel size; the number of replicas for a rollout.
        tensor_parallel, pipeline_parallel, context_parallel: sizes of the other kinds of parallelism.
        settings: the engine's or rollout's own keys.
    """

    engine: str
    model_path: str
    parameters: int | None
    world_size: int
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """The measured cost of one phase of a role at one size.

    Attributes:
        role: a key of ``roles``.
        phase: ``prefill``: a prompt and its first token. ``decode``: one further token for each row.
            ``forward``: log-probs or values without gradient. ``forward_backward``: a pass with gradient.
            ``backward``: the difference of the two passes. ``optimizer``: clipping and step. ``sync``: transfer
            of all weights to the rollout.
        batch_size: rows of one data-parallel part; 0 for phases without rows.
        length: tokens of each row; for ``decode``, the tokens before the new one.
        response_tokens: response tokens of each row, which go through the vocabulary head.
        tokens: computed tokens of one data-parallel part.
        seconds, seconds_min, seconds_max: median, minimum and maximum over the repetitions, on the slowest device;
            None if out of memory.
        repeats: number of repetitions.
        out_of_memory: True if the device ran out of memory.
        peak_bytes: peak memory on a device by torch's allocator, or of the process on a CPU; None if not known.
        flops: operations on each device; None if they cannot be counted or do not apply.
        bytes: bytes sent in a ``sync``; None if nothing was sent.
    """

    role: str
    phase: Phase
    batch_size: int
    length: int
    response_tokens: int
    tokens: int
    seconds: float | None
    seconds_min: float | None
    seconds_max: float | None
    repeats: int
    out_of_memory: bool = False
    peak_bytes: int | None = None
    flops: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class CostTable:
    """Everything that one run of ``rollcast profile`` measured.

    Attributes:
        created: time of creation, in ISO 8601 with time zone.
        versions: distribution → version.
        device: device of the actor's first rank.
        nodes: processes on each node of the actor's pool.
        roles: role → layout.
        measurements: measurements in the order in which they were made.
    """

    created: str
    versions: Mapping[str, str]
    device: DeviceInfo
    nodes: list[int]
    roles: Mapping[str, RoleLayout]
    measurements: list[Measurement]

    def write(self, path: Path) -> None:
        """Write the table to a JSON file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        replace_file(path, json.dumps(content, indent=1) + "\n")

    def find(self, role: str, phase: Phase) -> list[Measurement]:
        """Return the measurements of a role in a phase, without those that ran out of memory."""
        return [
            measurement
            for measurement in self.measurements
            if (measurement.role, measurement.phase) == (role, phase) and not measurement.out_of_memory
        ]


def read_costs(path: Path) -> CostTable:
    """Read a table that :meth:`CostTable.write` wrote.

    Raises:
        DataError: the file cannot be read, is not a table of this version, or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a table of costs: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise DataError(f"{path} is no table of costs; `rollcast profile` writes one")
    if content.get("version") != VERSION:
        raise DataError(
            f"{path} has version {content.get('version')} of the table of costs, but version {VERSION} is read here; "
            "measure again with `rollcast profile`"
        )
    try:
        table = CostTable(
            created=str(content["created"]),
            versions=dict(content["versions"]),
            device=_build(DeviceInfo, content["device"]),
            nodes=[int(count) for count in content["nodes"]],
            roles={role: _build(RoleLayout, layout) for role, layout in content["roles"].items()},
            measurements=[_build(Measurement, row) for row in content["measurements"]],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    for measurement in table.measurements:
        if measurement.role not in table.roles or measurement.phase not in PHASES:
            raise DataError(
                f"{path} is damaged: it measures {measurement.phase!r} of {measurement.role!r}, which it does not know"
            )
    return table


def _build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    names = {entry.name for entry in fields(kind)}
    if set(values) != names:
        raise ValueError(
            f"a {kind.__name__} has the keys {', '.join(sorted(names))}, found {', '.join(sorted(values))}"
        )
    return kind(**values)


def check_sizes(key: str, sizes: list[int]) -> list[int]:
    """Return sizes in rising order without duplicates.

    Raises:
        ConfigError: the list is empty, or a size is below 1; names the option.
    """
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{key} is {','.join(map(str, sizes)) or 'empty'}; give numbers from 1, such as {key} 1,8,64")
    return sorted(set(sizes))
