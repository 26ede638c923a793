"""A run started from Python, by the same steps as ``rollcast train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollcast.config.assembly import Composed, compose
from rollcast.contracts.command import hide_library_bars
from rollcast.contracts.trainer import RunResult, trainers

__all__ = ["launch", "prepare", "train"]


def train(overrides: Sequence[str] = (), config_dir: Path | None = None) -> RunResult:
    """Run a trainer to its end, as ``rollcast train`` does, and return the result.

    The call blocks. A run continues from the newest checkpoint in its ``run_dir``. KeyboardInterrupt, which a
    notebook's stop button raises, ends the workers. Progress is shown by the tracker ``console``; log messages go
    where the caller's ``logging`` sends them.

    Args:
        overrides: Hydra overrides, such as ``recipe=quickstart`` and ``trainer.seed=1``; one string each, unquoted.
        config_dir: Folder of further config groups, searched first.

    Raises:
        RollcastError: A problem that the user can solve, explained by its message.
    """
    return launch(prepare(overrides, config_dir))


def prepare(overrides: Sequence[str], config_dir: Path | None) -> Composed:
    """Compose a run's configuration and load its plugins, so that a broken one is found before minutes of start-up."""
    composed = compose(overrides, config_dir, needs_trainer=True)
    composed.load_plugins()
    return composed


def launch(composed: Composed) -> RunResult:
    """Run the trainer that a configuration names."""
    hide_library_bars()
    return trainers.get(composed.config.trainer.name).launch(composed.config)
