"""How commands fail: one message and exit code 2 for what a person can fix, a traceback for bugs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
TRAIN = ("train", "trainer=tp_cli", "runtime=local", "run_dir=runs/x")


@pytest.fixture(autouse=True)
def _installed(cli_plugin: Path) -> None:
    pass


def test_error_is_one_message_as_it_is(run: Run) -> None:
    done = run(*TRAIN, "trainer.what=refuse")
    assert done.code == 2
    assert done.err == "error: rows.jsonl, line 3: [bold]not JSON[/bold]\n"
    assert done.out == ""


@pytest.mark.parametrize("before", [True, False])
def test_traceback_on_request(run: Run, before: bool) -> None:
    arguments = [*TRAIN, "trainer.what=refuse"]
    done = run("--traceback", *arguments) if before else run(*arguments, "--traceback")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert "in launch" in done.err
    assert done.err.endswith("error: rows.jsonl, line 3: [bold]not JSON[/bold]\n")


def test_error_of_ours_in_a_worker_reads_as_it_would_here(run: Run) -> None:
    done = run(*TRAIN, "trainer.what=worker_refuses")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: the reward gave nan",
        "  raised in policy.actor.update on rank 1 (node n0)",
    ]


def test_error_of_others_in_a_worker(run: Run) -> None:
    done = run(*TRAIN, "trainer.what=worker_breaks")
    assert done.code == 2
    first, hint = done.err.splitlines()
    assert first == "error: policy.actor.update failed on rank 1 (node n0): ZeroDivisionError: division by zero"
    assert "--traceback" in hint


@pytest.mark.parametrize("what", ["worker_refuses", "worker_breaks"])
def test_traceback_of_a_worker_on_request(run: Run, what: str) -> None:
    done = run(*TRAIN, f"trainer.what={what}", "--traceback")
    assert done.code == 2
    assert "Traceback of the worker: line 1" in done.err


@pytest.mark.parametrize(("what", "says"), [("disk", "No space left on device"), ("hub", "OSError: no such model")])
def test_error_of_the_operating_system(run: Run, what: str, says: str) -> None:
    done = run(*TRAIN, f"trainer.what={what}")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert says in done.err
    assert done.err.startswith("error: ")


def test_bug_shows_its_traceback(run_apart: Run) -> None:
    done = run_apart(*TRAIN, "trainer.what=bug")
    assert done.code == 1
    assert done.err.startswith("Traceback (most recent call last)")
    assert done.err.rstrip().endswith("ZeroDivisionError: an oversight")


def test_interrupt_names_the_newest_checkpoint(run: Run) -> None:
    Path("runs/x/checkpoints/.writing-step_99").mkdir(parents=True)
    done = run(*TRAIN, "trainer.what=interrupt", "trainer.steps=11")
    assert done.code == 130
    assert done.err == (
        "interrupted; the last checkpoint is runs/x/checkpoints/step_11, and the same command goes on from it\n"
    )


def test_interrupt_without_a_checkpoint(run: Run) -> None:
    done = run(*TRAIN, "trainer.what=interrupt")
    assert done.code == 130
    assert done.err.startswith("interrupted; there is no checkpoint yet")


def test_output_into_a_closed_pipe_is_no_error_message(run_apart: Run, tmp_path: Path) -> None:
    command = f"{sys.executable} -m rollcast plugins | true"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "error:" not in done.stderr
    assert "Traceback" not in done.stderr


# -- plugins that hang or crash -------------------------------------------------------------------


def test_an_import_that_takes_long_is_reported(
    run: Run, make_dist: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr("rollcast.config.assembly._SLOW_IMPORT_S", 0.05)
    monkeypatch.setattr(sys, "tp_told", told, raising=False)
    # It ends when the warning came, so that no pause has to be long enough.
    source = "import sys\nassert sys.tp_told.wait(60)\nfrom tp_cli_code import Trainer\n"
    make_dist("tp-slow", {"rollcast.trainers": {"tp_slow": "tp_slow_code:Trainer"}}, {"tp_slow_code.py": source})

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    handler = Tell(logging.WARNING)
    logging.getLogger("rollcast.config.assembly").addHandler(handler)
    try:
        done = run(*TRAIN, "trainer.name=tp_slow")
    finally:
        logging.getLogger("rollcast.config.assembly").removeHandler(handler)
    assert done.code == 0, done.err
    assert "importing trainer.name=tp_slow, the plugin of tp-slow 1.0 (tp_slow_code:Trainer) has taken 0.05" in done.err


def test_a_crash_of_native_code_shows_the_file(run_apart: Run, make_dist: Callable[..., Path]) -> None:
    source = "import ctypes\nctypes.string_at(0)\n"
    make_dist("tp-crash", {"rollcast.trainers": {"tp_crash": "tp_crash_code:Trainer"}}, {"tp_crash_code.py": source})
    done = run_apart(*TRAIN, "trainer.name=tp_crash")
    assert done.code == -signal.SIGSEGV
    assert "tp_crash_code.py" in done.err


# -- signals ------------------------------------------------------------------------------------

STUCK = """
import sys, time
from rollcast.cli.terminal import stoppable

