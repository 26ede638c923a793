"""The datasets and preprocessors pass the suites that third parties are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollcast_data.contract import datasets, preprocessors
from rollcast_data.files import write_jsonl, write_parquet
from rollcast_testing import CommandSuite, DatasetSuite, PreprocessorSuite


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


def test_every_part_of_this_distribution_is_tested_here() -> None:
    for registry, suite in ((datasets, DatasetSuite), (preprocessors, PreprocessorSuite)):
        ours = {name for name in registry.names() if registry.find(name).distribution == "rollcast-data"}
        here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, suite)]
        assert {case.name for case in here if case is not suite} == ours  # type: ignore[attr-defined]


class TestPreprocessCommand(CommandSuite):
    name = "preprocess"
