import json

import pytest
from typer.testing import CliRunner

from rollcast.errors import DataError
from rollcast_my_plugin import app
from rollcast_testing import CommandSuite


class TestMyPlugin(CommandSuite):
    name = "my_plugin"


def test_the_best_steps_come_first(tmp_path):
    rows = [{"step": step, "val/accuracy": value} for step, value in enumerate((0.1, 0.7, 0.4), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(app, [str(tmp_path), "--count", "2"])
    assert shown.output.split() == ["step", "2", "0.7", "step", "3", "0.4"]


def test_a_run_without_metrics_is_named(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)
