"""Contracts of datasets and of the preprocessors behind ``rollcast preprocess``.

Example of a preprocessor::

    class Squares(BasePreprocessor):
        '''Squares of small numbers.'''

        def run(self, source, output, seed=0):
            rows = [{"prompt": f"{n}*{n}=", "ground_truth": str(n * n)} for n in range(100)]
            return PreprocessReport({"train.jsonl": write_jsonl(output / "train.jsonl", rows)})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.protocol import DataProto

__all__ = ["BaseDataset", "BasePreprocessor", "PreprocessReport", "datasets", "preprocessors"]


class BaseDataset(ABC):
    """Rows of a task, tokenized and collated into batches.

    Args:
        files: data files; their rows are concatenated in this order.
        tokenizer: the model's tokenizer.
        config: config's ``data`` section, as the dataset's own dataclass or a mapping.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows left after filtering."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Return one row, tokenized."""

    @abstractmethod
    def collate(self, rows: list[Any]) -> DataProto:
        """Return a batch with the jagged column ``prompts``, int32, and the rows' other columns."""


@dataclass(frozen=True)
class PreprocessReport:
    """Rows written by file name, and notes for the user."""

    rows: Mapping[str, int]
    notes: list[str] = field(default_factory=list)


class BasePreprocessor(ABC):
    """Base class of preprocessors, which convert raw data to dataset files; the docstring is the help text."""

    @abstractmethod
    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Read ``source`` (None if the task is generated) and write into ``output``.

        Raises:
            DataError: the source is missing or malformed; names file and row.
        """


datasets: Registry[type[BaseDataset]] = Registry(
    "rollcast.datasets",
    subclass_of(BaseDataset),
    "data.dataset",
    description="datasets of prompts or of supervised samples",
)
preprocessors: Registry[type[BasePreprocessor]] = Registry(
    "rollcast.preprocessors",
    subclass_of(BasePreprocessor),
    "data.preprocess",
    description="commands that turn public data into dataset files",
)
