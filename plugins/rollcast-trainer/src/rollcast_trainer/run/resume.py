"""The state of a trainer in a checkpoint, and the model that a finished run exports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast import WorkerGroup
from rollcast.errors import CheckpointError
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.run_dir import replacing_folder
from rollcast_trainer.workers.roles import role_trains

if TYPE_CHECKING:
    from rollcast_trainer.loop import LoopTrainer

__all__ = ["export_model", "read_state", "resume", "trained_groups"]

logger = logging.getLogger(__name__)


def trained_groups(run: Run) -> list[WorkerGroup]:
    """Return the worker groups whose state checkpoints contain."""
    return [group for role, group in run.groups.items() if role_trains(role)]


def read_state(trainer: LoopTrainer) -> dict[str, Any]:
    """Return the state of a trainer, its stages and its data for ``trainer.json``."""
    run = trainer.run
    states = {place.name: stage.state_dict() for place, stage in zip(run.settings.places, run.stages, strict=True)}
    return {
        "step": trainer.step,
        "data": run.prompts.state_dict(),
        "best_accuracy": trainer.best_accuracy if trainer.best_accuracy > float("-inf") else None,
        "accuracy": trainer.metrics.get("val/accuracy"),
        "stop_at": trainer.goal.state_dict(),
        "trainer": trainer.state_dict(),
        "stages": {name: state for name, state in states.items() if state},
    }


def resume(trainer: LoopTrainer, step: int) -> None:
    """Restore the trainer, its stages, its data and its trained models from a checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read; the message names the key.
    """
    run = trainer.run
    state, path = run.checkpoints.load_state(step), run.checkpoints.path(step)
    run.prompts.load_state_dict(state["data"])
    if state["best_accuracy"] is not None:
        trainer.best_accuracy = float(state["best_accuracy"])
    states = state.get("stages", {})
    for place, stage in zip(run.settings.places, run.stages, strict=True):
        if place.name in states:
            with _naming_state(step, f"stages.{place.name}"):
                stage.load_state_dict(states[place.name])
    with _naming_state(step, "stop_at"):
        trainer.goal.load_state_dict(state.get("stop_at", {}))
    with _naming_state(step, "trainer"):
        trainer.load_state_dict(state.get("trainer", {}))
    for group in trained_groups(run):
        group.load_checkpoint(str(path.resolve()))
    run.completed = step
    logger.info("resumed from %s", path)


@contextmanager
def _naming_state(step: int, key: str) -> Iterator[None]:
    """Re-raise an error from a state of the wrong shape with the checkpoint and the key in its ``trainer.json``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"trainer.json of checkpoint step_{step}: {key} cannot be restored: {reason}") from error


def export_model(run: Run) -> Path:
    """Write the actor as a Hugging Face folder, atomically, and return the folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    target = run.settings.run_dir / "export"
    with replacing_folder(target) as folder:
        run.actor.group.export(str(folder.resolve()))
    return target
