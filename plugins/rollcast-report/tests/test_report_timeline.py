"""The timeline in the report: its data, its drawing, and that everyone can read it."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rollcast_report.report import write_report
from rollcast_report.run_data import read_run
from rollcast_report.timeline import read_timeline, render_timeline, windows

EVIL = "<script>alert(1)</script>"


def line(step: int, ahead: bool = False, pool: str = "rollouts") -> dict[str, Any]:
    """A step of 4 s: one pool generates for 1 s, or for 3 s while the other trains for 2 s."""
    generate = [[0.0, 3.0]] if ahead else [[0.0, 1.0]]
    return {
        "step": step,
        "began": 1000.0 + 4 * step,
        "seconds": 4.0,
        "stages": {"generate": [[0.0, 1.0]], "update_actor": [[1.0, 3.0]]},
        "pools": {
            "global_pool": {"busy_s": 2.0, "calls": {"update_actor": [[1.0, 3.0]]}},
            pool: {"busy_s": generate[0][1], "calls": {"generate": generate}},
        },
    }


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "timeline.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


def test_shares_are_those_of_the_whole_run(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path, [line(step, ahead=step > 1) for step in range(1, 5)]))
    assert found.steps == 4
    pools = found.pools
    assert pools["global_pool"].busy == pytest.approx(0.5)
    assert pools["rollouts"].busy == pytest.approx(10 / 16)
    for use in pools.values():
        assert use.idle == pytest.approx(1 - use.busy)
    assert pools["rollouts"].calls == {"generate": 10.0}
    text = re.sub(r"<[^>]*>", " ", render_timeline(found))
    assert "62.5 %" in text and "37.5 %" in text and "50.0 %" in text


def test_a_pool_without_work_is_idle(tmp_path: Path) -> None:
    empty = {**line(1), "pools": {"global_pool": {"busy_s": 0.0, "calls": {}}}}
    use = read_timeline(write(tmp_path, [empty])).pools["global_pool"]
    assert (use.busy, use.idle) == (0.0, 1.0)
    assert ">nothing<" in render_timeline(read_timeline(tmp_path / "timeline.jsonl"))


def bars(page: str, pool: str, stage: str) -> list[tuple[float, float]]:
    """Left and right edge of the bars of a stage in a lane."""
    path = re.search(rf'd="([^"]*)"><title>{pool}: {stage}</title>', page)
    assert path is not None
    return [(float(x), float(x) + float(w)) for x, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path[1])]


def test_bars_lie_over_each_other_only_where_pools_work_together(tmp_path: Path) -> None:
    for ahead in (False, True):
        page = render_timeline(read_timeline(write(tmp_path, [line(1, ahead)])))
        (generate,), (update,) = bars(page, "rollouts", "generate"), bars(page, "global_pool", "update_actor")
        assert (generate[1] > update[0] + 1) is ahead
        seconds = (update[1] - update[0]) / 2
        assert generate[1] - generate[0] == pytest.approx((3 if ahead else 1) * seconds, abs=0.2)


def test_steps_stand_end_to_end_also_after_a_stop(tmp_path: Path) -> None:
    later = {**line(2), "began": 90_000.0}  # the run went on a day later
    page = render_timeline(read_timeline(write(tmp_path, [line(1), later])))
    first, second = bars(page, "global_pool", "update_actor")
    assert second[0] - first[1] == pytest.approx(first[1] - first[0], abs=0.2)


@pytest.mark.parametrize(("count", "first", "drawings"), [(1, 1, 1), (10, 10, 1), (11, 10, 2), (200, 10, 20)])
def test_all_steps_of_a_run_of_some_length_are_drawn(count: int, first: int, drawings: int) -> None:
    drawn = windows(count)
    assert [place for each in drawn for place in each] == list(range(count))
    assert len(drawn) == drawings and len(drawn[0]) == first


def test_a_long_run_makes_no_long_page(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path, [line(step) for step in range(1, 3001)]))
    assert found.steps == 3000 and len(found.windows) == 20
    assert found.windows[0][0]["step"] == 1 and found.windows[-1][-1]["step"] == 3000
    page = render_timeline(found)
    assert len(page) < 200_000
    assert "200 of 3,000 steps are drawn" in page
    assert page.count("<option ") == page.count('class="lanes"') == 20
    assert len(re.findall(r'<div class="lanes"[^>]* hidden>', page)) == 19  # without a script the last steps are there


def test_it_is_read_by_everyone(tmp_path: Path) -> None:
    page = render_timeline(read_timeline(write(tmp_path, [line(step) for step in range(1, 21)])))
    for tag in re.findall(r"<svg (?!class=.plot)[^>]*>", page):
        assert 'role="img"' in tag and 'tabindex="0"' in tag
        assert "Busy: global_pool 50 %, rollouts 25 %." in tag
    assert "<label>Steps <select" in page and page.count('<button type="button"') == 5
    for stage in ("generate", "update actor"):
        assert f"<b>{stage}</b>" in page


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_bars_are_seen_on_light_and_on_dark_cards() -> None:
    style = resources.files("rollcast_report").joinpath("assets", "report.css").read_text("utf-8")
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for theme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", theme.split("\n}", 1)[0]))
        stages = {name: colour for name, colour in colours.items() if re.fullmatch(r"s\d", name)}
        assert len(stages) == len(set(stages.values())) == 8
        for colour in stages.values():
            low, high = sorted((luminance(colour), luminance(colours["card"])))
            assert (high + 0.05) / (low + 0.05) >= 3.0  # WCAG 2.2, 1.4.11


def test_names_stay_text_and_broken_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    file = write(tmp_path, [line(1, pool=EVIL), {"step": 2, "stages": 3}, {**line(3), "seconds": "long"}])
    with file.open("a") as out:
        out.write("broken\n" + json.dumps(line(4))[:40])
    assert read_run(tmp_path).notes == ["timeline.jsonl: 3 unreadable (line 2, 3, 4)"]
    page = write_report(tmp_path).read_text()
    assert EVIL not in page and "<h2>Timeline</h2>" in page


def test_there_is_no_section_without_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert "<h2>Timeline</h2>" not in write_report(tmp_path).read_text()
