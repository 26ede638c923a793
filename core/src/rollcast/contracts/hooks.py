"""Hooks: events of a run that a plugin can listen to, and the manager that calls the listeners.

A listener is a module, an object or a class (created without arguments) with functions of the
names below, marked ``@hookimpl`` and registered in the entry-point group ``rollcast.hooks``. A
function may omit arguments that it does not need. An event can have any number of listeners; to
choose one of several plugins, use the registry of its group.

An exception in a listener stops the run, with a message that names the listener, so a listener must catch exceptions
that should not.

Example::

    from rollcast.contracts.hooks import hookimpl

    @hookimpl
    def on_step_end(step, metrics):
        append_to_my_log(step, metrics)
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import pluggy

from rollcast.contracts.runtime import Runtime
from rollcast.errors import PluginError, PluginTypeError, RollcastError
from rollcast.plugins import Registry

PROJECT = "rollcast"

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks a function as the specification of a hook."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as an implementation of a hook."""

_log = logging.getLogger("rollcast.plugins")

# DataProto imports torch, which a listener may not need, so the batch is only named here.
Trainer: TypeAlias = Any
Batch: TypeAlias = Any
Config: TypeAlias = Any


@hookspec
def on_configure(config: Config) -> None:
    """Called when the configuration is complete and checked, before any worker exists.

    Args:
        config: the whole configuration, read-only.
    """


@hookspec
def on_start_workers(workers: MutableMapping[Any, Any], runtime: Runtime) -> None:
    """Called when the worker classes of a run are chosen, before the workers start.

    Args:
        workers: role to ``ClassWithInitArgs``; a listener may replace a class by one with other options.
        runtime: the runtime that starts the processes.
    """


@hookspec
def on_fit_start(trainer: Trainer) -> None:
    """Called before the first step, when the workers have started and the checkpoint, if any, is loaded.

    Args:
        trainer: the trainer whose ``fit`` runs.
    """


@hookspec
def on_fit_end(trainer: Trainer, error: BaseException | None) -> None:
    """Called when ``fit`` ends, exactly once for each ``on_fit_start``.

    Args:
        trainer: the trainer whose ``fit`` ran.
        error: the exception that ended ``fit``; None if ``fit`` completed.
    """


@hookspec
def on_step_start(trainer: Trainer, step: int) -> None:
    """Called when a training step begins.

    Args:
        trainer: the trainer.
        step: number of the step, from 1; a resumed run continues the count.
    """


