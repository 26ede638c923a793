"""The data of a run: batches of training prompts, and validation prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from rollcast.contracts.storage import fetch_files
from rollcast.errors import ConfigError, DataError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset, datasets
from rollcast_data.loader import EpochIterator, FirstRows, build_loader
from rollcast_serving.contracts.generator import dataset_name

if TYPE_CHECKING:
    from rollcast_trainer.run.settings import RunSettings

__all__ = ["Prompts", "build_dataset", "train_batches", "val_batches"]


def build_dataset(settings: RunSettings, key: str, name: str, **changes: Any) -> BaseDataset:
    """Return a dataset over the files of a config key, with the run's settings.

    Args:
        settings: settings of the run.
        key: ``train_files`` or ``val_files``.
        name: registry name of the dataset.
        **changes: keys of the ``data`` section to override.
    """
    section = {**cast("dict[str, Any]", OmegaConf.to_container(settings.config.data)), **changes}
    files = fetch_files(getattr(settings.data, key), f"data.{key}")
    dataset_class = cast("Any", datasets.get(dataset_name(name, settings.config)))
    return cast("BaseDataset", dataset_class(files, settings.tokenizer, section))


def train_batches(settings: RunSettings) -> EpochIterator:
    """Return an endless iterator of training batches with ``data.train_batch_size`` rows.

    Raises:
        ConfigError, DataError: there are no files, or they hold less than one batch.
    """
    data = settings.data
    if not data.train_files:
        raise ConfigError("data.train_files is empty; list at least one JSONL or Parquet file")
    with _naming("data.train_files"):
        dataset = build_dataset(settings, "train_files", data.dataset)
    with _naming("data.train_batch_size"):
        seed = settings.trainer.seed
        return EpochIterator(build_loader(dataset, data.train_batch_size, data.shuffle, seed, True, data.num_workers))


def val_batches(settings: RunSettings, name: str, **changes: Any) -> list[DataProto]:
    """Return the validation prompts in batches; empty without ``data.val_files``.

    Args:
        settings: settings of the run.
        name: registry name of a dataset of prompts.
        **changes: keys of the ``data`` section to override.

    Raises:
        DataError: a file or row is missing or malformed.
    """
    data = settings.data
    if not data.val_files:
        return []
    with _naming("data.val_files"):
        rows = FirstRows(build_dataset(settings, "val_files", name, **changes), data.val_max_samples)
        size = min(data.val_batch_size or len(rows), len(rows))
        return list(build_loader(rows, size, False, settings.trainer.seed, drop_last=False))


class Prompts:
    """Batches of training prompts, with the data position before the last batch.

    Args:
        batches: batches of the run's dataset.
    """

    def __init__(self, batches: EpochIterator) -> None:
        self._batches = batches
        #: Position before the last drawn batch.
        self.position: Mapping[str, Any] = batches.state_dict()

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in a pass over the data."""
        return self._batches.batches_per_epoch

    def draw(self) -> DataProto:
        """Return the next batch."""
        self.position = self._batches.state_dict()
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last drawn batch, as JSON."""
        return self._batches.state_dict()

    def load_state_dict(self, position: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            CheckpointError: the position does not belong to this data.
        """
        self._batches.load_state_dict(position)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Prefix data errors of the block with the config key that they come from."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
