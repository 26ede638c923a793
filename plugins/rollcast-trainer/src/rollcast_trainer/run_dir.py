"""The run directory: where it starts from, its config, and its checkpoints."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcast.config.sources import flatten
from rollcast.errors import CheckpointError, ConfigError

__all__ = ["Checkpoints", "prepare_run_dir"]

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d+)")
#: Keys that may differ between a run and its continuation.
_FREE = (
    "run_dir",
    "trackers",
    "runtime",
    "placement",
    "trainer.total_steps",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.resume_mode",
    "trainer.export",
    "trainer.stop_at_accuracy",
)


class Checkpoints:
    """Checkpoints ``step_N`` under a folder, each complete or absent.

    Args:
        folder: ``<run_dir>/checkpoints``.
        keep: how many are kept, the newest; -1 for all.
    """

    def __init__(self, folder: Path, keep: int = -1) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step: int) -> Path:
        """Folder of a complete checkpoint."""
        return self.folder / f"step_{step}"

    @contextmanager
    def writing(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """A temporary folder to write into; it takes its final name when the block ends well.

        Args:
            state: the trainer's own state, written as ``trainer.json``.

        Raises:
            CheckpointError: something could not be written; older checkpoints are untouched.
        """
        temporary = self.folder / f".writing-step_{step}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            with open(temporary / "trainer.json", "w") as file:
                json.dump(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
            final = self.path(step)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; "
                f"complete ones: {self.steps() or 'none'}"
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()

    def load_state(self, step: int) -> dict[str, Any]:
        """The trainer's own state of a checkpoint."""
        file = self.path(step) / "trainer.json"
        try:
            state = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.path(step)} has no readable trainer.json: {error}") from error
        return dict(state)

    def _prune(self) -> None:
        if self.keep > 0:
            for step in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(step))


def prepare_run_dir(run_dir: Path, config: Mapping[str, Any], resume_mode: str) -> int:
    """Make the directory ready and say which step the run goes on from (0 for a fresh one).

    Raises:
        ConfigError: unknown ``resume_mode``, or the directory holds a run with other settings.
    """
    if resume_mode not in ("auto", "disable"):
        raise ConfigError(f"trainer.resume_mode is {resume_mode!r}; valid: auto, disable")
    checkpoints = Checkpoints(run_dir / "checkpoints")
    steps = checkpoints.steps()
    if resume_mode == "disable":
        _set_aside(run_dir)
        steps = []
    elif steps:
        _check_same_run(run_dir, config)
    run_dir.mkdir(parents=True, exist_ok=True)
    for left in checkpoints.folder.glob(".writing-*"):
        shutil.rmtree(left)
    return steps[-1] if steps else 0


def _set_aside(run_dir: Path) -> None:
    if not (run_dir / "config.yaml").exists():
        return
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    os.replace(run_dir, aside)
    logger.info("%s held an earlier run; it is now %s", run_dir, aside)


def _check_same_run(run_dir: Path, config: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    file = run_dir / "config.yaml"
    if not file.exists():
        return
    before = flatten(OmegaConf.to_container(OmegaConf.load(file)))
    now = flatten(dict(config))
    different = [
        f"{key}: {before.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in _FREE)
    ]
    if different:
        raise ConfigError(
            f"run_dir={run_dir} holds checkpoints of a run with other settings ({'; '.join(different[:5])}). "
            "Choose another run_dir, or trainer.resume_mode=disable to set that run aside and start anew"
        )
