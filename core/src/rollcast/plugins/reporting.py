"""What is installed and in which state: the data behind ``rollcast plugins``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rollcast.plugins import inprocess
from rollcast.plugins.diagnose import Diagnosis
from rollcast.plugins.groups import GROUPS
from rollcast.plugins.loader import find_version_complaint
from rollcast.plugins.metadata import PartInfo, find_claims, find_groups, find_parts
from rollcast.plugins.registry import explain_conflict, find_registries

State = Literal["ok", "in-process", "broken", "conflict", "incompatible"]


@dataclass(frozen=True)
class PartReport:
    """One part and its state.

    Attributes:
        group, name: where the part is found.
        distribution, version: who provides it; empty for an in-process part.
        value: the entry point, or where an in-process part was defined.
        state: ``ok``; ``in-process``; ``broken`` (it cannot be imported, or is not what the group
            holds); ``conflict`` (claimed more than once); ``incompatible`` (made for another
            version of the core).
        cause: why it is not ok; empty if it is.
    """

    group: str
    name: str
    distribution: str
    version: str
    value: str
    state: State
    cause: str = ""


def report(
    check: bool = False,
    groups: Iterable[str] | None = None,
    registries: Iterable[str] | None = None,
    timeout: float = 120.0,
) -> list[PartReport]:
    """Every part, installed or in-process, sorted by group and name.

    Args:
        check: whether to really import each part, in a process of its own. Without it no code of
            any plugin runs: sources are parsed instead, which finds missing modules, missing names,
            missing dependencies, syntax errors and unconditional raises, but not more.
        groups: only these groups; all if not given.
        registries: modules to import in that process first, because they declare the registries
            that know what a group holds; those of the registries in this process if not given.
        timeout: seconds that the import of one part may take.

    Raises:
        PluginError: the process for checking cannot be started.
    """
    parts = _find_rollcast_parts()
    wanted = None if groups is None else set(groups)
    chosen = [part for part in parts if wanted is None or part.group in wanted]
    reports = {part: _judge(part) for part in chosen}
    sound = [part for part in chosen if reports[part].state == "ok"]
    if check:
        from rollcast.plugins.check import check_parts

        if registries is None:
            registries = {registry.defined_in for registry in find_registries()} - {"__main__"}
        first = sorted({*registries, "rollcast.plugins.manager"})  # which declares the hooks
        loadable = [part for part in sound if _is_loaded(part)]
        for part, state, cause in check_parts(loadable, first, timeout):
            reports[part] = _report(part, state, cause)
        sound = [part for part in sound if not _is_loaded(part)]
    diagnosis = Diagnosis(parts)
    for part in sound:
        problem = diagnosis.find_cause(part)
        if problem is not None:
            reports[part] = _report(part, "broken", problem)
    local = [row for row in _in_process() if wanted is None or row.group in wanted]
    return sorted([*reports.values(), *local], key=lambda row: (row.group, row.name, row.distribution))


def _find_rollcast_parts() -> list[PartInfo]:
    # Groups of other names belong to plugins that have registries of their own.
    declared = {registry.group for registry in find_registries()}
    groups = [g for g in find_groups() if g in declared or g.startswith("rollcast.")]
    return [part for group in groups for part in find_parts(group)]


def _is_loaded(part: PartInfo) -> bool:
    """Whether anything ever imports the part; a package of YAML files is only read."""
    return part.group not in GROUPS or GROUPS[part.group].kind != "package"


def _judge(part: PartInfo) -> PartReport:
    known = {*GROUPS, *(registry.group for registry in find_registries())}
    if part.group not in known:
        near = difflib.get_close_matches(part.group, sorted(known), n=1)
        hint = f"; did its author mean {near[0]!r}?" if near else ""
        return _report(part, "broken", f"there is no group {part.group!r}{hint}")
    claims = find_claims(part.group, part.name)
    if len(claims) > 1:
        return _report(part, "conflict", explain_conflict(claims))
    complaint = find_version_complaint(part)
    if complaint is not None:
        return _report(part, "incompatible", complaint)
    return _report(part, "ok")


def _report(part: PartInfo, state: State, cause: str = "") -> PartReport:
    return PartReport(part.group, part.name, part.distribution, part.version, part.value, state, cause)


def _in_process() -> list[PartReport]:
    rows: list[PartReport] = []
    for group in inprocess.find_groups():
        for name in inprocess.find_names(group):
            location = inprocess.find_location(group, name)
            rows.append(PartReport(group, name, "", "", location, "in-process"))
    return rows
