"""The commands and the code of docs/report.md."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from run_commands import SMALL, Commands

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "report.md").read_text()

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def killed(rollcast_of_module: Commands) -> Commands:
    """A run that is killed after its second step, as ``runs/quickstart``."""
    rollcast = rollcast_of_module
    process = rollcast.start("train", *SMALL, "runtime=local", "trainer.total_steps=8", "run_dir=runs/quickstart")
    status = rollcast.folder / "runs" / "quickstart" / "status.json"
    end = time.monotonic() + 200
    while not (status.exists() and (json.loads(status.read_text())["step"] or 0) >= 3):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return rollcast


@pytest.mark.exhaustive
def test_a_killed_run_is_watched_listed_and_resumed(killed: Commands) -> None:
    command = "rollcast train " + " ".join(
        [*SMALL, "runtime=local", "trainer.total_steps=8", "run_dir=runs/quickstart"]
    )
    seen = killed.must_run("watch", "runs/quickstart", "--once")
    for part in (
        "quickstart interrupted",
        "/8 ",
        "validation accuracy",
        "generate",
        "memory process",
        "is gone",
        command,
    ):
        assert part in seen.text, part
    assert "rollcast runs resume runs/quickstart # interrupted" in killed.must_run("runs", "list", "runs").text
    assert killed.must_run("runs", "resume", "runs/quickstart").text == command
    resumed = killed.must_run("runs", "resume", "runs/quickstart", "--execute")
    assert "resumed from runs/quickstart/checkpoints/step_" in resumed.text
    assert killed.must_run("watch", "runs/quickstart").text.startswith("step 8/8")
    assert "is finished at step 8" in killed.run("runs", "resume", "runs/quickstart").text
    rows = [json.loads(line) for line in (killed.folder / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    assert all(row["reward/mean/low"] <= row["reward/mean"] <= row["reward/mean/high"] for row in rows[1:])
    killed.must_run("runs", "report", "runs/quickstart", "runs/quickstart", "--output", "both.html")
    assert "2 runs compared" in (killed.folder / "both.html").read_text()


def test_the_helper_is_used_as_shown() -> None:
    found = re.search(r"^```python\n(?P<text>.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found["text"], names)
    assert (names["row"], getattr(names["line"], "done", None)) == (2, 8)


def test_every_command_of_the_page_exists(killed: Commands) -> None:
    shown = {line.split("#")[0].split()[1] for line in PAGE.splitlines() if line.startswith("rollcast ")}
    assert shown == {"watch", "runs"}
    listed = killed.must_run("runs", "--help").text
    assert all(name in listed for name in ("list", "compare", "diff", "report", "resume"))
