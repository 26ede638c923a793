"""``rollcast train``, which runs a trainer on a composed configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from rollcast.cli.multirun import train_each
from rollcast.cli.terminal import interrupted
from rollcast.contracts.command import ConfigDir, Overrides, Traceback, record_command
from rollcast.contracts.files import find_newest_checkpoint
from rollcast.errors import ResourceError, RollcastError, WorkerError

__all__ = ["train"]

logger = logging.getLogger(__name__)


Multirun = Annotated[
    bool,
    typer.Option(
        "--multirun",
        "-m",
        help="Train a run for each combination of values such as trainer.seed=1,2, one after the other, each in a "
        "folder of run_dir.",
    ),
]


def train(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    multirun: Multirun = False,
    _traceback: Traceback = False,
) -> None:
    """Train a model.

    Arguments are Hydra overrides, such as recipe=quickstart trainer.seed=1 run_dir=runs/x;
    'rollcast config' with the same arguments shows every key. A run continues from the newest checkpoint in its
    run_dir. Ctrl-C stops the workers; a second Ctrl-C exits at once.
    """
    from rollcast.config.launch import launch, prepare

    options = [] if config_dir is None else ["--config-dir", str(config_dir)]
    if multirun:
        train_each(overrides or (), config_dir, options)
        return
    composed = prepare(overrides or (), config_dir)
    run_dir = Path(composed.config.run_dir)
    record_command(["train", *options, *(overrides or ())])
    try:
        result = launch(composed)
    except BaseException as error:
        if interrupted() or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted; {_describe_newest(run_dir)}") from error
        lost = isinstance(error, WorkerError) and not isinstance(error.__cause__, RollcastError)
        if (lost or isinstance(error, ResourceError)) and find_newest_checkpoint(run_dir) is not None:
            logger.info("%s", _describe_newest(run_dir))
        raise
    logger.info("trained to step %d; everything is in %s", result.step, result.run_dir)


def _describe_newest(run_dir: Path) -> str:
    newest = find_newest_checkpoint(run_dir)
    if newest is None:
        return "there is no checkpoint yet (trainer.save_freq says how often one is written)"
    return f"the last checkpoint is {newest}, and the same command goes on from it"
