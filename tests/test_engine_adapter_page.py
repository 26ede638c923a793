"""docs/write-an-engine-adapter.md: every block is a part of rollcast-trtllm, and what the page names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "write-an-engine-adapter.md").read_text()
SOURCES = [
    path.read_text()
    for folder in (ROOT / "plugins" / "rollcast-trtllm",)
    for path in [*folder.rglob("*.py"), folder / "pyproject.toml"]
]
BLOCKS = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) >= 10


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_is_what_runs(block: str) -> None:
    assert any(block in source for source in SOURCES), f"not in rollcast-trtllm:\n{block}"


def test_the_parts_exist() -> None:
    names = set(re.findall(r"`(engines(?:\.\w+)*)", PAGE)) - {"engines"}
    assert len(names) >= 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(f"rollcast_serving.{name}")
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(f"rollcast_serving.{module}"), attribute), name
