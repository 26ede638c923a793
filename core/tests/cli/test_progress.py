"""Progress of commands: a bar on a terminal, lines elsewhere, nothing for what is quick."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from rollcast.contracts import command
from rollcast.contracts.command import ProgressLine, format_clock, read_command, record_command, show_progress, track


@pytest.fixture
def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_is_quick_prints_nothing_without_a_terminal(plain: Console) -> None:
    with show_progress("rows", 3, console=plain) as line:
        line.update(3)
    assert _written(plain) == ""


def test_lines_tell_count_rate_and_remaining_time(plain: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_FIRST_LINE_S", 0.0)
    with show_progress("rows", 10, done=2, console=plain) as line:
        assert isinstance(line, command._PlainLine)
        line.update(4, note="of a file")
        while not line.lines:
            line._ended.wait(0.01)
    first, last = _written(plain).splitlines()
    assert first.startswith("rows  ") and "/10" in first
    assert last.startswith("rows  4/10  ") and last.endswith("left  of a file") and "/s" in last


def test_rate_counts_only_what_was_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    line = ProgressLine("prompts", total=100, done=40)
    assert line.rate is None and line.remaining is None
    now[0] += 10.0
    line.update(60)
    assert line.rate == 2.0 and line.remaining == 20.0
    assert line.describe() == "prompts  60/100  2/s  0:10  0:20 left"
    line.update(40 + 1)
    assert "10 s each" not in line.describe() and "0.1/s" in line.describe()


def test_a_terminal_gets_a_bar_that_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with show_progress("prompts", 4, console=console) as line:
        line.update(2, note="gsm8k [b]")
        assert isinstance(line, command._LiveLine)
        line.bar.refresh()
    assert "2/4" in _written(console) and "gsm8k [b]" in _written(console)
    assert "\x1b[2K" in _written(console).rpartition("prompts")[2]  # the line is erased


def test_a_notebook_keeps_no_progress_among_its_outputs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(command, "_FIRST_LINE_S", 0.0)
    with show_progress("rows", 3) as line:
        assert isinstance(line, command._PlainLine)
        while not line.lines:
            line._ended.wait(0.01)
    assert "rows" in capsys.readouterr().err


def test_a_task_within_another_is_counted_but_not_shown(plain: Console) -> None:
    with show_progress("outer", console=plain), show_progress("inner", 2) as inner:
        inner.advance()
        assert type(inner) is ProgressLine and inner.done == 1
    with show_progress("again", console=plain) as again:
        assert type(again) is not ProgressLine


def test_an_error_ends_the_display(plain: Console) -> None:
    with pytest.raises(ValueError, match="broke"), show_progress("rows", console=plain):
        raise ValueError("broke")
    with show_progress("rows", console=plain) as line:
        assert type(line) is not ProgressLine


def test_track_knows_the_length() -> None:
    with show_progress("outer"):
        assert list(track([1, 2, 3], "rows")) == [1, 2, 3]
        assert list(track(iter("ab"), "letters")) == ["a", "b"]


def test_clock() -> None:
    assert [format_clock(each) for each in (0, 42, 727, 3723)] == ["0:00", "0:42", "12:07", "1:02:03"]


def test_the_command_reaches_processes_that_are_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLCAST_COMMAND", "")
    monkeypatch.chdir(tmp_path)
    assert read_command() == ([], "")
    record_command(["train", "recipe=x", "model.path='a b'"])
    assert "ROLLCAST_COMMAND" in os.environ
    assert read_command() == (["train", "recipe=x", "model.path='a b'"], str(tmp_path))
