"""The events that a plugin can listen to, and the markers for doing so.

A listener is a module, an object or a class (which is then created without arguments) with
functions of these names, marked ``@hookimpl``, announced in the entry-point group
``rollcast.hooks``. A listener may leave out arguments that it does not need. Hooks are for events
with any number of listeners; to choose a part, use the registry of its group.

An error that a listener raises stops the run: a listener that may fail has to catch it.

Example::

    from rollcast.plugins import hookimpl

    @hookimpl
    def on_step_end(step, metrics):
        append_to_my_log(step, metrics)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pluggy

PROJECT = "rollcast"

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks a function as the specification of a hook."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as an implementation of a hook."""

# The contracts live on floors above this one, so they are known here by name only.
Trainer: TypeAlias = Any
Batch: TypeAlias = Any
Config: TypeAlias = Any
CliApp: TypeAlias = Any


@hookspec
def on_configure(config: Config) -> None:
    """The configuration is complete and checked; no worker exists yet.

    Args:
        config: the whole configuration, read-only.
    """


@hookspec
def on_fit_start(trainer: Trainer) -> None:
    """Workers are up and a checkpoint, if any, is loaded; the first step comes next.

    Args:
        trainer: the trainer whose ``fit`` runs.
    """


@hookspec
def on_fit_end(trainer: Trainer, error: BaseException | None) -> None:
    """``fit`` is over. Called exactly once for each ``on_fit_start``.

    Args:
        trainer: the trainer whose ``fit`` ran.
        error: what ended it, or None if it ran to its end.
    """


@hookspec
def on_step_start(trainer: Trainer, step: int) -> None:
    """A training step begins.

    Args:
        trainer: the trainer.
        step: number of the step, from 1; a resumed run goes on counting.
    """


@hookspec
def on_step_end(trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
    """A training step is complete, its validation and checkpoint included.

    Args:
        trainer: the trainer.
        step: number of the step.
        metrics: everything that was measured in the step.
    """


@hookspec
def on_batch_after_rollout(trainer: Trainer, step: int, batch: Batch) -> None:
    """The responses of a step are generated.

    Args:
        trainer: the trainer.
        step: number of the step.
        batch: the ``DataProto`` with prompts and responses; not to be changed.
    """


@hookspec
def on_batch_after_reward(trainer: Trainer, step: int, batch: Batch) -> None:
    """The rewards of a step are computed.

    Args:
        trainer: the trainer.
        step: number of the step.
        batch: the ``DataProto`` with ``token_level_scores``; not to be changed.
    """


@hookspec
def on_batch_after_advantage(trainer: Trainer, step: int, batch: Batch) -> None:
    """The advantages of a step are computed; the updates come next.

    Args:
        trainer: the trainer.
        step: number of the step.
        batch: the ``DataProto`` with ``advantages`` and ``returns``; not to be changed.
    """


@hookspec
def on_metrics(trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
    """Metrics are ready to be written; trackers listen to this.

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
    """A validation is complete.

    Args:
        trainer: the trainer.
        step: number of the step after which it ran; 0 before training.
        metrics: name to value.
        samples: some of the validated samples, for people to read.
    """


@hookspec
def on_checkpoint_saved(trainer: Trainer, step: int, path: str) -> None:
    """A checkpoint is complete on disk.

    Args:
        trainer: the trainer.
        step: number of the step whose state it holds.
        path: its folder.
    """


@hookspec
def on_exception(trainer: Trainer, error: BaseException) -> None:
    """An error is about to leave ``fit``; called before ``on_fit_end``.

    Args:
        trainer: the trainer.
        error: the error.
    """


@hookspec
def on_cli(app: CliApp) -> None:
    """The command line has met a command that nobody else provides.

    Listeners are not asked for ``--help`` nor for known commands, which must not wait for their import;
    a part in ``rollcast.commands`` is listed by name and imported only when it is called.

    Args:
        app: a ``typer.Typer`` application, to which commands can be added.
    """
