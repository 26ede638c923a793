"""Conversations in report.html: complete, harmless, of one page's size, and only where a run saved some."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from packed_page import PackedPage

from rollcast_report import trajectories
from rollcast_report.archive import PageLimits, clip_texts, evenly
from rollcast_report.report import write_report
from rollcast_report.trajectories import read_trajectories, turns_of_messages

_EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- \ud800 \u2028 $style"


def _packed(values: list[float], form: str) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{form}", *values)).decode()


def _segment(turn: int, sampled: bool, text: str | None, count: int = 3) -> dict[str, Any]:
    return {
        "turn": turn,
        "sampled": sampled,
        "token_ids": _packed([7] * count, "i"),
        "log_probs": _packed([-0.25] * count, "f") if sampled else None,
        "weight_versions": [[4, 1], [5, count - 1]] if sampled else [],
        "text": text,
    }


def _record(**changes: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
    return {
        "version": 1,
        "group_id": "prompt-0",
        "rollout_id": "rollout-0",
        "end": "done",
        "reward": None,
        "turn_rewards": {"0": 0.5},
        "reward_components": {"format": 1.0},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "6 times 7?"}]},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "I multiply."},
            {"role": "tool", "name": "multiply", "tool_call_id": "c1", "content": f"42 {_EVIL}"},
            {"role": "assistant", "content": "It is 42."},
        ],
        "metrics": {"tool_calls": 1.0},
        "failure": None,
        "extra": {},
        "segments": [
            _segment(0, False, "<user>6 times 7?"),
            _segment(0, True, 'I multiply.{"name": "multiply"}', 9),
            _segment(1, False, f"42 {_EVIL}"),
            _segment(1, True, "It is 42.<end>"),
        ],
        "task": {"ground_truth": "42"},
        "score": 1.5,
        **changes,
    }


def _save(run_dir: Path, step: int, *records: dict[str, Any]) -> None:
    folder = run_dir / "trajectories"
    folder.mkdir(exist_ok=True)
    (folder / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def _shown(run_dir: Path) -> tuple[PackedPage, list[dict[str, Any]]]:
    page = PackedPage(write_report(run_dir).read_text("utf-8"))
    return page, page.details


def test_a_conversation_is_there_with_its_rewards_and_trained_tokens(tmp_path: Path) -> None:
    _save(tmp_path, 12, _record())
    page, (shown,) = _shown(tmp_path)
    assert (page.index["step"], page.index["reward"]) == ([12], [1.5])
    assert (page.index["turns"], page.index["tokens"], page.index["sampled"]) == ([2], [18], [12])
    assert (shown["turnRewards"], shown["truth"]) == ({"0": 0.5}, "42")
    assert [each["role"] for each in shown["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert shown["messages"][0]["text"] == "6 times 7?"
    assert shown["messages"][1]["calls"] == [{"name": "multiply", "arguments": '{"a": 6, "b": 7}', "id": "c1"}]
    assert [each.get("turn") for each in shown["messages"]] == [None, 0, None, 1]
    assert [(each["sampled"], each["tokens"]) for each in shown["segments"]] == [
        (False, 3), (True, 9), (False, 3), (True, 3),
    ]  # fmt: skip
    assert shown["segments"][1]["versions"] == [4, 5] and shown["segments"][1]["logProb"] == -0.25


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({}, True),
        ({"end": "max_turns"}, True),
        ({"score": None, "reward": 1.0}, False),
        ({"end": "error", "failure": {"boundary": "tool", "message": "x"}}, False),
        ({"end": "aborted"}, False),
        ({"end": "timeout"}, False),
    ],
)
def test_what_took_no_part_in_the_update_is_not_called_trained(
    tmp_path: Path, changes: dict[str, Any], trained: bool
) -> None:
    _save(tmp_path, 1, _record(**changes))
    _, (shown,) = _shown(tmp_path)
    assert shown["trained"] is trained


def test_what_models_and_tools_wrote_stays_text(tmp_path: Path) -> None:
    _save(tmp_path, 1, _record(rollout_id=_EVIL, end=f'done"{_EVIL}', failure={"boundary": "tool", "message": _EVIL}))
    page, (shown,) = _shown(tmp_path)
    assert shown["messages"][2]["text"] == f"42 {_EVIL}" and shown["failure"] == ["tool", _EVIL]
    types = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert types == ["application/octet-stream"] * 2 + [None]
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_a_script_makes_no_markup_of_texts() -> None:
    script = (Path(trajectories.__file__).parent / "assets" / "explorer.js").read_text()
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "write(", "eval(") if word in script]


def test_a_run_without_agents_has_no_such_part(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    text = write_report(tmp_path).read_text()
    assert ">Trajectories</h2>" not in text and "explorer-index" not in text


def test_lines_of_another_format_are_noted_and_left_out(tmp_path: Path) -> None:
    wrong = [{"version": 2}, _record(segments=[{"turn": 0}]), _record(reward="high", score=None)]
    _save(tmp_path, 3, wrong[0], _record(), *wrong[1:])
    _, shown = _shown(tmp_path)
    assert len(shown) == 1
    assert "trajectories/step_000003.jsonl: 3 unreadable (line 1, 3, 4)" in (tmp_path / "report.html").read_text()


def test_a_page_has_a_limit(tmp_path: Path) -> None:
    limits = PageLimits(trajectories=12, steps=3, characters=20_000)
    long = [{"role": "user", "content": "x" * 5000}]
    for step in range(1, 8):
        _save(tmp_path, step, *[_record(rollout_id=f"r{index}", messages=long) for index in range(6)])
    text = write_report(tmp_path, limits=limits).read_text()
    page = PackedPage(text)
    assert page.index["step"] == [1] * 4 + [4] * 4 + [7] * 4
    assert "Up to 4 trajectories of each of 3 of the 7 recorded steps" in text
    assert page.details[0]["messages"][0]["text"].endswith("(3,500 more characters in the run's folder trajectories)")
    assert len(text) < 60_000


def test_the_age_of_tokens_is_counted_from_the_start_of_their_step(tmp_path: Path) -> None:
    versions = [[[4, 2]], [[3, 1], [4, 1]], [[-1, 2]]]
    records = [
        _record(rollout_id=str(place), segments=[{**_segment(0, True, "a", 2), "weight_versions": each}])
        for place, each in enumerate(versions)
    ]
    _save(tmp_path, 6, *records)
    page, _ = _shown(tmp_path)
    assert page.index["age"] == [0, 1, None]  # without the run's metrics: from the newest version of the step
    lines = [{"step": step, "rollout/weight_version": step} for step in (4, 5, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page, _ = _shown(tmp_path)
    assert page.index["age"] == [1, 2, None]


def test_entries_spread_evenly_and_texts_are_cut_where_they_are_long() -> None:
    assert list(evenly(range(9), 3)) == [0, 4, 8] and list(evenly(range(2), 3)) == [0, 1]
    assert list(evenly(range(9), 1)) == [8] and list(evenly(range(9), 0)) == []
    holder = {"short": "a" * 100, "long": "b" * 30_000}
    clip_texts([(holder, key) for key in holder], 10_200, "a file")
    assert holder["short"] == "a" * 100
    assert holder["long"] == "b" * 10_000 + "\n… (20,000 more characters in a file)"


def test_all_of_a_small_run_is_shown_without_a_hint(tmp_path: Path) -> None:
    _save(tmp_path, 1, _record())
    assert read_trajectories(tmp_path).is_cut is False
    assert "recorded steps" not in write_report(tmp_path).read_text()


def _reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "text": text}


def test_examples_in_the_prompt_count_as_given() -> None:
    messages = [{"role": "user", "text": "1+1"}, _reply("2"), {"role": "user", "text": "2+2"}, _reply("4")]
    assert turns_of_messages(messages, [{"turn": 0, "sampled": True, "text": "4"}]) == {3: 0}
    same = [messages[0], _reply("4"), messages[2], _reply("4")]
    assert turns_of_messages(same, [{"turn": 0, "sampled": True, "text": "4"}]) == {3: 0}


def test_a_rewritten_context_marks_its_own_replies_only() -> None:
    messages = [{"role": "user", "text": "go"}, _reply("first"), _reply("second"), _reply("third")]
    assert turns_of_messages(messages, [{"turn": 1, "sampled": True, "text": "second<end>"}]) == {2: 1}
    assert turns_of_messages(messages, [{"turn": 0, "sampled": True, "text": "summary"}]) == {}


def test_without_texts_replies_are_counted() -> None:
    messages = [_reply("example"), _reply("a"), _reply("b")]
    segments = [{"turn": turn, "sampled": True, "text": None} for turn in (0, 1)]
    assert turns_of_messages(messages, segments) == {1: 0, 2: 1}
    assert turns_of_messages(messages[:1], segments) == {}
