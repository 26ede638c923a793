"""Batches of a dataset in an order that depends only on seed and epoch and resumes exactly.

Example::

    loader = build_loader(dataset, batch_size=64, shuffle=True, seed=1)
    batches = EpochIterator(loader)
    batch = next(batches)                     # a DataProto; the iterator never ends and counts epochs
    saved = json.dumps(batches.state_dict())  # part of a checkpoint
    EpochIterator(build_loader(dataset, batch_size=64, shuffle=True, seed=1)).load_state_dict(json.loads(saved))
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from rollcast.errors import CheckpointError, DataError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset

__all__ = ["EpochIterator", "EpochSampler", "FirstRows", "build_loader"]


class EpochSampler(Sampler[int]):
    """Row numbers in an order that is a function of ``seed`` and ``epoch``.

    Each iteration is one epoch: epoch 0, or the epoch set by :meth:`set_position`. Its iterator saves and
    restores its position, so the loader's own state resumes within an epoch.

    Args:
        length: number of rows.
        shuffle: draw a permutation per epoch; otherwise rows come in order.
        seed: any integer.
    """

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        self._start = 0

    def __len__(self) -> int:
        return self.length

    def set_position(self, epoch: int, start: int = 0) -> None:
        """Start all following iterations at row ``start`` of ``epoch``."""
        self._epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[int]:
        # The position is not reset: a loader with worker processes starts its sampler twice.
        return _EpochOrder(self, self._epoch, self._start)

    def order(self, epoch: int) -> list[int]:
        """Return the row numbers of one epoch, in order."""
        if not self.shuffle:
            return list(range(self.length))
        # Hash the pair, because with seed + epoch, seed 1 would start with the second epoch of seed 0.
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return [int(row) for row in torch.randperm(self.length, generator=generator)]


class _EpochOrder(Iterator[int]):
    """The rows of one epoch, with the two methods by which :class:`StatefulDataLoader` saves and restores it."""

    def __init__(self, sampler: EpochSampler, epoch: int, start: int) -> None:
        self._sampler = sampler
        self._goto(epoch, start)

    def _goto(self, epoch: int, start: int) -> None:
        self._epoch, self._next, self._order = epoch, start, self._sampler.order(epoch)

    def __next__(self) -> int:
        if self._next >= len(self._order):
            raise StopIteration
        self._next += 1
        return self._order[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._goto(state["epoch"], state["next"])


class FirstRows(BaseDataset):
    """The first ``count`` rows of a dataset, for ``data.val_max_samples``."""

    def __init__(self, dataset: BaseDataset, count: int) -> None:
        self._dataset = dataset
        self._length = len(dataset) if count < 0 else min(count, len(dataset))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not -self._length <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._dataset[index % self._length]

    def collate(self, rows: list[Any]) -> DataProto:
        """Collate rows as the dataset does."""
        return self._dataset.collate(rows)


class _Rows(Dataset[Any]):
    """Adapter to torch's dataset interface; all that a worker process receives."""

    def __init__(self, dataset: BaseDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def build_loader(
    dataset: BaseDataset,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
) -> StatefulDataLoader[DataProto]:
    """Return a loader of collated batches; one iteration is one epoch, :class:`EpochIterator` never ends.

    Args:
        drop_last: True to drop the rows after the last full batch of an epoch; False to yield them as a smaller batch.
        num_workers: processes that fetch and collate ahead.

    Raises:
        DataError: the dataset is empty, ``batch_size`` is below 1, or there is not one full batch
            and ``drop_last`` would leave nothing.
    """
    rows = len(dataset)
    if rows == 0:
        raise DataError("the dataset has no rows")
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}; it must be at least 1")
    if drop_last and batch_size > rows:
        raise DataError(f"the batch size {batch_size} is larger than the dataset: it has {rows} rows after filtering")
    with warnings.catch_warnings():
        # torchdata up to 0.11 calls deprecated functions of torch; users cannot act on the warning.
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return StatefulDataLoader(
            _Rows(dataset),
            batch_size=batch_size,
            sampler=EpochSampler(rows, shuffle, seed),
            num_workers=num_workers,
            collate_fn=dataset.collate,
            drop_last=drop_last,
            # Without its own generator, the loader would draw from the global one in every epoch, and in a resumed run
            # all other users of the global generator would draw other numbers.
            generator=torch.Generator().manual_seed(0),
        )


class EpochIterator(Iterator[DataProto]):
    """An endless iterator over the batches of a loader, with a state that JSON can hold.

    The state may be saved after any batch. After :meth:`load_state_dict`, the iterator continues with the same batches
    as from the saved position, also at the end of an epoch and with any number of workers.

    Attributes:
        epoch: epoch of the next batch, from 0.
        batch: number of the next batch within the epoch, from 0.

    Args:
        loader: a loader from :func:`build_loader`.

    Raises:
        DataError: the loader was not built by :func:`build_loader`, so its order is unknown.
    """

    def __init__(self, loader: StatefulDataLoader[DataProto]) -> None:
        if not isinstance(loader.sampler, EpochSampler):
            raise DataError(f"the loader has a {type(loader.sampler).__name__}; build it with build_loader")
        self._loader = loader
        self._sampler = loader.sampler
        self._batches: Iterator[DataProto] | None = None
        self.epoch = 0
        self.batch = 0

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return len(self._loader)

    def __next__(self) -> DataProto:
        if self._batches is None:
            self._batches = iter(self._loader_at())
        batch = next(self._batches)
        self.batch += 1
        if self.batch == self.batches_per_epoch:
            self.epoch, self.batch, self._batches = self.epoch + 1, 0, None
        return batch

    def _loader_at(self) -> StatefulDataLoader[DataProto]:
        size = self._loader.batch_size or 1
        self._loader.load_state_dict({})
        self._sampler.set_position(self.epoch, self.batch * size)
        return self._loader

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position and the parameters of the order, as numbers that JSON can hold."""
        return {"epoch": self.epoch, "batch": self.batch, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position where ``state`` was saved.

        Raises:
            CheckpointError: the state was saved with other rows, batch size, seed or order; names each.
        """
        settings = self._settings()
        missing = [key for key in ("epoch", "batch", *settings) if key not in state]
        if missing:
            raise CheckpointError(f"the data loader's state lacks {', '.join(missing)}; it has {', '.join(state)}")
        for key, most in (("epoch", None), ("batch", self.batches_per_epoch)):
            value = state[key]
            if type(value) is not int or value < 0 or (most is not None and value >= most):
                raise CheckpointError(f"the data loader's state has {key} {value!r}, which is no position in the data")
        changed = [f"{key} was {state[key]}, is {now}" for key, now in settings.items() if state[key] != now]
        if changed:
            raise CheckpointError(f"the data loader cannot resume, its order has changed: {'; '.join(changed)}")
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._batches = None

    def _settings(self) -> dict[str, int | bool]:
        return {
            "rows": self._sampler.length,
            "batch_size": self._loader.batch_size or 1,
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
            "drop_last": bool(self._loader.drop_last),
        }
