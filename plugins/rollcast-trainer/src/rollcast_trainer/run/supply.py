"""The list of stages of a step: stages are added for the columns that later stages read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.stage import Stage, StageSpec, stages
from rollcast.errors import ConfigError, PluginError

__all__ = ["Changes", "Place", "declare_stages", "supply"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """One stage of the list.

    Attributes:
        name: name of the stage.
        spec: declaration for this run.
        reason: why the stage is in the list: the reader and its column, a goal, or a stage that brings it.
        unregistered: class of a stage that is not in the registry; None for the registered stage of this name.
    """

    name: str
    spec: StageSpec
    reason: str
    unregistered: type[Stage] | None = None

    @property
    def stage(self) -> type[Stage]:
        """Class of the stage."""
        return self.unregistered or stages.get(self.name)


@dataclass(frozen=True)
class Changes:
    """A recipe's changes to the list (``trainer.stages``).

    Attributes:
        insert: names of stages to add although no stage reads their columns.
        replace: mapping from the name of a stage to the name of its replacement.
        remove: names of stages that are never added.
    """

    insert: Sequence[str] = ()
    replace: Mapping[str, str] = field(default_factory=dict)
    remove: Collection[str] = ()


def declare_stages(settings: Any, changes: Changes) -> dict[str, StageSpec]:
    """Return the declarations of all registered stages that apply to this run.

    A stage that cannot be loaded is left out with a warning, unless the recipe names it.

    Raises:
        ConfigError: the recipe names a stage that does not exist or does not apply to the run.
        PluginError: a stage that the recipe names cannot be loaded.
    """
    wanted = {*changes.insert, *changes.replace.values()}
    for key, names in (("insert", changes.insert), ("replace", changes.replace), ("remove", changes.remove)):
        for name in (*names, *(changes.replace.values() if key == "replace" else ())):
            stages.find(name, requested_by=f"trainer.stages.{key}")
    specs: dict[str, StageSpec] = {}
    for name in stages.names():
        if name in changes.remove or name in changes.replace:
            continue
        try:
            stage = stages.get(name)
        except PluginError as error:
            if name in wanted:
                raise
            logger.warning("left out the stage %r: %s", name, error)
            continue
        # Outside the handler: if declare() fails because a plugin of the stage is missing, the error must end the run.
        spec = stage.declare(settings)
        if spec is not None:
            specs[name] = spec
        elif name in wanted:
            raise ConfigError(f"trainer.stages names {name!r}, which does not apply to a run with this configuration")
    return specs


def _with_replaced(specs: Mapping[str, StageSpec], changes: Changes) -> tuple[dict[str, StageSpec], Changes]:
    """Return the declarations without replaced stages, and the changes with these replacements added.

    Raises:
        ConfigError: two stages replace the same one, or the recipe inserts a stage that is replaced.
    """
    replaced: dict[str, str] = {}
    for name, spec in specs.items():
        for old in spec.replaces:
            if old in replaced:
                raise ConfigError(
                    f"the stages {replaced[old]!r} and {name!r} both replace {old!r}; choose one with "
                    f"trainer.stages.remove=[{replaced[old]}] or trainer.stages.remove=[{name}]"
                )
            if old in changes.insert:
                raise ConfigError(f"trainer.stages.insert names {old!r}, which {name!r} replaces in this run")
            replaced[old] = name
    remaining = {name: spec for name, spec in specs.items() if name not in replaced}
    return remaining, Changes(changes.insert, {**replaced, **changes.replace}, changes.remove)


def supply(
    goals: Sequence[str], specs: Mapping[str, StageSpec], present: Collection[str], changes: Changes | None = None
) -> list[Place]:
    """Return the stages that reach the goals, in execution order.

    Args:
        goals: names of stages; each is in the list unless the recipe removes it.
        specs: declarations by name.
        present: columns of the batch that the first stage receives.
        changes: changes of the recipe; None for none.

    Raises:
        ConfigError: no stage writes a column that is read, two stages write it, or stages depend on each other.
    """
    specs, changes = _with_replaced(specs, changes or Changes())
    reasons: dict[str, str] = {}
    for goal in goals:
        name = changes.replace.get(goal, goal)
        if name not in changes.remove:
            reasons[_known(name, "a goal of the trainer", specs)] = "goal of the trainer"
    for name in changes.insert:
        reasons.setdefault(_known(name, "trainer.stages.insert", specs), "trainer.stages.insert")
    _close(reasons, specs, present, changes)
    return [Place(name, specs[name], reasons[name]) for name in _order(list(reasons), specs, changes)]


def _known(name: str, asked: str, specs: Mapping[str, StageSpec]) -> str:
    if name not in specs:
        raise ConfigError(f"{asked} is the stage {name!r}, which this run lacks; stages: {', '.join(sorted(specs))}")
    return name


def _close(reasons: dict[str, str], specs: Mapping[str, StageSpec], present: Collection[str], changes: Changes) -> None:
    """Add the stages that those in ``reasons`` need, until no column is missing."""
    while True:
        missing: list[tuple[str, str, list[str]]] = []
        for name in list(reasons):
            for brought in (changes.replace.get(stage, stage) for stage in specs[name].brings):
                if brought not in changes.remove:
                    reasons.setdefault(_known(brought, f"brought by {name}", specs), f"comes with {name}")
            for column in specs[name].reads:
                if column in present or any(_writes(specs[stage], column) for stage in reasons if stage != name):
                    continue
                missing.append((name, column, [stage for stage in specs if _writes(specs[stage], column)]))
        if not missing:
            return
        # Columns with a single writer first: that writer may also provide a column which otherwise has two candidates.
        reader, column, writers = min(missing, key=lambda entry: len(entry[2]) != 1)
        _refuse(reader, column, [stage for stage in writers if stage != reader], present, specs)
        reasons[next(stage for stage in writers if stage != reader)] = f"{reader} reads {column}"


def _writes(spec: StageSpec, column: str) -> bool:
    return any(column == name or (name.endswith("/") and column.startswith(name)) for name in spec.writes)


def _refuse(
    reader: str, column: str, writers: Sequence[str], present: Collection[str], specs: Mapping[str, StageSpec]
) -> None:
    if not writers:
        columns = sorted({*present, *(name for spec in specs.values() for name in spec.writes)})
        raise ConfigError(
            f"stage {reader!r} reads the column {column!r}, which no stage writes and the dataset does not have; "
            f"columns: {', '.join(columns)}. Install or register a stage that writes it (rollcast.stages)"
        )
    if len(writers) > 1:
        raise ConfigError(
            f"stage {reader!r} reads the column {column!r}, which {' and '.join(writers)} both write; choose one with "
            f"trainer.stages.remove=[{writers[0]}] or trainer.stages.remove=[{writers[1]}]"
        )


def _order(names: Sequence[str], specs: Mapping[str, StageSpec], changes: Changes) -> list[str]:
    """Return the names in dependency order; otherwise the order of ``names`` is kept."""
    needs = {name: _dependencies(name, names, specs, changes) for name in names}
    for barrier in (name for name in names if specs[name].changes_rows):
        before = _all_before(barrier, needs)
        for name in names:
            if name not in before and name != barrier and barrier not in needs[name]:
                needs[name].append(barrier)
    order: list[str] = []
    for name in names:
        _visit(name, needs, order, ())
    return order


def _dependencies(name: str, names: Sequence[str], specs: Mapping[str, StageSpec], changes: Changes) -> list[str]:
    spec = specs[name]
    columns = (*spec.reads, *spec.optional)
    writers = [other for column in columns for other in names if other != name and _writes(specs[other], column)]
    after = (changes.replace.get(other, other) for other in spec.after)
    return list(dict.fromkeys([*writers, *(other for other in after if other in names and other != name)]))


def _all_before(name: str, needs: Mapping[str, Sequence[str]]) -> set[str]:
    columns: set[str] = set()
    waiting = list(needs[name])
    while waiting:
        current = waiting.pop()
        if current not in columns:
            columns.add(current)
            waiting += needs[current]
    return columns


def _visit(name: str, needs: Mapping[str, Sequence[str]], order: list[str], path: tuple[str, ...]) -> None:
    if name in order:
        return
    if name in path:
        raise ConfigError(f"stages depend on each other: {' -> '.join((*path[path.index(name) :], name))}")
    for other in needs[name]:
        _visit(other, needs, order, (*path, name))
    order.append(name)
