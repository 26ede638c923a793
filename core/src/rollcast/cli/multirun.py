"""``rollcast train --multirun``, which trains a run for each combination of a sweep's values."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rollcast.cli.terminal import interrupted, run_process
from rollcast.errors import ConfigError, RollcastError

__all__ = ["train_each"]

logger = logging.getLogger(__name__)


def train_each(overrides: Sequence[str], config_dir: Path | None, options: Sequence[str]) -> None:
    """Train a run for each combination of values, one after the other, each in a process of its own.

    A run's folder is named after its swept overrides and lies below the combination's ``run_dir``, so the same command
    continues a sweep that was interrupted. All configurations are composed before the first run starts. A run that
    fails does not stop the others.

    Args:
        overrides: Overrides, of which some have several values.
        config_dir: Folder of further config groups, searched first.
        options: Options of ``rollcast train`` for each run.

    Raises:
        ConfigError: A combination's configuration is invalid; names the combination.
        KeyboardInterrupt: A signal stopped a run.
        RollcastError: Runs failed; names them.
    """
    runs = _compose_each(overrides, config_dir)
    failed = []
    for number, (swept, run) in enumerate(runs, start=1):
        logger.info("run %d of %d: %s", number, len(runs), swept)
        code = run_process([sys.executable, "-m", "rollcast", "train", *options, *run])
        if interrupted():
            raise KeyboardInterrupt(f"interrupted in run {number} of {len(runs)}; the same command continues it")
        if code:
            failed.append(f"{swept} (exit code {code})")
    if failed:
        raise RollcastError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")


def _compose_each(overrides: Sequence[str], config_dir: Path | None) -> list[tuple[str, list[str]]]:
    """Return each combination's swept overrides as text, and all overrides of its run."""
    from rollcast.config.launch import prepare
    from rollcast.config.overrides import expand_sweeps, format_override

    runs = []
    for combination in expand_sweeps(overrides):
        swept = shlex.join(combination.swept) or "no key has several values"
        try:
            run_dir = Path(prepare(combination.overrides, config_dir).config.run_dir)
        except ConfigError as error:
            raise ConfigError(f"{swept}: {error}") from error
        runs.append((swept, [*combination.overrides, format_override("run_dir", str(run_dir / combination.folder))]))
    return runs
