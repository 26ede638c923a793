"""Recorded rollouts: a run writes those of each step (``runtime.record_trajectories``) and another can train on
them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.files import replace_file
from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import ConfigError, DataProtoError
from rollcast.protocol import DataProto
from rollcast_serving.manager import Stragglers
from rollcast_serving.sampler import Sampler
from rollcast_trainer.run.run_dir import CONFIG_FILE, differing_settings, read_config
from rollcast_trainer.run.supply import Place

if TYPE_CHECKING:
    from rollcast_trainer.run.settings import RunSettings

__all__ = [
    "FOLDER",
    "RolloutRecord",
    "StoppedSampler",
    "fingerprints",
    "recorded_columns",
]

logger = logging.getLogger(__name__)
#: Folder of a record in its run directory, and the index file in it that identifies model and tokenizer.
FOLDER, INDEX_FILE = "rollouts", "index.json"
_VERSION = 1
_STEP = re.compile(r"step_(\d+)\.batch")
#: Meta-info key of a recorded batch that holds the metrics of the recorded stages.
_METRICS = "metrics"
#: Suffix of metrics that say how fast a stage was; they are not recorded.
_RATES = "_per_s"
#: Bytes at the start of each weight file that its fingerprint covers, besides its size.
_HEAD = 1 << 20
#: Keys that may differ between a recorded run and its replay, besides those that may differ on resume.
_FREE = ("trainer.replay", "data.val_files", "data.val_batch_size", "data.val_max_samples", "trainer.val_before_train")


def fingerprints(settings: RunSettings) -> dict[str, str]:
    """Return digests of ``tokenizer`` and ``model``, which a record depends on besides its configuration.

    A weight file is covered by its name, its size and its first MiB.
    """
    tokenizer = settings.tokenizer
    known = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids), list(settings.stop_token_ids)]
    model = hashlib.sha256()
    folder = Path(settings.model.path)
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.suffix in (".safetensors", ".bin") or file.name == "config.json":
            model.update(f"{file.name}:{file.stat().st_size}:".encode())
            with file.open("rb") as content:
                model.update(content.read(_HEAD))
    return {"tokenizer": hashlib.sha256(json.dumps(known).encode()).hexdigest(), "model": model.hexdigest()}


class RolloutRecord:
    """Recorded rollouts of a run: one file per step, and an index.

    Args:
        run_dir: run directory of the recorded run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / FOLDER

    def steps(self) -> list[int]:
        """Return the recorded steps in ascending order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for file in self.folder.iterdir() if (match := _STEP.fullmatch(file.name)))

    def _file(self, step: int) -> Path:
        return self.folder / f"step_{step}.batch"

    # -- writing ------------------------------------------------------------------------------

    def begin(self, prints: Mapping[str, str], start_step: int) -> None:
        """Write the index, and delete recorded steps after ``start_step``, which the run will write again.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for step in self.steps():
            if step > start_step:
                self._file(step).unlink()
        index = {"version": _VERSION, **prints}
        replace_file(self.folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")

    def write(self, step: int, batch: DataProto, metrics: Mapping[str, float]) -> None:
        """Write the batch of a step atomically.

        Raises:
            DataProtoError: an object column is not JSON.
            OSError: the file cannot be written.
        """
        finite = {name: value for name, value in metrics.items() if math.isfinite(value) and not name.endswith(_RATES)}
        whole = batch.local()
        whole.meta_info = {_METRICS: finite}
        whole.save(self._file(step))

    # -- reading ------------------------------------------------------------------------------

    def read(self, step: int) -> tuple[DataProto, dict[str, float]]:
        """Return the batch of a step, and the metrics of the stages that produced it.

        Raises:
            ConfigError: the step is not recorded, or its file is damaged.
        """
        try:
            batch = DataProto.load(self._file(step))
        except (OSError, DataProtoError) as error:
            raise ConfigError(f"trainer.replay={self.run_dir}: step {step} cannot be read: {error}") from error
        metrics = dict(batch.meta_info.pop(_METRICS, {}))
        return batch, metrics

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Check that the replay has the settings of the recorded run.

        Raises:
            ConfigError: there is no record, or keys differ; the message names them.
        """
        if not (self.folder / INDEX_FILE).is_file():
            raise ConfigError(
                f"trainer.replay={self.run_dir} holds no record of rollouts ({FOLDER}/{INDEX_FILE} is missing); use "
                "the run directory of a run with runtime.record_trajectories=true"
            )
        different = differing_settings(read_config(self.run_dir / CONFIG_FILE), config, _FREE)
        if different:
            more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
            raise ConfigError(
                f"trainer.replay={self.run_dir} was recorded with other settings ({'; '.join(different[:5])}{more}). "
                "Start the replay with the recorded run's settings"
            )

    def check_parts(self, prints: Mapping[str, str], model_path: str) -> None:
        """Check that the replay uses the tokenizer and model of the recorded run.

        Raises:
            ConfigError: the tokenizer or the model differs.
        """
        index = self._index()
        different = [name for name, digest in prints.items() if index.get(name) != digest]
        if different:
            raise ConfigError(
                f"trainer.replay={self.run_dir} was recorded with another {' and another '.join(different)} than "
                f"model.path={model_path} has now; use the one that the recorded run started from"
            )

    def check_steps(self, first: int, last: int) -> None:
        """Check that all steps from ``first`` to ``last`` are recorded.

        Raises:
            ConfigError: a step is missing; the message names the first one and the recorded range.
        """
        steps = self.steps()
        missing = sorted({*range(first, last + 1)}.difference(steps))
        if missing:
            there = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
            raise ConfigError(
                f"trainer.replay={self.run_dir} has {there}, but this run trains steps {first} to {last}, and step "
                f"{missing[0]} is not recorded; set trainer.total_steps to at most {missing[0] - 1}, or record a run "
                "that is as long"
            )

    def _index(self) -> dict[str, Any]:
        file = self.folder / INDEX_FILE
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"trainer.replay={self.run_dir}: {file} cannot be read: {error}") from error
        if not isinstance(index, dict) or index.get("version") != _VERSION:
            raise ConfigError(f"trainer.replay={self.run_dir}: {file} is not an index of version {_VERSION}")
        return index


class StoppedSampler(Sampler):
    """Sampler of a replay: it ignores weights and refuses to generate."""

    def generate(self, prompts: DataProto, sampling: SamplingParams, stragglers: Stragglers | None = None) -> DataProto:
        raise ConfigError(
            "trainer.replay trains on recorded rollouts and starts no rollout, but a stage of this run generates; "
            "remove the stage by trainer.stages.remove, or declare it with is_recorded=True and record again"
        )

    def sync(self, version: int) -> dict[str, float]:
        return {}


def recorded_columns(batch: DataProto, places: Sequence[Place]) -> list[str]:
    """Return the columns to record: tensors that no later stage writes, and objects that a later stage reads."""
    later = [place.spec for place in places if not place.spec.is_recorded]
    computed = {name for spec in later for name in spec.writes}
    computed -= {name for place in places if place.spec.is_recorded for name in place.spec.writes}
    read = {name for spec in later for name in (*spec.reads, *spec.optional)}
    return [name for name, dtype in batch.dtypes().items() if _is_kept(name, dtype is object, computed, read)]


def _is_kept(name: str, is_object: bool, computed: Collection[str], read: Collection[str]) -> bool:
    return name not in computed and (not is_object or name in read)
