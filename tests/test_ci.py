"""The names that continuous integration prints when sessions fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "failed_sessions.py"


@pytest.mark.parametrize(
    ("results", "printed"),
    [
        ({"lint": "success", "types": "failed", "docs": "skipped", "tests_vllm": "aborted"}, "types tests_vllm\n"),
        ({"lint": "success"}, "\n"),
        (None, "nox itself\n"),  # it ended before it wrote the report
    ],
)
def test_failed_sessions_are_named(results: dict[str, str] | None, printed: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sessions = [{"name": name, "result": result} for name, result in (results or {}).items()]
    report.write_text("" if results is None else json.dumps({"result": 0, "sessions": sessions}))
    run = subprocess.run([sys.executable, str(SCRIPT), str(report)], capture_output=True, text=True, check=True)
    assert run.stdout == printed
