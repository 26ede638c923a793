"""The preprocessor ``episodes``: rows for environments that generate their own questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import write_jsonl

__all__ = ["INSTRUCTION", "SPLITS", "Episodes"]

SPLITS: Mapping[str, int] = {"train": 10_000, "test": 500}
"""Number of rows of each file; no episode number is in two files."""

INSTRUCTION = "Think step by step, then write the answer between <answer> and </answer>."
"""System message of every row."""


class Episodes(BasePreprocessor):
    """Rows with episode numbers: ``index`` selects the episode that the environment starts.

    Writes train.jsonl (10,000 rows) and test.jsonl (500 rows) with the columns prompt (a system message) and index.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Write the files into ``output``; ``seed`` has no effect.

        Raises:
            DataError: a source was given, but the rows are generated.
        """
        if source is not None:
            raise DataError(f"episodes generates its rows and reads no source, got {source}")
        first, rows = 0, {}
        for split, count in SPLITS.items():
            rows[f"{split}.jsonl"] = write_jsonl(output / f"{split}.jsonl", _rows(first, count))
            first += count
        return PreprocessReport(rows)


def _rows(first: int, count: int) -> Iterator[dict[str, Any]]:
    for index in range(first, first + count):
        yield {"prompt": [{"role": "system", "content": INSTRUCTION}], "index": index}
