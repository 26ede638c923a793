"""The report in a real browser: keys, filters, search and the list; skipped where there is no Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_browser import Page

from rollcast_report.report import write_report

_COUNT = "document.getElementById('explorer-count').textContent"
_DETAIL = "document.getElementById('explorer-detail').textContent"


def _samples() -> list[dict[str, Any]]:
    rows = []
    for step in (0, 10):
        for number in range(600):
            rows.append(
                {
                    "step": step,
                    "prompt": f"What is {number} plus {number}?",
                    "response": f"</script><img src=x onerror='window.ran=1'> It is {2 * number}, Émile."
                    + " word" * 30,
                    "ground_truth": str(2 * number),
                    "data_source": ("sums", "more sums")[number % 2],
                    "finished": number % 3 > 0,
                    "score": number / 600 + step / 10,
                    "correct": bool(number % 2) or step == 10,
                }
            )
    return rows


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in _samples()))
    return write_report(run)


@pytest.fixture
def page(tab: Page, report: Path) -> Page:
    tab.open(report)
    tab.wait("performance.getEntriesByName('explorer-texts').length")
    return tab


def _set(page: Page, name: str, value: str) -> str:
    page.run(
        f"(() => {{ const field = document.getElementById('explorer-{name}'); field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    return str(page.run(_COUNT))


def test_filters_and_search_find_what_they_say(page: Page) -> None:
    assert page.run(_COUNT) == "1,200 of 1,200"
    assert _set(page, "step-low", "1") == "600 of 1,200"
    assert _set(page, "source", "sums") == "300 of 1,200"
    assert _set(page, "result", "fixed") == "300 of 1,200"
    assert _set(page, "reward-high", "1.1") == "31 of 1,200"
    assert _set(page, "end", "length") == "11 of 1,200"
    assert _set(page, "search", "IT IS 24, ÉMILE") == "1 of 1,200"
    page.wait(f"{_DETAIL}.includes('What is 12 plus 12?')")
    assert page.run("CSS.highlights.get('found').size") == 1
    assert _set(page, "search", "nowhere") == "0 of 1,200"
    assert "Nothing matches" in page.run(_DETAIL)
    page.run("document.querySelector('.explorer [type=reset]').click()")
    page.wait(f"{_COUNT} === '1,200 of 1,200'")
    assert not page.run("window.ran") and page.run("document.querySelectorAll('main img').length") == 0


def test_only_visible_rows_are_in_the_document(page: Page) -> None:
    assert 10 < page.run("document.querySelectorAll('.item').length") < 60
    page.run("document.getElementById('explorer-list').scrollTop = 20000")
    page.wait("[...document.querySelectorAll('.item')].some((row) => Number(row.dataset.place) === 345)")
    assert page.run("document.querySelectorAll('.item').length") < 60
    assert page.run("document.querySelector('.item').getAttribute('aria-setsize')") == "1200"


def test_the_list_is_used_with_the_keyboard(page: Page) -> None:
    page.run("document.getElementById('explorer-order').focus()")
    for _ in range(2):  # the button that resets, and the list
        page.press("Tab")
    assert page.run("document.activeElement.id") == "explorer-list"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key, place in (("ArrowDown", 1), ("ArrowDown", 2), ("End", 1199), ("ArrowUp", 1198), ("Home", 0)):
        page.press(key)
        active = "document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))"
        assert page.run(f"Number({active}.dataset.place)") == place
        assert page.run(f"{active}.getAttribute('aria-selected')") == "true"
        box = page.run(
            f"(() => {{ const a = {active}.getBoundingClientRect(), b = document.activeElement"
            ".getBoundingClientRect(); return [a.top >= b.top - 1, a.bottom <= b.bottom + 1]; })()"
        )
        assert box == [True, True], key
    page.press("Enter")
    assert page.run("document.activeElement.id") == "explorer-detail"
    page.press("Escape")
    assert page.run("document.activeElement.id") == "explorer-list"


def test_answers_of_other_validations_are_a_click_away(page: Page) -> None:
    page.wait(f"{_DETAIL}.includes('Other validations')")
    page.run("document.querySelector('.others button').click()")
    page.wait(f"{_DETAIL}.includes('Step10')")
    assert "What is 0 plus 0?" in page.run(_DETAIL)
    assert page.run("document.querySelector('.others button').textContent") == "step 0, wrong"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_never_wider_than_its_window(page: Page, width: int, scheme: str) -> None:
    page.emulate(width, 800, prefers_color_scheme=scheme)
    assert page.run("document.documentElement.scrollWidth") <= width


def test_controls_have_names(page: Page) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "combobox", "searchbox", "spinbutton", "listbox", "option", "region", "image", "tab"}
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node.get("role", {}).get("value") in roles
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []


# -- the timeline and the curves --------------------------------------------------------------


@pytest.fixture
def timeline(tab: Page, tmp_path: Path) -> Page:
    line = {"began": 0.0, "seconds": 2.0, "stages": {"generate": [[0, 1]], "update_actor": [[1, 2]]}}
    line["pools"] = {"pool": {"busy_s": 1.0, "calls": {"update_actor": [[1.0, 2.0]]}}}
    lines = [json.dumps({"step": step, **line}) for step in range(1, 26)]
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    metrics = [{"step": step, "reward/mean": 0.5, "reward/mean/low": 0.4, "reward/mean/high": 0.6} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    tab.open(write_report(tmp_path))
    tab.wait("document.getElementById('timeline-shown')")
    return tab


_LANES = "document.querySelector('.lanes:not([hidden])')"
_SHOWN = "document.getElementById('timeline-shown').textContent"


def test_the_timeline_is_zoomed_and_moved_with_keys(timeline: Page) -> None:
    steps = f"[...{_LANES}.querySelectorAll('.start')].filter((each) => each.getAttribute('visibility') !== 'hidden')"
    steps += ".map((each) => each.textContent).join(' ')"
    timeline.run(f"{_LANES}.querySelector('svg').focus()")
    assert timeline.run(steps) == "21 22 23 24 25" and timeline.run(_SHOWN) == ""
    timeline.press("PageUp")
    assert timeline.run("document.getElementById('timeline-steps').value") == "1"
    assert timeline.run(steps) == "11 12 13 14 15 16 17 18 19 20"
    timeline.press("+")
    timeline.press("+")
    assert timeline.run(_SHOWN) == "7.50 s to 12.5 s of 20.0 s" and timeline.run(steps) == "15 16 17"
    timeline.press("ArrowRight")
    assert timeline.run(_SHOWN) == "8.75 s to 13.8 s of 20.0 s"
    timeline.press("End")
    assert timeline.run(_SHOWN) == "15.0 s to 20.0 s of 20.0 s" and timeline.run(steps) == "19 20"
    timeline.press("0")
    assert timeline.run(_SHOWN) == "" and timeline.run("document.activeElement.tagName") == "svg"
    timeline.press("Home")
    assert timeline.run("document.getElementById('timeline-steps').value") == "0"


def test_the_timeline_is_zoomed_with_buttons(timeline: Page) -> None:
    assert timeline.run("document.querySelector('[data-zoom=\"0.5\"]').disabled")
    timeline.run("document.querySelector('[data-zoom=\"2\"]').click()")
    box = timeline.run(f"{_LANES}.querySelector('.plot').getAttribute('viewBox')").split()
    assert float(box[2]) == 468 and timeline.run(_SHOWN) == "2.50 s to 7.50 s of 10.0 s"
    timeline.run("document.querySelector('[data-zoom=\"0\"]').click()")
    assert timeline.run(_SHOWN) == ""


def test_a_curve_tells_its_values_with_the_arrow_keys(timeline: Page) -> None:
    timeline.run("document.querySelector('.chart svg').focus()")
    timeline.press("ArrowLeft")
    assert timeline.run("document.querySelector('.chart .tip').textContent") == "step 2 · 0.5 (0.4 to 0.6)"


def test_there_is_no_motion_for_who_wants_none(timeline: Page) -> None:
    timeline.emulate(1280, 800, prefers_reduced_motion="reduce")
    moving = "[...document.querySelectorAll('*')].some((each) => getComputedStyle(each).transitionDuration !== '0s'"
    assert not timeline.run(f"{moving} || getComputedStyle(each).animationName !== 'none')")
