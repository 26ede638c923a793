"""Programs that verl's functions run in the scoring process run in the sandbox; verl is a stand-in here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.reward import RewardSample, RewardSettings, build_reward, build_reward_manager
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.sandbox import PROMISED, isolation

SCORES = """
def default_compute_score(data_source, solution_str, ground_truth, extra_info=None):
    from . import prime_code

    return float(prime_code.compute_score(solution_str, ground_truth, continuous=True)[0])


def strict(data_source, solution_str, ground_truth, extra_info=None):
    from verl.utils.reward_score.prime_code import compute_score

    return compute_score(solution_str, ground_truth)[0]
"""
IN_PROCESS = """
def compute_score(completion, test_cases, continuous=False):
    exec(completion.split("```python")[-1].split("```")[0])
    return 1.0, None
"""


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``verl`` whose scoring of programs runs them in the process; the file ``escaped`` shows that it did."""
    package = tmp_path / "verl" / "utils" / "reward_score"
    (package / "prime_code").mkdir(parents=True)
    for folder, text in ((package, SCORES), (package / "prime_code", IN_PROCESS)):
        (folder / "__init__.py").write_text(text)
    for folder in (package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"}
    for name in theirs:
        del sys.modules[name]
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.update(theirs)


def sample(program: str, tests: Any) -> RewardSample:
    return RewardSample("", f"So:\n```python\n{program}\n```", json.dumps(tests), "codecontests")


def missing() -> list[str]:
    return [kind for kind in PROMISED if not isolation()[kind]]


@pytest.mark.parametrize("imports_first", [False, True])
def test_a_program_runs_in_the_sandbox(verl: Path, imports_first: bool) -> None:
    if imports_first:
        __import__("verl.utils.reward_score.prime_code")
    reward = build_reward("verl", {"allow_missing": missing()})
    escape = f"open({str(verl / 'escaped')!r}, 'w').write('x')\nprint(int(input()) + 1)"
    printed = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    called = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"}
    add = "def add(a, b):\n    return a + b"
    cases = [
        (sample("print(int(input()) + 1)", printed), 0.5),
        (RewardSample("", "print(int(input()) + 1)", printed, "codecontests"), 0.5),
        (sample(add, called), 1.0),
        (sample(add.replace("+", "-"), called), 0.0),
        (sample(escape, printed), 0.0),
    ]
    assert [reward.score(each) for each, _ in cases] == [score for _, score in cases]
    assert not (verl / "escaped").exists()
    strict = build_reward("verl", {"function": "verl.utils.reward_score:strict", "allow_missing": missing()})
    assert [strict.score(each) for each, _ in cases] == [0.0, 0.0, 1.0, 0.0, 0.0]
    with pytest.raises(RewardError, match="code needs tests as ground truth"):
        reward.score(sample(add, {"inputs": []}))
    with pytest.raises(ConfigError, match="allow_missing"):
        build_reward("verl", {"allow_missing": ["nothing"]}).score(cases[0][0])


def test_a_program_runs_in_the_sandbox_of_another_process(verl: Path) -> None:
    reward = build_reward("verl", {"allow_missing": missing()})
    manager = build_reward_manager("prime", reward, RewardSettings(), {"num_processes": 1})
    tests = {"inputs": ["1"], "outputs": ["2"]}
    escape = sample(f"open({str(verl / 'escaped')!r}, 'w').write('x')\nprint(2)", tests)
    try:
        results = manager([sample("print(2)", tests), escape])
    finally:
        manager.close()
    assert [result.score for result in results] == [1.0, 0.0]
    assert not (verl / "escaped").exists()
