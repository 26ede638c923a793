"""The code and the JSON of docs/profiling.md."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from run_commands import SMALL, Commands

from rollcast_automap.profiling.costs import Measurement, RoleLayout, read_costs
from rollcast_automap.profiling.devices import PEAK_TFLOPS

PAGE = (Path(__file__).parents[1] / "docs" / "profiling.md").read_text()


def test_a_tool_in_a_package(rollcast: Commands) -> None:
    found = re.search(r'^```python title="my_profiler.py"\n(?P<text>.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    parts = '[rollcast.profilers]\nwall_clock = "my_profiler:WallClock"\n'.replace('"', "")
    rollcast.install("rollcast-wall-clock", "my_profiler", found["text"], parts)
    tool = ("profiler.tool=wall_clock", "profiler.steps=[2]")
    rollcast.must_run("train", *SMALL, "runtime=local", "trainer.total_steps=2", "run_dir=run", *tool)
    (file,) = (rollcast.folder / "run" / "profiles").iterdir()
    assert file.name == "step_2-global_pool-rank_0.txt"
    assert float(file.read_text().removesuffix(" s\n")) > 0


def test_the_file_of_costs_has_these_keys(tmp_path: Path) -> None:
    found = re.search(r"^```json\n(?P<text>.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    shown = json.loads(found["text"])
    assert set(shown["measurements"][0]) == {each.name for each in fields(Measurement)}
    assert set(shown["roles"]["actor"]) == {each.name for each in fields(RoleLayout)}
    (tmp_path / "costs.json").write_text(found["text"])
    assert read_costs(tmp_path / "costs.json").find("actor", "forward")[0].tokens == 8 * 1536


def test_the_peaks_are_those_of_the_table() -> None:
    section = PAGE[PAGE.index("**Peaks**") : PAGE.index("Other devices and CPUs")]
    shown: dict[str, float] = {}
    for names, value in re.findall(r"\| ([A-Z][^|]*) \| ([\d.]+) (?=\|)", section):
        shown |= {name.strip(): float(value) for name in names.split(",")}
    assert shown == PEAK_TFLOPS
