"""``rollcast train``: run a trainer on a composed configuration."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rollcast.cli.options import ConfigDir, Overrides, Traceback
from rollcast.cli.output import hide_library_bars

if TYPE_CHECKING:
    from rollcast.config import Composed

__all__ = ["check_trainer", "find_newest_checkpoint", "train"]

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d+)")


def train(overrides: Overrides = None, config_dir: ConfigDir = None, _traceback: Traceback = False) -> None:
    """Train a model.

    Arguments are Hydra overrides, such as recipe=quickstart trainer.seed=1 run_dir=runs/x;
    'rollcast config' with the same arguments shows every key. A run goes on from the newest checkpoint
    in its run_dir. Ctrl-C stops the workers; a second one ends at once.
    """
    from rollcast.config import compose
    from rollcast.config.named import load_named
    from rollcast.contracts.trainer import trainers

    composed = compose(overrides or (), config_dir)
    check_trainer(composed, config_dir)
    # A part that cannot be loaded is found here, not after the minutes that come before its first use.
    load_named(composed.config, composed.origins, composed.sections)
    trainer = trainers.get(composed.config.trainer.name)
    run_dir = Path(composed.config.run_dir)
    hide_library_bars()
    try:
        result = trainer.launch(composed.config)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_describe_interrupt(run_dir)) from error
    logger.info("trained to step %d; everything is in %s", result.step, result.run_dir)


def check_trainer(composed: Composed, config_dir: Path | None) -> None:
    """Refuse a configuration without a trainer.

    Raises:
        ConfigError: lists the recipes and trainers that can be chosen.
    """
    from omegaconf import OmegaConf

    from rollcast.config.sources import find_options
    from rollcast.errors import ConfigError

    if OmegaConf.select(composed.config, "trainer.name") is not None:
        return
    choices = {group: ", ".join(find_options(group, config_dir)) for group in ("recipe", "trainer")}
    raise ConfigError(
        "no trainer is chosen: give recipe=... or trainer=...\n"
        f"recipes: {choices['recipe'] or 'none (install a plugin that has some, or give --config-dir)'}\n"
        f"trainers: {choices['trainer'] or 'none (pip install rollcast-trainer)'}"
    )


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step; writing is atomic, so a ``step_N`` is complete."""
    found = [(int(match[1]), path) for path in run_dir.glob("checkpoints/*") if (match := _STEP.fullmatch(path.name))]
    return max(found)[1] if found else None


def _describe_interrupt(run_dir: Path) -> str:
    newest = find_newest_checkpoint(run_dir)
    if newest is None:
        return "interrupted; there is no checkpoint yet (trainer.save_freq says how often one is written)"
    return f"interrupted; the last checkpoint is {newest}, and the same command goes on from it"
