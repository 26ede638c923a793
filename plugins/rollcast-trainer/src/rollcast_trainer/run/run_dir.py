"""The run directory: its config, its checkpoints, and the step that a run resumes from."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcast.contracts.config import flatten
from rollcast.contracts.files import replace_file
from rollcast.errors import CheckpointError, ConfigError, WorkerError
from rollcast_trainer.run.run_lock import RunLock

__all__ = [
    "CONFIG_FILE",
    "Checkpoints",
    "check_same_run",
    "differing_settings",
    "lock_run_dir",
    "prepare_run_dir",
    "read_config",
    "replacing_folder",
    "write_config",
]

CONFIG_FILE = "config.yaml"

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED = ".unfinished-"
#: File beside the checkpoints that names the newest.
LATEST = "latest"
#: Types of the values in ``trainer.json``, and the keys that a resumed run needs.
_STATE: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    "data": (dict,),
    "best_accuracy": (float, int, type(None)),
    "accuracy": (float, int, type(None)),
    "trainer": (dict,),
    "stages": (dict,),
}
_NEEDED = ("data", "best_accuracy")
#: Keys that may differ between a run and its continuation.
_FREE = (
    "run_dir",
    "trackers",
    "tracker_kwargs",
    "disabled_hooks",
    "runtime",
    "placement",
    "profiler",
    "data.num_workers",
    "reward.timeout_s",
    "reward.on_error",
    "reward.max_bad_share",
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.log_prob_micro_batch_size_per_gpu",
    "actor.use_dynamic_bsz",
    "actor.ppo_max_token_len_per_gpu",
    "ref.engine.param_offload",
    "rollout.canary",
    "rollout.replica",
    "rollout.sync_folder",
    "rollout.sync_timeout_s",
    "rollout.update_weights_bucket_megabytes",
    "trainer.balance_batch",
    "trainer.total_steps",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.log_val_generations",
    "trainer.max_ckpt_to_keep",
    "trainer.max_recoveries",
    "trainer.on_driver",
    "trainer.keep_best_ckpt",
    "trainer.async_save",
    "trainer.resume_mode",
    "trainer.export",
    "trainer.default_hdfs_dir",
    "model.use_shm",
    "trainer.stop_at",
)


@contextmanager
def replacing_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``final``; it replaces ``final`` if the block succeeds.

    Raises:
        CheckpointError: something could not be written, here or by a worker; ``final`` is unchanged.
    """
    temporary = final.with_name(f"{_UNFINISHED}{final.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        remove_folder(final)
        os.replace(temporary, final)
    except (OSError, WorkerError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, WorkerError) and not isinstance(error.__cause__, OSError):
            raise
        reason = error.__cause__ if isinstance(error, WorkerError) else error
        raise CheckpointError(f"{final} could not be written: {reason}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete ``folder`` if it exists. The folder is renamed first, so that a kill midway leaves no partial one."""
    if folder.exists():
        leaving = folder.with_name(f"{_UNFINISHED}removed-{folder.name}")
        shutil.rmtree(leaving, ignore_errors=True)
        os.replace(folder, leaving)
        shutil.rmtree(leaving)


class Checkpoints:
    """Checkpoints ``step_N`` under a folder, each complete or absent.

    Args:
        folder: ``<run_dir>/checkpoints``.
        keep: number of newest checkpoints to keep; -1 keeps all.
        keep_best: also keep the checkpoint with the highest validation accuracy.
    """

    def __init__(self, folder: Path, keep: int = -1, keep_best: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_best = keep_best

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in ascending order."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def path(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        return self.folder / f"step_{step}"

    @contextmanager
    def writing(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """Yield a temporary folder to write into; it gets its final name if the block succeeds.

        Args:
            step: training step of the checkpoint.
            state: the trainer's own state, written as ``trainer.json``. The best checkpoint is chosen by its
                ``accuracy``, which may be None.

        Raises:
            CheckpointError: something could not be written; older checkpoints are unchanged.
        """
        try:
            with replacing_folder(self.path(step)) as temporary:
                yield temporary
                with open(temporary / "trainer.json", "w", encoding="utf-8") as file:
                    json.dump(dict(state), file)
                    file.flush()
                    os.fsync(file.fileno())
        except CheckpointError as error:
            complete = ", ".join(f"step_{saved}" for saved in self.steps()) or "none"
            raise CheckpointError(f"checkpoint: {error}; complete ones: {complete}") from error
        self._point_to(step)
        self._prune()

    def load_state(self, step: int) -> dict[str, Any]:
        """Return the trainer's own state of a checkpoint.

        Raises:
            CheckpointError: ``trainer.json`` cannot be read, or a value in it has a wrong type.
        """
        file = self.path(step) / "trainer.json"
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {self.path(step)} has no readable trainer.json: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{file} has to be an object, this is a {type(state).__name__}")
        for key, kinds in _STATE.items():
            if key in state and not (isinstance(state[key], kinds) and not isinstance(state[key], bool)):
                allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
                raise CheckpointError(f"{file}: {key} has to be {allowed}, this is {state[key]!r:.60}")
        if state.get("step") != step:
            raise CheckpointError(f"{file}: step is {state.get('step')!r}, but the folder belongs to step {step}")
        return state

    def require_state(self, step: int) -> None:
        """Check that a run can resume from a checkpoint, as far as ``trainer.json`` shows.

        Raises:
            CheckpointError: it cannot; the message names the file, the reason and the other checkpoints.
        """
        others = ", ".join(f"step_{saved}" for saved in self.steps() if saved != step) or "none"
        try:
            missing = [key for key in _NEEDED if key not in self.load_state(step)]
            if missing:
                raise CheckpointError(f"{self.path(step) / 'trainer.json'} lacks {', '.join(missing)}")
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Restore the file; or move {self.path(step)} away to resume from the previous checkpoint "
                f"(other ones: {others})"
            ) from error

    def clean(self) -> None:
        """Remove checkpoints that a killed run left half-written or half-deleted."""
        for left in (*self.folder.glob(f"{_UNFINISHED}*"), *self.folder.glob(f".{LATEST}.tmp")):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _point_to(self, step: int) -> None:
        """Write the name of the newest checkpoint into ``latest``, for tools. Call it last, when the checkpoint is
        complete.
        """
        try:
            replace_file(self.folder / LATEST, f"{self.path(step).name}\n")
        except OSError as error:
            raise CheckpointError(f"checkpoint: {self.folder / LATEST} cannot be written: {error}") from error

    def best_step(self) -> int | None:
        """Return the step of the complete checkpoint with the highest accuracy, the newest among equals; None
        without any.
        """
        accuracies = {step: self._accuracy(step) for step in self.steps()}
        rated = [(float(accuracy), step) for step, accuracy in accuracies.items() if accuracy is not None]
        return max(rated)[1] if rated else None

    def _accuracy(self, step: int) -> float | None:
        try:
            accuracy: float | None = self.load_state(step).get("accuracy")
        except CheckpointError as error:  # an unreadable old checkpoint is no reason to end the run
            logger.warning("%s; it counts as a checkpoint without an accuracy", error)
            return None
        return accuracy

    def _prune(self) -> None:
        if self.keep > 0:
            best = self.best_step() if self.keep_best else None
            for step in self.steps()[: -self.keep]:
                if step != best:
                    remove_folder(self.path(step))


def lock_run_dir(run_dir: Path, resume_mode: str) -> RunLock:
    """Create the directory if needed and lock it; with ``disable`` an earlier run in it is set aside first.

    Raises:
        ConfigError: ``run_dir`` is a file.
        ResourceError: another run uses the directory.
        CheckpointError: the directory cannot be created.
    """
    lock = _make_and_lock(run_dir)
    if resume_mode != "disable" or not _holds_anything(run_dir):
        return lock
    try:
        _set_aside(run_dir)
    except OSError as error:
        raise CheckpointError(f"run_dir={run_dir} cannot be set aside: {error}") from error
    finally:
        lock.release()
    return _make_and_lock(run_dir)


def _make_and_lock(run_dir: Path) -> RunLock:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={run_dir} is a file")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"run_dir={run_dir} cannot be made: {error}") from error
    return RunLock(run_dir)


def prepare_run_dir(run_dir: Path, config: Mapping[str, Any]) -> int:
    """Prepare the directory and return the step to resume from, 0 for a fresh run.

    Args:
        run_dir: directory locked by :func:`lock_run_dir`.
        config: the run's whole config.

    Raises:
        ConfigError: the directory holds a run with other settings.
        CheckpointError: the run cannot resume from the newest checkpoint.
    """
    if _holds_a_run(run_dir):
        check_same_run(run_dir, config)
    checkpoints = Checkpoints(run_dir / "checkpoints")
    if checkpoints.folder.exists() and not checkpoints.folder.is_dir():
        raise CheckpointError(f"{checkpoints.folder} is a file; checkpoints are written into a folder of this name")
    checkpoints.clean()
    newest = max(checkpoints.steps(), default=0)
    if newest:
        checkpoints.require_state(newest)
    return newest


def _holds_a_run(run_dir: Path) -> bool:
    # A run that was refused at its start leaves only its config, which may be overwritten.
    return any((run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def _holds_anything(run_dir: Path) -> bool:
    return (run_dir / CONFIG_FILE).exists() or _holds_a_run(run_dir)


def _set_aside(run_dir: Path) -> None:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    os.replace(run_dir, aside)
    logger.info("%s held an earlier run; it is now %s", run_dir, aside)


def check_same_run(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Check that ``config`` continues the run that ``run_dir`` holds.

    Raises:
        ConfigError: keys differ, or the earlier run's config cannot be read; the message names them.
    """
    if not (run_dir / CONFIG_FILE).exists():
        return
    different = differing_settings(read_config(run_dir / CONFIG_FILE), config)
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise ConfigError(
            f"run_dir={run_dir} holds a run with other settings ({'; '.join(different[:5])}{more}). "
            "Choose another run_dir, or trainer.resume_mode=disable to set that run aside and start again"
        )


def differing_settings(earlier: Mapping[str, Any], config: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """Return the keys whose values differ from an earlier run, each with both values; keys that may differ are skipped.

    Args:
        earlier: the earlier run's config.
        config: the run's config.
        free: further keys that may differ.
    """
    before, now = flatten(dict(earlier)), flatten(dict(config))
    old_home, new_home = str(before.get("run_dir", "")), str(now.get("run_dir", ""))
    return [
        f"{key}: {before.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted({*before, *now})
        if not any(key == prefix or key.startswith(f"{prefix}.") for prefix in (*_FREE, *free))
        # Moving a run directory does not make another run of it.
        and _without(before.get(key), old_home) != _without(now.get(key), new_home)
    ]


def read_config(file: Path) -> dict[str, Any]:
    """Return the config of a run.

    Raises:
        ConfigError: the file cannot be read.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{file} of the run in {file.parent} cannot be read: {reason:.200}. Restore the file, remove it to "
            "continue without comparing the settings, or set trainer.resume_mode=disable to set that run aside"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file} of the run in {file.parent} is not a mapping but a {type(config).__name__}. Restore the "
            "file, remove it to continue without comparing the settings, or set trainer.resume_mode=disable"
        )
    return config


def _without(value: Any, run_dir: str) -> Any:
    if isinstance(value, list):
        return [_without(item, run_dir) for item in value]
    if isinstance(value, str) and run_dir and (value == run_dir or value.startswith(f"{run_dir}/")):
        return f"<run_dir>{value[len(run_dir) :]}"
    return value


def write_config(run_dir: Path, text: str) -> None:
    """Write ``config.yaml`` atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    file = run_dir / CONFIG_FILE
    try:
        replace_file(file, text)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from error
