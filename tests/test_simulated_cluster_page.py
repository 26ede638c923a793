"""The code of docs/simulated-cluster.md, run as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "simulated-cluster.md"


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    # Annotations of a worker's methods are looked up in its module.
    module = types.ModuleType("simulated_cluster_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), vars(module))
