"""The datasets and preprocessors pass the suites that third parties are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollcast_data.contract import datasets, preprocessors
from rollcast_data.files import write_jsonl, write_parquet
from rollcast_data.testing import DatasetSuite, PreprocessorSuite
from rollcast_testing import CommandSuite


def write(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """Half of the rows as JSON lines, the others as Parquet."""
    write_jsonl(folder / "rows.jsonl", rows[:5])
    write_parquet(folder / "rows.parquet", rows[5:])
    return [folder / "rows.jsonl", folder / "rows.parquet"]


class TestPrompts(DatasetSuite):
    name = "prompts"
    rows = 11
    config: ClassVar[Mapping[str, Any]] = {"max_prompt_length": 24}

    def write(self, folder: Path) -> list[Path]:
        return write(folder, [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n), "level": n} for n in range(11)])


class TestPromptsOfConversations(DatasetSuite):
    name = "prompts"
    rows = 8
    config: ClassVar[Mapping[str, Any]] = {"max_prompt_length": 64}

    def write(self, folder: Path) -> list[Path]:
        rows = [{"prompt": [{"role": "user", "content": "x" * n}], "ground_truth": "y"} for n in range(1, 9)]
        return write(folder, rows)


class TestTasks(DatasetSuite):
    """Rows of environments: without answers, and the first without a prompt."""

    name = "tasks"
    rows = 9
    config: ClassVar[Mapping[str, Any]] = {"max_prompt_length": 24}

    def write(self, folder: Path) -> list[Path]:
        return write(folder, [{"prompt": f"{n}+{n}=" if n else "", "level": n} for n in range(9)])


class TestSupervised(DatasetSuite):
    name = "supervised"
    rows = 11
    columns = ("responses", "response_mask")
    config: ClassVar[Mapping[str, Any]] = {"max_prompt_length": 16, "max_response_length": 8}

    def write(self, folder: Path) -> list[Path]:
        return write(folder, [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(11)])


class TestConversations(DatasetSuite):
    name = "conversations"
    rows = 9
    columns = ("responses", "response_mask")
    config: ClassVar[Mapping[str, Any]] = {"max_prompt_length": 64, "max_response_length": 64}

    def write(self, folder: Path) -> list[Path]:
        messages = [
            [{"role": "user", "content": f"{n}+{n}="}, {"role": "assistant", "content": str(2 * n)}] for n in range(9)
        ]
        return write(folder, [{"messages": each} for each in messages])


class TestGsm8k(PreprocessorSuite):
    name = "gsm8k"
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"*": ("prompt", "ground_truth", "data_source", "extra_info")}

    def write_source(self, folder: Path) -> Path:
        rows = [{"question": f"What is {n} and {n}?", "answer": f"Add.\n#### {2 * n:,}"} for n in range(900, 1100, 50)]
        for split in ("train", "test"):
            write_jsonl(folder / f"{split}.jsonl", rows)
        return folder


class TestGsm8kWithTool(TestGsm8k):
    name = "gsm8k_with_tool"


def verl_row(number: int, truth: str, ability: str) -> dict[str, Any]:
    return {
        "data_source": "made_up",
        "prompt": [{"role": "user", "content": f"Problem {number}."}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": number},
    }


class TestDapoMath(PreprocessorSuite):
    name = "dapo_math"
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"*": ("prompt", "ground_truth", "data_source", "extra_info")}

    def write_source(self, folder: Path) -> Path:
        rows = [verl_row(number % 3, str(number % 3), "MATH") for number in range(6)]
        for file in ("dapo-math-17k", "aime-2024"):
            write_parquet(folder / f"{file}.parquet", rows)
        return folder


class TestDapoMathWithPython(TestDapoMath):
    name = "dapo_math_with_python"


class TestEurusCode(PreprocessorSuite):
    name = "eurus_code"
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"*": ("prompt", "ground_truth", "data_source", "extra_info")}

    def write_source(self, folder: Path) -> Path:
        tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
        called = json.dumps({"inputs": [[1]], "outputs": [1], "fn_name": "f"})
        rows = [verl_row(0, tests, "code"), verl_row(1, called, "code"), verl_row(2, "2", "math")]
        for file in ("train-00000-of-00001", "validation-00000-of-00001"):
            write_parquet(folder / f"{file}.parquet", rows)
        return folder


def test_every_part_of_this_distribution_is_tested_here() -> None:
    for registry, suite in ((datasets, DatasetSuite), (preprocessors, PreprocessorSuite)):
        ours = {name for name in registry.names() if registry.find(name).distribution == "rollcast-data"}
        here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, suite)]
        assert {case.name for case in here if case is not suite} == ours  # type: ignore[attr-defined]


class TestPreprocessCommand(CommandSuite):
    name = "preprocess"
