"""Public data sets whose rows are in verl's layout: DAPO-Math-17k with AIME 2024, and the programs of Eurus-2-RL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollcast.errors import DataError
from rollcast_data.contract import BasePreprocessor, PreprocessReport
from rollcast_data.files import Row, read_files, write_parquet

__all__ = ["PYTHON_INSTRUCTION", "DapoMath", "DapoMathWithPython", "EurusCode"]

PYTHON_INSTRUCTION = (
    "You solve math problems. You may run Python programs with the tool `python` to calculate and to check your work; "
    "print what you want to see. Finish with the answer in the form that the problem asks for."
)
"""System message of :class:`DapoMathWithPython`."""


class DapoMath(BasePreprocessor):
    """BytedTsinghua-SIA/DAPO-Math-17k for training and AIME 2024 for validation.

    Reads ``dapo-math-17k.parquet`` and ``aime-2024.parquet``, as published, from one folder. Writes train.parquet and
    test.parquet with the columns data_source, prompt (chat messages), ability, ground_truth and extra_info. The
    published files repeat their problems; each is written once.
    """

    files: ClassVar[Mapping[str, str]] = {"train": "dapo-math-17k.parquet", "test": "aime-2024.parquet"}

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Convert the files of ``source`` and write into ``output``; ``seed`` has no effect.

        Raises:
            DataError: there is no source, a file is missing, or a row lacks its prompt or its answer.
        """
        folder = _require_source(source, "dapo_math", self.files)
        splits = {split: list(self._rows(_in_folder(folder, file))) for split, file in self.files.items()}
        return _write(output, splits)

    def messages(self, prompt: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages that ask a problem, from the published ones."""
        return prompt

    def _rows(self, path: Path) -> Iterator[dict[str, Any]]:
        seen = set()
        for row in read_files([path]):
            prompt, answer = _prompt(row), _truth(row)
            key = json.dumps(prompt, sort_keys=True)
            if key not in seen:
                seen.add(key)
                yield {
                    "data_source": str(row.get("data_source")),
                    "prompt": self.messages(prompt),
                    "ability": "math",
                    "ground_truth": answer,
                    "extra_info": {"index": len(seen) - 1},
                }


class DapoMathWithPython(DapoMath):
    """The problems of ``dapo_math`` for an agent with the tool ``python``, which a system message describes."""

    def messages(self, prompt: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "system", "content": PYTHON_INSTRUCTION}, *prompt]


class EurusCode(BasePreprocessor):
    """The programming problems of PRIME-RL/Eurus-2-RL-Data: APPS, CodeContests, TACO and Codeforces.

    Reads the files that begin with ``train`` and ``validation`` in a folder, as published. Writes train.parquet and
    test.parquet with the columns data_source, prompt (chat messages), ability, ground_truth (JSON with inputs and
    outputs, for the reward ``code``, and with fn_name if the tests call a function) and extra_info.
    """

    files: ClassVar[Mapping[str, str]] = {"train": "train*.parquet", "test": "validation*.parquet"}

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        """Convert the files of ``source`` and write into ``output``; ``seed`` has no effect.

        Raises:
            DataError: there is no source, a file is missing, or a programming problem lacks its prompt or its tests.
        """
        folder = _require_source(source, "eurus_code", self.files)
        splits: dict[str, list[dict[str, Any]]] = {}
        for split, pattern in self.files.items():
            problems = [row for row in read_files([_in_folder(folder, pattern)]) if row.get("ability") == "code"]
            splits[split] = [_program(row, index) for index, row in enumerate(problems)]
        return _write(output, splits)


def _program(row: Row, index: int) -> dict[str, Any]:
    """Return the converted row of problem ``index``."""
    text = _truth(row)
    try:
        tests = json.loads(text)
    except ValueError as error:
        raise DataError(f"{row.location}: the tests are not JSON: {text[:80]!r}") from error
    if not isinstance(tests, dict) or not tests.get("inputs") or not tests.get("outputs"):
        raise DataError(f"{row.location}: the tests have no 'inputs' and 'outputs': {text[:80]!r}")
    return {
        "data_source": str(row.get("data_source")),
        "prompt": _prompt(row),
        "ability": "code",
        "ground_truth": json.dumps({name: tests[name] for name in ("inputs", "outputs", "fn_name") if tests.get(name)}),
        "extra_info": {"index": index},
    }


def _require_source(source: Path | None, name: str, files: Mapping[str, str]) -> Path:
    if source is None:
        raise DataError(
            f"{name} needs a source (--input, or data.preprocess_source): the folder that holds "
            f"{' and '.join(files.values())}"
        )
    return source


def _in_folder(folder: Path, pattern: str) -> Path:
    """Return the pattern of files in a folder, or in its folder ``data`` as on the Hugging Face Hub."""
    return next((place / pattern for place in (folder, folder / "data") if any(place.glob(pattern))), folder / pattern)


def _prompt(row: Row) -> list[dict[str, str]]:
    messages = row.get("prompt")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{row.location}: the prompt is not a list of messages: {str(messages)[:80]!r}")
    return [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]


def _truth(row: Row) -> str:
    truth = row.get("reward_model.ground_truth")
    if not isinstance(truth, str) or not truth.strip():
        raise DataError(f"{row.location}: reward_model.ground_truth is empty or no text: {str(truth)[:80]!r}")
    return truth


def _write(output: Path, splits: Mapping[str, list[dict[str, Any]]]) -> PreprocessReport:
    # Every file is read before one is written, so a bad row does not leave half of a data set behind.
    rows = {
        f"{split}.parquet": write_parquet(output / f"{split}.parquet", rows_of_split)
        for split, rows_of_split in splits.items()
    }
    return PreprocessReport(rows)
