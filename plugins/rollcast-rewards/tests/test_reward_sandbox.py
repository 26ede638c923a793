"""Programs that nobody has read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rollcast.contracts.reward import RewardSample
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.code import CodeReward, extract_program
from rollcast_rewards.sandbox import SandboxLimits, SandboxResult, isolation, run_sandboxed
from rollcast_testing.reward import RewardSuite

FILTERED = pytest.mark.skipif(not isolation()["filter"], reason="this system permits no filter of system calls")
LIMITS = SandboxLimits(time_s=20, cpu_s=20)


def run(program: str, **limits: float) -> SandboxResult:
    return run_sandboxed(program, "", SandboxLimits(**{"time_s": 20, "cpu_s": 20, **limits}))


def test_a_program_reads_and_prints() -> None:
    result = run_sandboxed("import sys\nprint(input().upper() + 'é')\nprint('oh', file=sys.stderr)", "abcü\n")
    assert (result.status, result.stdout, result.stderr) == ("ok", "ABCÜé\n", "oh\n")


@pytest.mark.parametrize(
    ("program", "limits", "status"),
    [
        ("raise ValueError", {}, "error"),
        ("import sys; sys.exit(3)", {}, "error"),
        ("this is no Python", {}, "error"),
        ("import os; os._exit(120)", {}, "error"),
        ("while True: pass", {"cpu_s": 1}, "cpu"),
        ("import time; time.sleep(100)", {"time_s": 1}, "time"),
        ("x = bytearray(1 << 30)", {"memory_mb": 256}, "memory"),
        ("while True: print('x' * 1000)", {"output_kb": 16}, "output"),
        ("open('big', 'w').write('x' * 100_000)", {"output_kb": 16}, "output"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", {"cpu_s": 1}, "cpu"),
    ],
)
def test_how_programs_end(program: str, limits: dict[str, float], status: str) -> None:
    result = run(program, **limits)
    assert result.status == status, result
    assert len(result.stdout) <= limits.get("output_kb", 256) * 1024


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        result = run(
            "import os, sys\n"
            "print(sorted(os.environ))\n"
            "print([int(name) for name in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + name)])\n"
            "print(os.listdir('.'), sys.argv)\n"
            f"print({str(Path(__file__).parent)!r} in sys.path)\n"
        )
    finally:
        os.close(read)
        os.close(write)
    environment, descriptors, folder, path = result.stdout.splitlines()
    assert environment == "['LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS']"
    assert descriptors == "[0, 1, 2]"
    assert folder == "[] ['program.py']"
    assert path == "False"


def test_folders_are_removed() -> None:
    folder = run("import os\nopen('a', 'w').write('b')\nprint(os.getcwd())").stdout.strip()
    assert "rollcast-sandbox-" in folder
    assert not Path(folder).parent.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_root_goes_on_as_nobody(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    tmp_path.chmod(0o755)
    assert run("import os; print(os.getuid(), os.geteuid())").stdout == "65534 65534\n"
    assert "PermissionError" in run(f"open({str(tmp_path / 'mine')!r}, 'w')").stderr
    assert "PermissionError" in run(f"import os; os.remove({str(tmp_path / 'mine')!r})").stderr
    assert (tmp_path / "mine").read_text() == "mine"


def test_no_network() -> None:
    """By the system's means where it permits them, else by Python's own."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('through')")
    assert "through" not in result.stdout
    assert result.status == "error"


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.kill(PARENT, 0)",
        "import os\nos.execv('/bin/true', ['true'])",
    ],
)
def test_no_other_processes(program: str) -> None:
    assert "PermissionError" in run(program.replace("PARENT", str(os.getpid()))).stderr


@FILTERED
def test_the_filter_holds_for_native_code_too() -> None:
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.socket(2, 1, 0), ctypes.get_errno(), libc.fork(), ctypes.get_errno())"
    )
    assert run(program).stdout.split() == ["-1", "1", "-1", "1"]


@FILTERED
def test_threads_are_fine() -> None:
    program = "import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start()\nt.join()"
    assert run(program, memory_mb=512).stdout == "hi\n"


def test_limits_have_to_be_positive() -> None:
    with pytest.raises(ConfigError, match="memory_mb is 0"):
        SandboxLimits(memory_mb=0)


# -- the reward ---------------------------------------------------------------------------------


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


ADD = "def add(a, b):\n    return a + b"
ASSERTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"
PAIRS = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11"]}
SUM = "print(sum(map(int, input().split())))"


class TestCode(RewardSuite):
    name = "code"
    max_seconds = 30.0
    cases = (
        (RewardSample("add", fenced(ADD), ground_truth=ASSERTS), 1.0),
        (RewardSample("add", fenced(ADD, "py"), ground_truth=[ASSERTS, "assert add(-1, 1) == 0"]), 1.0),
        (RewardSample("add", fenced(ADD.replace("+", "-")), ground_truth=ASSERTS), 0.0),
        (RewardSample("add", ADD, ground_truth=ASSERTS), 0.0),
        (RewardSample("add", fenced(SUM), ground_truth=PAIRS), 1.0),
        (RewardSample("add", fenced("print(3)"), ground_truth=PAIRS), 0.0),
        # It ends well, and before the tests.
        (RewardSample("add", fenced("import sys; sys.exit(0)"), ground_truth=ASSERTS), 0.0),
    )


def test_partial_scores_and_tests_as_json() -> None:
    import json

    sample = RewardSample("add", fenced("print(3)"), ground_truth=json.dumps(PAIRS))
    result = CodeReward(partial=True).score(sample)
    assert (result.score, result.correct, result.extra) == (0.5, False, {"passed": 0.5})
    result = CodeReward(max_tests=1).score(sample)
    assert (result.score, result.correct) == (1.0, True)


def test_the_last_block_counts() -> None:
    text = f"{fenced('first')}\n{fenced('ls', 'bash')}\n{fenced('second')}"
    assert extract_program(text) == "second\n"
    assert extract_program("```python\nnever ends") is None


@pytest.mark.parametrize("truth", [None, "", [], {"inputs": ["1"], "outputs": []}, 3, [""]])
def test_ground_truths_without_tests(truth: object) -> None:
    with pytest.raises(RewardError, match="code needs tests as ground truth"):
        CodeReward().score(RewardSample("add", fenced(ADD), ground_truth=truth))


def test_programs_run_side_by_side() -> None:
    """From threads too, as a manager may."""
    found: list[str] = []

    def go(number: int) -> None:
        found.append(run_sandboxed(f"print({number})", "", LIMITS).stdout)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{number}\n" for number in range(6)]
