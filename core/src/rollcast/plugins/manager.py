"""Building the hook manager from installed plugins, and the report on all parts."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

import pluggy

from rollcast.errors import PluginError, PluginTypeError
from rollcast.plugins import hookspecs
from rollcast.plugins.metadata import PartInfo
from rollcast.plugins.registry import Registry
from rollcast.plugins.reporting import PartReport, report

__all__ = ["PartReport", "build_hook_manager", "hooks", "report"]

_log = logging.getLogger("rollcast.plugins")


def _is_listener(obj: object) -> str | None:
    if any(True for _ in _find_hookimpls(obj)):
        return None
    return "has no function that is marked with rollcast.plugins.hookimpl"


hooks: Registry[Any] = Registry("rollcast.hooks", _is_listener)
"""The listeners that installed distributions announce."""


def build_hook_manager(extra: Iterable[object] = ()) -> pluggy.PluginManager:
    """A hook manager with every installed listener, and those in ``extra``.

    An installed listener that cannot be loaded is logged as a warning and left out: nobody asked
    for it by name, so it must not stop a run. One that loads but listens to an event that does not
    exist would silently do nothing, so that is an error.

    Args:
        extra: more listeners: modules, objects, or classes to be created without arguments.

    Returns:
        The manager; ``manager.hook.on_step_end(trainer=…, step=…, metrics=…)`` calls a hook.

    Raises:
        PluginTypeError: a listener has an unknown hook, a hook with an unknown argument, or
            none at all; or creating one of ``extra`` failed.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in hooks.names():
        try:
            part = hooks.find(name)
            listener = _create(hooks.get(name))
        except PluginError as error:
            _log.warning("left out the hooks %r: %s", name, error)
        except Exception as error:  # noqa: BLE001  # the listener's own constructor
            _log.warning("left out the hooks %r of %s: %r", name, part, error, exc_info=error)
        else:
            _add(manager, listener, _label(part))
    for each in extra:
        label = f"extra hooks {_describe(each)}"
        complaint = _is_listener(each)
        if complaint is not None:
            raise PluginTypeError(f"{label}: it {complaint}")
        try:
            listener = _create(each)
        except Exception as error:
            raise PluginTypeError(f"{label} could not be created: {error!r}") from error
        _add(manager, listener, label)
    return manager


def _label(part: PartInfo) -> str:
    return f"hooks {part.name!r} of {part}"


def _describe(obj: object) -> str:
    name = getattr(obj, "__name__", None)
    return str(name) if name else f"of type {type(obj).__qualname__}"


def _create(listener: Any) -> object:
    # pluggy would register the functions of a class unbound, with `self` as a hook argument.
    return listener() if isinstance(listener, type) else listener


def _find_hookimpls(obj: object) -> Iterable[tuple[str, dict[str, Any]]]:
    for name in dir(obj):
        # getattr_static, because looking at an object must not run its properties.
        member = inspect.getattr_static(obj, name, None)
        member = getattr(member, "__func__", member)
        options = getattr(member, f"{hookspecs.PROJECT}_impl", None)
        if isinstance(options, dict):
            yield options.get("specname") or name, options


def _add(manager: pluggy.PluginManager, listener: object, label: str) -> None:
    if manager.is_registered(listener):
        return  # installed, and handed in as well
    known = [name for name in vars(hookspecs) if name.startswith("on_")]
    for name, options in _find_hookimpls(listener):
        if name in known or options.get("optionalhook"):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise PluginTypeError(f"{label}: there is no hook {name!r}; {hint}")
    try:
        # Two objects may carry the same label, so the name of a plugin needs its id as well.
        manager.register(listener, name=f"{label} #{id(listener)}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginTypeError(f"{label}: {error}") from error