def hang():
    # Not in one go: Python sees a signal that came in the instant before a blocking call only after it.
    for _ in range(600):
        time.sleep(0.1)

with stoppable():
    try:
        print("ready", flush=True)
        hang()
    except KeyboardInterrupt:
        print("stopping", flush=True)
        if sys.argv[1] == "hangs":
            hang()
    print("stopped", flush=True)
"""


def start_stuck(how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT and nohup SIGHUP, and children inherit that.
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_in_order(number: signal.Signals) -> None:
    process = start_stuck("obeys")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == "stopping\nstopped\n"
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_what_hangs(number: signal.Signals) -> None:
    process = start_stuck("hangs")
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert out == ""
    assert "ended at once" in err


def test_handlers_are_given_back() -> None:
    from rollcast.cli.terminal import stoppable

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stoppable():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    from rollcast.cli.terminal import interrupted, stoppable

    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
            assert not interrupted()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_forked_child_dies_by_the_signal_as_it_would_have() -> None:
    from rollcast.cli.terminal import stoppable

    with stoppable():
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"x")
            for _ in range(600):
                time.sleep(0.05)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


# -- logging ------------------------------------------------------------------------------------


def test_logging_shows_rollcast_from_info_and_others_from_warning(capsys: pytest.CaptureFixture[str]) -> None:
    from rollcast.cli.terminal import set_up_logging

    root = logging.getLogger()
    root.handlers[:] = []
    set_up_logging()
    set_up_logging()
    logging.getLogger("rollcast.trackers").info("ours")
    logging.getLogger("rollcast.trackers").debug("too much")
    logging.getLogger("tp_cli_code").info("theirs")
    logging.getLogger("tp_cli_code").warning("their [warning]")
    assert capsys.readouterr().err == "ours\nwarning: their [warning]\n"


def test_the_log_level_of_the_environment(run_apart: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import logging; from rollcast.cli.terminal import set_up_logging; set_up_logging(); "
        "print(logging.getLogger('rollcast').level, logging.getLogger().level)"
    )
    for name, levels in {"debug": "10 30", "ERROR": "40 40", "": "20 30"}.items():
        monkeypatch.setenv("ROLLCAST_LOGGING_LEVEL", name)
        assert run_apart(python=("-c", code)).out.strip() == levels
    monkeypatch.setenv("ROLLCAST_LOGGING_LEVEL", "loud")
    failed = run_apart("plugins")
    assert failed.code == 2
    assert "ROLLCAST_LOGGING_LEVEL is 'loud'; it has to be DEBUG, INFO, WARNING, ERROR or CRITICAL" in failed.err


def test_importing_the_command_line_sets_no_logging(run_apart: Run) -> None:
    code = "import logging, rollcast.cli.app; print(logging.getLogger().handlers, logging.getLogger('rollcast').level)"
    assert run_apart(python=("-c", code)).out.strip() == "[] 0"
