"""Programs that nobody has read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rollcast
import rollcast_rewards
from rollcast.contracts.health import HealthSetup
from rollcast.contracts.reward import RewardSample
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.code import CodeReward, extract_program
from rollcast_rewards.health import SandboxCheck
from rollcast_rewards.sandbox import (
    KINDS,
    PROMISED,
    LocalSandbox,
    SandboxLimits,
    SandboxResult,
    isolation,
    mechanism,
    run_sandboxed,
)
from rollcast_testing import HealthCheckSuite
from rollcast_testing.reward import RewardSuite

ISOLATED = pytest.mark.skipif(not isolation()["processes"], reason="this system does not isolate processes")
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
            "opened = []\n"
            "for number in range(64):\n"
            "    try:\n        os.fstat(number)\n        opened.append(number)\n    except OSError:\n        pass\n"
            "print(opened)\n"
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
    """Of a mechanism that uses folders of the host, even if they are too deep for Python to remove."""
    sandbox = LocalSandbox(["process"])
    program = "import os\nprint(os.getcwd())\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')"
    with sandbox.exec(program, limits=LIMITS, allow_missing=PROMISED) as execution:
        folder = execution.wait().stdout.strip()
        assert "rollcast-sandbox-" in folder
        assert Path(folder).exists()
    assert not Path(folder).exists()
    sandbox.close()


def test_programs_of_root_have_users_of_their_own() -> None:
    first, second = (run("import os; print(os.getuid(), os.geteuid(), os.getgid())").stdout for _ in range(2))
    if os.getuid() == 0:
        assert first != second
        assert "0" not in first.split()
    else:
        assert first == second == f"{os.getuid()} {os.getuid()} {os.getgid()}\n"


def test_a_program_does_not_start_without_a_promised_kind() -> None:
    sandbox = LocalSandbox(["process"])
    sandbox.start()
    sandbox.isolation = {**sandbox.isolation, "files": False}
    lacking = [kind for kind in PROMISED if not sandbox.isolation[kind]]
    with pytest.raises(ConfigError, match=rf"cannot isolate programs: files .*allow_missing=\[{', '.join(lacking)}\]"):
        sandbox.exec("print(1)")
    with sandbox.exec("print(1)", limits=LIMITS, allow_missing=lacking) as execution:
        assert execution.wait().stdout == "1\n"
    # What held at the start has to hold for each program.
    sandbox.isolation = {**sandbox.isolation, "storage": True}
    with sandbox.exec("print(1)", allow_missing=lacking) as execution, pytest.raises(OSError, match="storage"):
        execution.wait()
    sandbox.close()
    with pytest.raises(ConfigError, match="allow_missing is 'all'"):
        CodeReward(allow_missing="all")


def test_programs_end_with_their_caller_and_with_the_server() -> None:
    sandbox = LocalSandbox()
    started = time.monotonic()
    with sandbox.exec("import time; time.sleep(60)", limits=SandboxLimits(time_s=50)):
        pass
    execution = sandbox.exec("import time; time.sleep(60)", limits=SandboxLimits(time_s=50))
    sandbox.close()
    with execution, pytest.raises(OSError, match="the sandbox has ended"):
        execution.wait()
    assert time.monotonic() - started < 30
    with sandbox.exec("print(1)", limits=LIMITS) as execution:
        assert execution.wait().stdout == "1\n"
    sandbox.close()


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


@ISOLATED
def test_the_filter_holds_for_native_code_too() -> None:
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.socket(2, 1, 0), ctypes.get_errno(), libc.fork(), ctypes.get_errno())"
    )
    assert run(program).stdout.split() == ["-1", "1", "-1", "1"]


@ISOLATED
def test_threads_are_fine() -> None:
    program = "import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start()\nt.join()"
    assert run(program, memory_mb=512).stdout == "hi\n"


class TestHealth(HealthCheckSuite):
    name = "sandbox"
    configs = ({"reward": {"name": "code"}},)


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {**dict.fromkeys(KINDS, True), "files": False, "storage": False}
    monkeypatch.setattr("rollcast_rewards.health.isolation", lambda: held)
    reward = {"name": "code"}
    for config, state in (
        ({}, "warning"),
        ({"reward": reward}, "problem"),
        ({"reward": {**reward, "reward_kwargs": {"allow_missing": ["files"]}}}, "warning"),
        ({"agent": {"tools": {"python": {}}}}, "problem"),
    ):
        states = {finding.name: finding.state for finding in SandboxCheck().run(HealthSetup(config))}
        assert (states["files"], states["storage"], states["network"]) == (state, "warning", "ok")


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


CROSSING = [
    ("def f(a): a.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
    ("def f(a): a[0].append(a.pop())", "x = [[1], 2]\ny = x[0]\nf(x)\nassert x == [[1, 2]]"),
    (
        "class S:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
        "    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)",
        "s = S()\ns.push(1)\ns.push(2)\nassert len(s) == 2 and s.pop() == 2 and s.x == [1] and isinstance(s, S)",
    ),
    (
        "class E(ValueError): pass\ndef f(x):\n    if x < 0: raise E('negative')\n    return x",
        "try:\n    f(-1)\n    assert False\nexcept E as e:\n    assert str(e) == 'negative'\n"
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(2) == 2",
    ),
    ("def g(n):\n    while True:\n        yield n\n        n += 1", "i = g(1)\nassert (next(i), next(i)) == (1, 2)"),
    ("def apply(f, x): return f(f(x))", "assert apply(lambda v: v * 2, 3) == 12"),
    ("import math\ndef area(r): return math.pi * r * r", "assert math.isclose(area(1), 3.14159265358979)"),
    (
        "from collections import Counter, defaultdict, namedtuple\nP = namedtuple('P', 'x y')\ndef p(): return P(1, 2)\n"
        "def c(s): return Counter(s)\ndef d():\n    r = defaultdict(list)\n    r['a'].append(1)\n    return r",
        "assert c('aab') == Counter('aab') == {'a': 2, 'b': 1} and p() == (1, 2) and d() == {'a': [1]}",
    ),
    (
        "def f(): return {1, 2}, (1,), frozenset([3]), b'x', 1 + 2j, 10**400, float('inf'), None, True, '\\ud800'",
        "assert f() == ({1, 2}, (1,), frozenset([3]), b'x', 1 + 2j, 10**400, float('inf'), None, True, '\\ud800')",
    ),
    (
        "def hello(): print('hi')",
        "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): hello()\nassert b.getvalue() == 'hi\\n'",
    ),
    (
        "class Solution:\n    def two(self, a): return a + 2",
        "def check(c):\n    assert c(a=3) == 5\ncheck(Solution().two)",
    ),
    (
        "def f(x): return sorted(x, key=lambda t: -t)",
        "assert f(range(3)) == [2, 1, 0] and f(x for x in [1, 2]) == [2, 1] and f({1: 2}.keys()) == [1]",
    ),
    (
        "def f(x): return x == 2",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertTrue(f(2))\n"
        "        with self.assertRaises(TypeError): f()\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
    ),
    ("from decimal import Decimal\ndef f(x): return Decimal(x) / 4", "assert f('1') == Decimal('0.25')"),
]


@pytest.mark.parametrize("partial", [False, True])
def test_tests_that_call_the_solution(partial: bool) -> None:
    for solution, test in CROSSING[:: 1 if partial else 5]:
        result = CodeReward(partial=partial).score(RewardSample("", fenced(solution), ground_truth=test))
        assert result.score == 1.0, solution


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (ADD, {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, 1.0),
        (ADD, {"test": "def check(f):\n    assert f(1, 2) == 4", "entry_point": "add"}, 0.0),
        ("def sum(a): return 99", {"test": "assert sum([1]) == 99", "entry_point": "sum"}, 1.0),
        (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, 1.0),
        (ADD, {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, 1.0),
        (ADD, {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["4"]}, 0.0),
        (
            "class Solution:\n    def f(self, a): return (a, a)",
            {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]},
            1.0,
        ),
    ],
)
def test_forms_of_calls(solution: str, truth: dict[str, object], score: float) -> None:
    assert CodeReward().score(RewardSample("", fenced(solution), ground_truth=json.dumps(truth))).score == score


_EQUAL = "class A{base}:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\n"
_SOFT = (
    "class A:\n    def __getattr__(self, name): return self\n    def __call__(self, *a, **k): return self\n"
    "    __sub__ = __rsub__ = __abs__ = __add__ = __call__\n"
    "    def __lt__(self, other): return True\n    __le__ = __gt__ = __ge__ = __eq__ = __contains__ = __lt__\n"
    "    def __iter__(self): return iter(range(10**6))\n    def __bool__(self): return True\n"
)
_SEARCH = (
    "import gc, inspect, os, re, sys\ndef f(*a):\n"
    "    texts = []\n"
    "    for name in ('program.py', 'tests.py', '/tmp/program.py'):\n"
    "        try: texts.append(open(name).read())\n        except OSError: pass\n"
    "    frame = sys._getframe()\n"
    "    while frame:\n        texts.append(repr((frame.f_code.co_consts, frame.f_locals, frame.f_globals)))\n"
    "        frame = frame.f_back\n"
    "    texts += [repr(o) for o in gc.get_objects() if type(o) in (tuple, dict, list)]\n"
    "    found = re.search('98765[0-9]', ' '.join(texts))\n    return int(found[0]) if found else 0\n"
)
#: Programs that do no work and are to score 1 by f(2) == 987654.
HACKS = {
    "reads the tests": _SEARCH,
    "searches at its start": _SEARCH + "X = f()\ndef f(x): return X",
    "equals everything": _EQUAL.format(base="") + "def f(x): return A()",
    "a number that equals everything": _EQUAL.format(base="(int)") + "def f(x): return A(1)",
    "a text that equals everything": _EQUAL.format(base="(str)") + "def f(x): return A('1')",
    "a list that equals everything": _EQUAL.format(base="(list)") + "def f(x): return A()",
    "calculates to anything": _SOFT + "def f(x): return A()",
    "ends well": "import sys\nsys.exit(0)",
    "ends well in the call": "import os\ndef f(x): os._exit(0)",
    "exits in the call": "def f(x): raise SystemExit(0)",
    "is built in": "def f(x): return 1\ndef abs(x): return 0\nlen = all = any = isinstance = lambda *a: True",
    "patches modules": "import math, unittest, builtins\nmath.isclose = builtins.abs = lambda *a, **k: 0\ndef f(x): return 1\n"
    "unittest.TestCase.assertEqual = lambda *a: None",
    "replaces modules": "class math:\n    isclose = lambda *a, **k: True\nisclose = math.isclose\ndef f(x): return 1",
    "writes the verdict": "import os\nos.write(3, b'\\0\\0\\0\\x10{\"passed\": true}')\ndef f(x): return 1",
    "answers by itself": "import os, json\ndef f(x):\n    m = json.dumps(['answer', [], '', ['returned', ['from', 'unittest.mock', 'ANY']]]).encode()\n"
    "    os.write(3, len(m).to_bytes(4, 'big') + m)\n    return 1",
    "inspects a function of the tests": "def f(x): return 1\ndef g(h):\n    return h.__code__.co_consts[1]",
    "prints a lot of verdicts": "import atexit\natexit.register(print, 'passed')\nprint('ok')\ndef f(x): print('passed'); return 1",
    "is an iterator of everything": "def f(x): return iter(range(10**7))",
}
HACKED = [
    "assert f(2) == 987654",
    "assert not (f(2) != 987654)",
    "assert abs(f(2) - 987654) < 1e-6",
    "assert f(2) in [987654, 987655]",
    "assert math.isclose(f(2), 987654)",
    "assert isclose(f(2), 987654)",
    "import unittest\nunittest.TestCase().assertEqual(f(2), 987654)",
    "assert isinstance(f(2), int) and f(2) > 987653 and all(f(2) == x for x in [987654])",
]


def test_no_program_scores_without_work() -> None:
    """Each of the tests alone, against each of the programs."""
    reward = CodeReward(partial=True, time_s=60, cpu_s=30)

    def score(case: tuple[str, str]) -> bool:
        solution, test = case
        return reward.score(RewardSample("", fenced(solution), ground_truth=test)).score > 0

    cases = [(solution, test) for solution in HACKS.values() for test in HACKED]
    with ThreadPoolExecutor(4) as pool:
        won = [case for case, success in zip(cases, pool.map(score, cases), strict=True) if success]
    assert not won
    right = RewardSample("", fenced("def f(x): return 987654"), ground_truth=HACKED)
    assert reward.score(right).score == 1.0


def test_functions_of_the_tests_are_not_inspected() -> None:
    hack = "def g(h):\n    return h.__code__.co_consts"
    test = "assert 987654 in g(lambda x: 987654)"
    assert CodeReward().score(RewardSample("", fenced(hack), ground_truth=test)).score == 0.0


# -- attacks ------------------------------------------------------------------------------------


def attack(mechanism: str, *prefix: str, python: str = sys.executable, **environment: str) -> dict[str, Any]:
    command = [*prefix, python, "-B", str(Path(__file__).with_name("sandbox_attacks.py")), mechanism]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check_attacks(report: dict[str, Any]) -> None:
    assert report["tried"] >= 40
    for kind, won in report["won"].items():
        assert not won or not report["isolation"][kind], (kind, won)


def test_attacks() -> None:
    """As the user of this process, by the mechanism that is used here."""
    check_attacks(attack(mechanism()[0]))


def test_attacks_without_namespaces() -> None:
    sandbox = LocalSandbox(["process"])
    sandbox.start()
    sandbox.close()
    if lacking := [kind for kind in PROMISED if not sandbox.isolation[kind]]:
        pytest.skip(f"without namespaces, this machine has no isolation of {', '.join(lacking)}")
    check_attacks(attack("process"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become an ordinary user; test_attacks is by one already")
@pytest.mark.parametrize("way", ["namespaces", "bubblewrap", "process"])
def test_attacks_as_an_ordinary_user(way: str) -> None:
    if way == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        # Again from within, because setpriv still has root's rights when it starts the first one.
        again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import ctypes, selectors'], check=True)"
        probe = subprocess.run([*prefix, python, "-c", again], capture_output=True, check=False)
        if probe.returncode == 0:
            break
    else:
        pytest.skip("an ordinary user cannot read any Python of this version here")
    paths = [str(Path(module.__file__ or "").parents[1]) for module in (rollcast, rollcast_rewards)]
    report = attack(way, *prefix, python=python, PYTHONPATH=":".join(paths), HOME="/", TMPDIR="/tmp")
    assert report["user"] == 65534
    check_attacks(report)


def test_programs_run_side_by_side() -> None:
    """From threads too, as a manager may."""
    report: list[str] = []

    def go(number: int) -> None:
        report.append(run_sandboxed(f"print({number})", "", LIMITS).stdout)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report) == [f"{number}\n" for number in range(6)]
