"""The trackers of a run, which are checked before the run starts and cannot stop it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.hooks import PROJECT, find_hook_mistake
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast.errors import ConfigError, DataError, PluginTypeError, RollcastError

if TYPE_CHECKING:
    from pluggy import PluginManager

__all__ = ["TrackerSet"]

logger = logging.getLogger(__name__)
_MARK = f"{PROJECT}_impl"


class TrackerSet:
    """The trackers that a config names.

    The constructor finds the classes and checks their options and requirements; it creates no tracker.
    Exceptions of trackers, also from their constructors, are logged and not raised: the first one of a
    tracker with its traceback; further ones are counted.

    Args:
        names: value of ``trackers``.
        options: value of ``tracker_kwargs``: tracker → keyword arguments.

    Raises:
        PluginError: a tracker does not exist, does not load, lacks a library, or listens to a hook or an argument
            that does not exist.
        ConfigError: a tracker has no such option, or there are options for a tracker that is not in ``names``.
    """

    def __init__(self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        keywords = {name: dict(values or {}) for name, values in (options or {}).items()}
        unused = sorted(set(keywords) - set(names))
        if unused:
            raise ConfigError(
                f"tracker_kwargs.{unused[0]} is set, but trackers has no {unused[0]!r}; it has: {', '.join(names)}"
            )
        self._parts = {name: (trackers.get(name), keywords.get(name, {})) for name in names}
        for name, (part, values) in self._parts.items():
            mistake = find_hook_mistake(part)
            if mistake is not None:
                raise PluginTypeError(f"tracker {name!r} of {trackers.find(name)}: it {mistake}")
            _check_options(name, part, values)
            part.check_requirements()
        self._trackers: dict[str, BaseTracker] = {}
        self._failures: dict[str, int] = {}
        self._hooks: PluginManager | None = None

    def start(self, hooks: PluginManager, run_dir: Path, config: dict[str, Any], start_step: int) -> None:
        """Create the trackers and register them; may be called again after :meth:`close`.

        Args:
            hooks: plugin manager whose hooks call the trackers.
            run_dir, config, start_step: see :class:`BaseTracker`.

        Raises:
            ConfigError: an option has a wrong value.
            DataError: a file that an earlier run left cannot be continued.
        """
        self._hooks = hooks
        for name, (part, values) in self._parts.items():
            try:
                tracker = part(run_dir, config, start_step, **values)
            except (ConfigError, DataError):  # the user can correct an option or remove a file
                raise
            except Exception as error:  # noqa: BLE001 -- no tracker may stop a run
                self._tell(name, "was not created, and the run goes on without it", error)
                continue
            self._trackers[name] = tracker
            hooks.register(_Guarded(tracker, functools.partial(self._tell, name)), name=f"tracker:{name}")

    def close(self) -> None:
        """Close every tracker; may be called again."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            if self._hooks is not None:
                self._hooks.unregister(name=f"tracker:{name}")
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 -- no tracker may stop a run
                self._tell(name, "close failed", error)
        for name, count in self._failures.items():
            if count > 1:
                logger.warning("tracker %s failed %d times in all; what it shows is not complete", name, count)
        self._failures.clear()

    def _tell(self, name: str, what: str, error: Exception) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] == 1:
            reason = f"{type(error).__name__}: {error}"
            # Errors of the operating system and our own say what to do; any other is a bug and needs a traceback.
            trace = None if isinstance(error, OSError | RollcastError) else error
            logger.warning("tracker %s: %s (%s)", name, what, reason, exc_info=trace)


class _Guarded:
    """The hook implementations of a tracker, with errors passed to ``tell`` instead of raised."""

    def __init__(self, tracker: BaseTracker, tell: Callable[[str, Exception], None]) -> None:
        for name in dir(tracker):
            function = getattr(tracker, name, None)
            if inspect.isroutine(function) and hasattr(function, _MARK):
                setattr(self, name, _guard(function, name, tell))


def _guard(function: Callable[..., None], event: str, tell: Callable[[str, Exception], None]) -> Callable[..., None]:
    @functools.wraps(function)  # pluggy reads the hookimpl marker and the argument names
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- no tracker may stop a run
            tell(f"{event} failed, and the run goes on", error)

    return guarded


def _check_options(name: str, part: type[BaseTracker], values: Mapping[str, Any]) -> None:
    known = _option_names(part)
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ConfigError(
            f"tracker_kwargs.{name}: there is no option {unknown[0]!r}; options: {', '.join(known) or 'none'}"
        )


def _option_names(part: type[BaseTracker]) -> list[str]:
    """Return the keyword arguments of a tracker, with those of its bases if it passes ``**kwargs`` on."""
    names: list[str] = []
    for base in part.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[4:]
        names += [
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in names
        ]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names
