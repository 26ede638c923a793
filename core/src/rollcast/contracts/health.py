"""Contract of health checks, which ``rollcast doctor`` runs before a run starts.

A distribution checks what it depends on, and says what to do about a fault::

    class LicenceCheck(BaseHealthCheck):
        subject = "licence server"

        def run(self, setup):
            host = setup.get("licence.host", "localhost")
            if answers(host):
                return [ok("server", f"{host} answers")]
            return [problem("server", f"{host} does not answer", "start it, or set licence.host")]

Announce it in the group ``rollcast.health_checks``. The checks of a distribution run in a process of their own: one
that raises, hangs or crashes is itself a finding, and the other distributions' checks are not affected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from rollcast.errors import PluginTypeError
from rollcast.plugins import Registry, subclass_of

__all__ = ["BaseHealthCheck", "Finding", "HealthSetup", "HealthState", "health_checks", "ok", "problem", "warning"]

HealthState = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: short name of the thing that was looked at, such as ``open files``.
        state: ``ok``; ``warning`` (a run may suffer from it); ``problem`` (a run fails because of it).
        message: the fact, with its figures.
        fix: command, key or setting that fixes it; required unless the state is ``ok``.

    Raises:
        PluginTypeError: the state is unknown, a text is empty, or a fault has no fix.
    """

    name: str
    state: HealthState
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.state not in get_args(HealthState):
            raise PluginTypeError(
                f"a finding has the state {self.state!r}; allowed: {', '.join(get_args(HealthState))}"
            )
        if not self.name or not self.message:
            raise PluginTypeError(f"a finding needs a name and a message, got {self.name!r} and {self.message!r}")
        if self.state != "ok" and not self.fix:
            raise PluginTypeError(
                f"the {self.state} {self.name!r} ({self.message}) needs a fix: say what to do about it"
            )


def ok(name: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", message)


def warning(name: str, message: str, fix: str) -> Finding:
    """Return a finding that may affect a run."""
    return Finding(name, "warning", message, fix)


def problem(name: str, message: str, fix: str) -> Finding:
    """Return a finding that makes a run fail."""
    return Finding(name, "problem", message, fix)


@dataclass(frozen=True)
class HealthSetup:
    """The run that is asked about, if there is one.

    Attributes:
        config: its configuration as nested mappings, of JSON values; None if only the machine is asked about.
    """

    config: Mapping[str, Any] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key; ``default`` without a configuration, or if it has no such value."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or value.get(part) is None:
                return default
            value = value[part]
        return default if value == "???" else value


class BaseHealthCheck(ABC):
    """A check of the machine, of the installation, or of what a configuration asks of them.

    Attributes:
        subject: heading under which the findings are listed; checks with the same subject are listed together.
        timeout_s: seconds that :meth:`run` may take, importing libraries included.
    """

    subject: ClassVar[str]
    timeout_s: ClassVar[float] = 60.0

    @abstractmethod
    def run(self, setup: HealthSetup) -> Iterable[Finding]:
        """Return or yield the findings; none if there is nothing to look at.

        Changes nothing that outlives the process. May import heavy libraries: the process ends afterwards.
        """


health_checks: Registry[type[BaseHealthCheck]] = Registry(
    "rollcast.health_checks", subclass_of(BaseHealthCheck), description="checks of rollcast doctor"
)
