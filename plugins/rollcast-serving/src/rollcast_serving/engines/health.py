"""The health check that adapters of engines share: the engine is installed, of a tested version, and imports."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from typing import ClassVar

from packaging.requirements import Requirement

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem, warning

__all__ = ["EngineCheck"]


class EngineCheck(BaseHealthCheck):
    """An engine in this environment; a subclass names it.

    Attributes:
        rollout: registry name of the adapter.
        title: name of the engine in messages.
        adapter: distribution of the adapter; its extras name the engine's tested versions.
        engines: distributions that the engine comes in.
        module: the engine's package; empty if importing it needs an environment that only its server has.
    """

    rollout: ClassVar[str]
    title: ClassVar[str]
    adapter: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]
    module: ClassVar[str]
    timeout_s = 240.0

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Look for the engine where the replicas of the run look for it."""
        is_chosen = setup.get("rollout.name") == self.rollout
        installed = [(name, version) for name in self.engines if (version := _version(name)) is not None]
        if not installed:
            # In an environment of its own: the check of the replicas looks there.
            if not (is_chosen and setup.get("rollout.replica.python") is not None):
                yield self._absent(is_chosen)
            return
        name, version = installed[0]
        yield self._compare(name, version)
        if self.module:
            try:
                importlib.import_module(self.module)
            except Exception as error:  # noqa: BLE001  # compiled packages raise errors of every kind
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                fix = f"pip install --force-reinstall {name}, in the environment of {self.adapter}"
                yield problem(self.title, f"{name} {version} is installed, and importing it failed: {reason}", fix)
                return
        yield from self.find_traps()

    def find_traps(self) -> Iterable[Finding]:
        """Return findings about settings with which this engine is known to fail; for subclasses."""
        return ()

    def _absent(self, is_chosen: bool) -> Finding:
        fix = (
            f'pip install "{self.adapter}[cuda]" (without a GPU as the README of {self.adapter} says), or '
            "rollout.replica.python=PATH of the interpreter that has it"
        )
        if is_chosen:
            return problem(self.title, f"rollout={self.rollout} needs {self.title}, which is not installed here", fix)
        return warning(self.title, f"{self.adapter} is installed, and {self.title} is not", fix)

    def _compare(self, name: str, version: str) -> Finding:
        tested = _tested(self.adapter, name)
        if tested is not None and not tested.specifier.contains(version, prereleases=True):
            fix = f"pip install '{tested.name}{tested.specifier}', unless the suites pass with this version"
            return warning(self.title, f"{name} {version}; {self.adapter} is tested with {tested.specifier}", fix)
        return ok(self.title, f"{name} {version}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tested(adapter: str, engine: str) -> Requirement | None:
    """Return what an adapter's extras ask of an engine."""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(adapter) or ()]
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((requirement for requirement in requirements if requirement.name == engine), None)
