"""The conformance suite of datasets, a class of pytest tests to inherit; it needs rollcast-data and transformers.

Example, in a plugin's tests::

    from rollcast_data.testing import DatasetSuite

    class TestPairs(DatasetSuite):
        name = "pairs"

        def write(self, folder):
            file = folder / "rows.jsonl"
            write_jsonl(file, [{"first": f"{n}+{n}=", "second": str(2 * n)} for n in range(11)])
            return [file]
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollcast.errors import RollcastError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.contract import BaseDataset, datasets
from rollcast_data.loader import EpochIterator, build_loader
from rollcast_data.tokenizer import read_tokenizer
from rollcast_testing.batches import find_difference
from rollcast_testing.checks import require
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder

__all__ = ["DatasetSuite"]


class DatasetSuite:
    """Conformance tests of one dataset: set :attr:`name`, and override :meth:`write`.

    The order of rows is the loader's, ``rollcast_data.loader``, so these tests read the dataset through it, as a run
    does.
    """

    #: Name of the dataset in ``rollcast.datasets``.
    name: ClassVar[str] = ""
    #: Keys of ``data`` for the tests.
    config: ClassVar[Mapping[str, Any]] = {}
    #: Number of rows that the dataset has of the files of :meth:`write`; None if the suite need not know.
    rows: ClassVar[int | None] = None
    #: Columns that a batch has to have, in addition to ``prompts``.
    columns: ClassVar[Sequence[str]] = ("index", "raw_prompt", "ground_truth", "data_source", "extra_info")
    #: Rows of a batch.
    batch_size: ClassVar[int] = 3
    #: True if the model's tokenizer has a chat template, as a dataset of conversations needs.
    has_chat_template: ClassVar[bool] = True

    def write(self, folder: Path) -> list[Path]:
        """Write data files with at least seven different rows into ``folder`` and return their paths; override it."""
        raise NotImplementedError(f"{type(self).__name__} must override write(), which writes the dataset's files")

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Any:
        """Return a tokenizer with one token per character."""
        template = CHAT_TEMPLATE if self.has_chat_template else None
        folder = tiny_model_folder(tmp_path / "model", weights=False, chat_template=template)
        return read_tokenizer(folder)

    @pytest.fixture
    def dataset_class(self) -> type[BaseDataset]:
        """Return the class under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `dataset_class`")
        return datasets.get(self.name, requested_by=f"{type(self).__name__}.name")

    @pytest.fixture
    def build(self, dataset_class: type[BaseDataset], tokenizer: Any, tmp_path: Path) -> Any:
        """Return a function that builds the dataset from its files."""
        files = self.write(tmp_path)

        def make(paths: Sequence[Path] = files) -> BaseDataset:
            return dataset_class(paths, tokenizer, copy.deepcopy(dict(self.config)))  # type: ignore[call-arg]

        return make

    def test_it_has_its_rows(self, build: Any) -> None:
        dataset = build()
        require(isinstance(dataset, BaseDataset), f"is a BaseDataset, not a {type(dataset).__name__}")
        require(len(dataset) >= 7, f"the files of write() have at least seven rows, not {len(dataset)}")
        if self.rows is not None:
            require(len(dataset) == self.rows, f"the dataset has {self.rows} rows, not {len(dataset)}")

    def test_batches_have_the_columns(self, build: Any) -> None:
        dataset = build()
        for count in (1, self.batch_size, len(dataset)):
            batch = dataset.collate([dataset[index] for index in range(count)])
            require(isinstance(batch, DataProto), f"collate returns a DataProto, not a {type(batch).__name__}")
            require(len(batch) == count, f"{count} rows make a batch of {count} rows, not {len(batch)}")
            missing = [name for name in ("prompts", *self.columns) if name not in batch]
            require(not missing, f"the batch has the columns {missing}")
            prompts = Jagged.of(batch["prompts"], "prompts")
            require(prompts.values.dtype == torch.int32, f"prompts are int32, not {prompts.values.dtype}")
            require(bool((prompts.lengths > 0).all()), "no prompt is empty")

    def test_a_row_is_the_same_in_every_batch(self, build: Any) -> None:
        dataset = build()
        rows = [dataset[index] for index in range(len(dataset))]
        whole = dataset.collate(rows)
        for index in (0, len(rows) - 1, 3):
            difference = find_difference(dataset.collate([rows[index]]), whole.select_idxs([index]))
            require(difference is None, f"row {index} alone is what it is in a batch: {difference}")
        order = [4, 0, 6, 2]
        difference = find_difference(dataset.collate([rows[index] for index in order]), whole.select_idxs(order))
        require(difference is None, f"a batch has its rows in the order given: {difference}")

    def test_rows_differ(self, build: Any) -> None:
        """Check that no row of the files comes twice and none is lost, as far as prompts show it."""
        dataset = build()
        batch = dataset.collate([dataset[index] for index in range(len(dataset))])
        seen = [tuple(ids.tolist()) for ids in _rows_of(batch)]
        require(len(set(seen)) == len(seen), f"the {len(seen)} rows of write() have {len(set(seen))} different prompts")

    def test_building_it_again_gives_the_same_rows(self, build: Any) -> None:
        first, second = build(), build()
        batches = [dataset.collate([dataset[index] for index in range(len(dataset))]) for dataset in (first, second)]
        difference = find_difference(*batches)
        require(difference is None, f"the same files give the same rows: {difference}")

    def test_reading_a_row_changes_nothing(self, build: Any) -> None:
        dataset = build()
        first = dataset.collate([dataset[index] for index in range(len(dataset))])
        for index in (5, 0, 5, -1):
            dataset[index]
        rows = [dataset[index] for index in range(len(dataset))]
        second = dataset.collate(rows)
        difference = find_difference(first, second)
        require(difference is None, f"rows are the same whenever they are read: {difference}")
        difference = find_difference(dataset.collate(rows), second)
        require(difference is None, f"collate leaves its rows as they are: {difference}")

    def test_files_follow_one_another(self, build: Any, tmp_path: Path) -> None:
        """Check that several files are read in order, and each of them whole."""
        (tmp_path / "more").mkdir()
        files = self.write(tmp_path)
        twice = build([*files, *self.write(tmp_path / "more")])
        count = len(twice) // 2
        require(len(twice) == 2 * len(build()), f"the files twice have {2 * len(build())} rows, not {len(twice)}")
        halves = [twice.collate([twice[at + index] for index in range(count)]) for at in (0, count)]
        same = [list(map(tuple, (ids.tolist() for ids in _rows_of(half)))) for half in halves]
        require(same[0] == same[1], "rows of files are concatenated in the order of the files")

    def test_a_missing_file_is_named(self, build: Any, tmp_path: Path) -> None:
        missing = tmp_path / "no_such_file.jsonl"
        with pytest.raises((RollcastError, OSError), match="no_such_file"):
            build([missing])

    def test_workers_can_hold_it(self, build: Any) -> None:
        """Check that a dataset can be pickled, for ``data.num_workers`` and for other processes."""
        dataset = build()
        other = pickle.loads(pickle.dumps(dataset))  # its own bytes
        rows = range(len(dataset))
        difference = find_difference(
            other.collate([other[index] for index in rows]), dataset.collate([dataset[index] for index in rows])
        )
        require(difference is None, f"a pickled dataset has the same rows: {difference}")

    def test_an_epoch_has_every_row_once(self, build: Any) -> None:
        dataset = build()
        expected = sorted(map(tuple, (ids.tolist() for ids in _rows_of(_whole(dataset)))))
        for shuffle in (False, True):
            loader = build_loader(dataset, self.batch_size, shuffle=shuffle, seed=1, drop_last=False)
            seen = sorted(_prompts(list(loader)))
            require(seen == expected, f"with shuffle={shuffle} an epoch has every row exactly once")

    def test_the_order_is_a_function_of_the_seed(self, build: Any) -> None:
        dataset = build()
        orders = []
        for seed in (0, 0, 1):
            batches = EpochIterator(build_loader(dataset, self.batch_size, seed=seed))
            orders.append(_prompts([next(batches) for _ in range(2 * batches.batches_per_epoch)]))
        require(orders[0] == orders[1], "the same seed gives the same order, over epochs")
        require(orders[0] != orders[2], "another seed gives another order")

    def test_a_run_resumes_at_its_position(self, build: Any) -> None:
        """Check that a run that continues after any batch sees the batches of an uninterrupted run."""
        batches = EpochIterator(build_loader(build(), self.batch_size, seed=2))
        count = batches.batches_per_epoch + 2
        states, seen = [], []
        for _ in range(count):
            states.append(json.dumps(batches.state_dict()))
            seen.append(next(batches))
        for at in range(count):
            resumed = EpochIterator(build_loader(build(), self.batch_size, seed=2))
            resumed.load_state_dict(json.loads(states[at]))
            difference = find_difference([next(resumed) for _ in range(count - at)], seen[at:])
            require(difference is None, f"resumed before batch {at}, the batches are the same: {difference}")


def _rows_of(batch: DataProto) -> Iterator[torch.Tensor]:
    prompts = Jagged.of(batch["prompts"], "prompts")
    yield from torch.split(prompts.values, prompts.lengths.tolist())


def _whole(dataset: BaseDataset) -> DataProto:
    return dataset.collate([dataset[index] for index in range(len(dataset))])


def _prompts(batches: Sequence[DataProto]) -> list[tuple[int, ...]]:
    return [tuple(ids.tolist()) for batch in batches for ids in _rows_of(batch)]
