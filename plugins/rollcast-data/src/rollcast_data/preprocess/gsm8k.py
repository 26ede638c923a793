"""GSM8K: grade-school word problems, 7,473 for training and 1,319 for testing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import find_split, read_files, write_parquet

__all__ = ["INSTRUCTION", "TOOL_INSTRUCTION", "Gsm8k", "Gsm8kWithTool"]

INSTRUCTION = 'Think step by step and write the final answer on the last line as "#### <answer>".'
"""Instruction appended to every question."""

TOOL_INSTRUCTION = (
    "You solve math problems step by step. Check your answer with the tool `calc_gsm8k_reward` at least once before "
    "the final one, and correct it if the reward is 0. "
    'Then write the final answer on the last line as "#### <answer>".'
)
"""System message of :class:`Gsm8kWithTool`."""

_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


class Gsm8k(BasePreprocessor):
    """GSM8K from the folder with train.jsonl and test.jsonl (columns question and answer), or the Hub's.

    The Hub's folder has ``main/train-00000-of-00001.parquet``. Writes train.parquet and test.parquet with the columns
    data_source, prompt (chat messages), ability, ground_truth (the number after ####, without commas), extra_info,
    split and index.
    """

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Convert the files of ``source`` and write into ``output``; ``seed`` has no effect.

        Raises:
            DataError: there is no source, a file is missing, or a row lacks a question or a
                final answer.
        """
        if source is None:
            where = "--input, or data.preprocess_source"
            raise DataError(
                f"gsm8k needs a source ({where}): the folder that holds train.jsonl and test.jsonl, or the "
                "Hub's folder main"
            )
        # Both files are read before either is written, so a bad row does not leave half of a data set behind.
        splits = {split: list(_rows(find_split(source, split), split, self.prompt)) for split in ("train", "test")}
        names = {f"{split}.parquet": rows for split, rows in splits.items()}
        return PreprocessReport({name: write_parquet(output / name, rows) for name, rows in names.items()})

    def prompt(self, question: str) -> list[dict[str, str]]:
        """Return the messages that ask a question."""
        return [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]


class Gsm8kWithTool(Gsm8k):
    """GSM8K for an agent with the tool ``calc_gsm8k_reward``, which a system message asks it to call.

    Files and columns are those of ``gsm8k``.
    """

    def prompt(self, question: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": TOOL_INSTRUCTION}, {"role": "user", "content": question}]


def _rows(paths: list[Path], split: str, prompt: Callable[[str], list[dict[str, str]]]) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(read_files(paths)):
        question, answer = str(row.get("question")), str(row.get("answer"))
        match = _ANSWER.search(answer)
        if match is None:
            raise DataError(f"{row.location}: the answer does not end with '#### <number>': {answer[-80:]!r}")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": prompt(question),
            "ability": "math",
            "ground_truth": match[1].replace(",", ""),
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
            "split": split,
            "index": index,
        }