@hookspec
def on_step_end(trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
    """Called when a training step is complete, including its validation and checkpoint.

    Args:
        trainer: the trainer.
        step: number of the step.
        metrics: all metrics of the step, name to value.
    """


@hookspec
def on_batch_after_rollout(trainer: Trainer, step: int, batch: Batch) -> None:
    """Called when the responses of a step are generated.

    Args:
        trainer: the trainer.
        step: number of the step.
        batch: the ``DataProto`` with prompts and responses; must not be changed.
    """


@hookspec
def on_batch_after_reward(trainer: Trainer, step: int, batch: Batch) -> None:
    """Called when the rewards of a step are computed.

    Args:
        trainer: the trainer.
        step: number of the step.
        batch: the ``DataProto`` with ``token_level_scores``; must not be changed.
    """


@hookspec
def on_batch_after_advantage(trainer: Trainer, step: int, batch: Batch) -> None:
    """Called when the advantages of a step are computed, before the updates.

    Args:
        trainer: the trainer.
        step: number of the step.
        batch: the ``DataProto`` with ``advantages`` and ``returns``; must not be changed.
    """


@hookspec
def on_metrics(trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
    """Called when metrics are ready to be written; trackers listen to this hook.

    Args:
        trainer: the trainer.
        step: number of the step that the metrics belong to.
        metrics: name to value.
    """


@hookspec
def on_validation_end(
    trainer: Trainer,
    step: int,
    metrics: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    """Called when a validation is complete.

    Args:
        trainer: the trainer.
        step: number of the step after which the validation ran; 0 before training.
        metrics: name to value.
        samples: a selection of the validated samples, for display.
    """


@hookspec
def on_checkpoint_saved(trainer: Trainer, step: int, path: str) -> None:
    """Called when a checkpoint is complete on disk.

    Args:
        trainer: the trainer.
        step: number of the step whose state the checkpoint contains.
        path: folder of the checkpoint.
    """


@hookspec
def on_recovery(trainer: Trainer, step: int, message: str) -> None:
    """Called when a run continues after it lost processes, after the ``on_fit_start`` of the new attempt.

    The failed attempt has ended with ``on_exception`` and ``on_fit_end``, and trackers are created anew with
    ``step`` as their ``start_step``.

    Args:
        trainer: the trainer that continues.
        step: number of completed training steps, as of the loaded checkpoint; 0 without a checkpoint.
        message: text with the number of recoveries so far, the cause of this one and the lost processes.
    """


@hookspec
def on_exception(trainer: Trainer, error: BaseException) -> None:
    """Called when an exception is about to leave ``fit``, before ``on_fit_end``.

    Args:
        trainer: the trainer.
        error: the exception.
    """


def _is_listener(obj: object) -> str | None:
    if any(True for _ in _find_hookimpls(obj)):
        return None
    return "has no function that is marked with rollcast.contracts.hooks.hookimpl"


def find_hook_mistake(listener: object) -> str | None:
    """Return why a listener would miss an event, as a text that completes "it …"; None if nothing shows it.

    Found are marked functions of an unknown hook or with an unknown argument, and functions that are named like a
    hook and not marked. A function marked ``optionalhook`` may listen to a hook that does not exist.

    Args:
        listener: module, object or class; nothing of it runs.
    """
    known = {
        name: inspect.signature(function).parameters for name, function in globals().items() if name.startswith("on_")
    }
    for attribute, event, options in _find_hookimpls(listener):
        if event not in known:
            if options.get("optionalhook"):
                continue
            near = difflib.get_close_matches(event, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
            return f"listens to {event!r}, but there is no such hook; {hint}"
        unknown = [name for name in _required_arguments(listener, attribute) if name not in known[event]]
        if unknown:
            return f"listens to {event!r} with the argument {unknown[0]!r}; the hook has: {', '.join(known[event])}"
    for name in known:
        member = inspect.getattr_static(listener, name, None)
        if inspect.isfunction(member) and not hasattr(member, f"{PROJECT}_impl"):
            return f"has a function {name}, which is never called: mark it with rollcast.contracts.hooks.hookimpl"
    return None


def _required_arguments(listener: object, attribute: str) -> list[str]:
    """Return the arguments that pluggy passes to a hook implementation by name; those with a default are left alone."""
    member = inspect.getattr_static(listener, attribute)
    function = getattr(member, "__func__", member)
    parameters = list(inspect.signature(function).parameters.values())
    is_own = not isinstance(listener, type) and attribute in getattr(listener, "__dict__", {})
    if not is_own and not isinstance(member, staticmethod) and not inspect.ismethod(member):
        parameters = parameters[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in positional and parameter.default is parameter.empty
    ]


hooks: Registry[Any] = Registry(
    "rollcast.hooks", _is_listener, description="listeners to the events of a run", probe=find_hook_mistake
)


def build_hook_manager(extra: Iterable[object] = (), without: Collection[str] = ()) -> pluggy.PluginManager:
    """Return a hook manager with every installed listener and the listeners in ``extra``.

    An installed listener that cannot be loaded is logged as a warning and left out, because the run
    did not request it by name. A listener for an event that does not exist is an error, because it
    would never be called.

    Args:
        extra: more listeners: modules, objects, or classes to be created without arguments.
        without: names of installed listeners to leave out; an unknown name is logged as a warning.

    Returns:
        The manager; ``manager.hook.on_step_end(trainer=…, step=…, metrics=…)`` calls a hook.

    Raises:
        PluginTypeError: a listener implements an unknown hook, a hook with an unknown argument or
            no hook at all, or a class in ``extra`` could not be created.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(sys.modules[__name__])
    names = hooks.names()
    added: list[object] = []
    for unknown in sorted(set(without) - set(names)):
        _log.warning("no hooks %r to leave out; installed: %s", unknown, ", ".join(names) or "none")
    for name in (name for name in names if name not in without):
        owner = f"hooks {name!r}"
        try:
            owner += f" of {hooks.find(name)}"
            listener = _create(hooks.get(name))
        except PluginError as error:
            _log.warning("left out the hooks %r: %s", name, error)
        except Exception as error:  # noqa: BLE001  # the listener's own constructor
            _log.warning("left out the %s: %r", owner, error, exc_info=error)
        else:
            _check(listener, owner)
            # An installed listener is a stranger's: its errors say who raised them.
            manager.register(_Named(listener, owner), name=owner)
            added.append(listener)
    for hook in extra:
        owner = f"extra hooks {getattr(hook, '__name__', None) or f'of type {type(hook).__qualname__}'}"
        complaint = _is_listener(hook)
        if complaint is not None:
            raise PluginTypeError(f"{owner}: it {complaint}")
        try:
            listener = _create(hook)
        except Exception as error:
            raise PluginTypeError(f"{owner} could not be created: {error!r}") from error
        if any(listener is other for other in added):
            continue  # installed, or passed in twice
        _check(listener, owner)
        # Two objects may have the same owner, so the name of a registration needs its id as well.
        manager.register(listener, name=f"{owner} #{id(listener)}")
        added.append(listener)
    return manager


def _create(listener: Any) -> object:
    # pluggy would register the functions of a class unbound, with `self` as a hook argument.
    return listener() if isinstance(listener, type) else listener


def _find_hookimpls(obj: object) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield attribute, hook and options of each marked function."""
    for name in dir(obj):
        # getattr would run the object's properties; getattr_static does not.
        member = inspect.getattr_static(obj, name, None)
        member = getattr(member, "__func__", member)
        options = getattr(member, f"{PROJECT}_impl", None)
        if isinstance(options, dict):
            yield name, options.get("specname") or name, options


def _check(listener: object, owner: str) -> None:
    mistake = find_hook_mistake(listener)
    if mistake is not None:
        raise PluginTypeError(f"{owner}: it {mistake}")


class _Named:
    """The hook implementations of an installed listener, with errors that name it.

    Attributes are those of the listener that are marked. A hook wrapper is passed on as it is: its errors are those of
    the listeners within it.
    """

    def __init__(self, listener: object, owner: str) -> None:
        for attribute, event, options in _find_hookimpls(listener):
            function = getattr(listener, attribute)
            wraps = options.get("hookwrapper") or options.get("wrapper")
            setattr(self, attribute, function if wraps else _naming(function, owner, event))


def _naming(function: Callable[..., Any], owner: str, event: str) -> Callable[..., Any]:
    @functools.wraps(function)  # pluggy reads mark and argument names
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RollcastError:  # raised on purpose; its kind decides what the run does
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise PluginError(
                f"{owner} failed in {event}: {reason}\n"
                "Fix or uninstall it, or leave it out with disabled_hooks=[NAME]; --traceback shows where it failed"
            ) from error

    return named
