from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, build_reward_manager
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.function import FunctionReward
from rollcast_rewards.policy import check_value
from rollcast_testing.reward import RewardSuite

SOURCE = """
from dataclasses import dataclass

@dataclass
class State:
    calls: int = 0

def by_sample(sample):
    return 1.0 if sample.response == sample.ground_truth else 0.0

def with_option(sample, *, bonus, scale=1):
    return bonus * scale

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True, "level": extra_info["level"], "why": data_source}

def verl_short(data_source, solution_str, ground_truth, scale=1.0):
    return scale * (solution_str == ground_truth)

def verl_open(data_source, solution_str, ground_truth, **others):
    return float(len(others))

def verl_scalars(data_source, solution_str, ground_truth):
    import numpy as np
    import torch

    return {"score": np.float32(1), "half": np.float32(0.5), "count": np.int64(3), "norm": torch.tensor([2.0]),
            "text": "4", "nothing": None, "list": [1.0]}

def verl_many(data_source, solution_str, ground_truth):
    import torch

    return {"score": 1.0, "norms": torch.ones(2)}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * (solution_str == ground_truth), "level": extra_info["level"]}

async def verl_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "acc": False, **kwargs}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    best = max(map(len, solution_strs))
    return [
        {"score": scale * (text == truth), "best": best, "level": extra["level"]}
        for text, truth, extra in zip(solution_strs, ground_truths, extra_infos)
    ]

async def verl_batch_async(data_sources, solution_strs, ground_truths, extra_infos=None, **kwargs):
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths)]

def verl_batch_short(data_sources, solution_strs, ground_truths):
    return [1.0 for text in solution_strs if text]

def trl(prompts, completions, **kwargs):
    return [0.0] * len(completions)

def no_score(sample):
    return {"value": 1}

def two(sample, other):
    return 0.0

async def waits(sample):
    return 0.0

def _hidden(sample):
    return 0.0

number = 3
"""
SAMPLE = RewardSample("?", "4", ground_truth="4", data_source="here", extra_info={"level": 2})
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(source: str = SOURCE, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return path

    return write_file


class TestFunction(RewardSuite):
    name = "function"
    cases = ((SAMPLE, 1.0), (RewardSample("?", "5", ground_truth="4", extra_info={"level": 1}), 0.0))

    @pytest.fixture(autouse=True, params=["by_sample", "verl", "verl_short", "verl_batch"])
    def _point_to_the_file(self, request: pytest.FixtureRequest, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "options", {"path": f"{write()}:{request.param}"})

    @pytest.fixture
    def reward(self, _point_to_the_file: None) -> BaseReward:
        return FunctionReward(**self.options)


def test_options_reach_the_function(write: Write) -> None:
    path = write()
    assert FunctionReward(f"{path}:with_option", bonus=2, scale=3).score(SAMPLE) == 6
    assert FunctionReward(f"{path}:verl_short", scale=0.5).score(SAMPLE) == 0.5
    assert FunctionReward(f"{path}:verl_open", more=1).score(SAMPLE) == 2


def test_verl_mappings(write: Write) -> None:
    path = write()
    assert FunctionReward(f"{path}:verl").score(SAMPLE) == RewardResult(1.0, True, {"level": 2.0})
    with pytest.raises(RewardError, match="without 'score'; its keys: value"):
        FunctionReward(f"{path}:no_score").score(SAMPLE)


def test_the_function_is_named_apart_from_the_file_as_in_verl(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    assert FunctionReward(str(path)).score(SAMPLE) == RewardResult(1.0, None, {"level": 2.0})
    assert FunctionReward(str(path), name="compute_score", scale=2.0).score(SAMPLE).score == 2.0  # type: ignore[union-attr]
    assert FunctionReward(str(path), name="by_sample").score(SAMPLE) == 1.0
    monkeypatch.syspath_prepend(path.parent)
    assert FunctionReward("mine:by_sample").score(SAMPLE) == 1.0
    # With a colon in the path, name is an option of the function.
    assert FunctionReward(f"{path}:verl_open", name="x").score(SAMPLE) == 2


def test_verl_asynchronous(write: Write) -> None:
    manager = build_reward_manager("naive", FunctionReward(str(write()), name="verl_async", bonus=3))
    assert manager([SAMPLE, SAMPLE]) == [RewardResult(1.0, False, {"bonus": 3.0})] * 2
    manager.close()


@pytest.mark.parametrize("manager", ["naive", "batch"])
@pytest.mark.parametrize("name", ["verl_batch", "verl_batch_async"])
def test_verl_batches(write: Write, manager: str, name: str) -> None:
    reward = FunctionReward(f"{write()}:{name}", **({"scale": 0.5} if name == "verl_batch" else {}))
    assert reward.scores_batches
    built = build_reward_manager(manager, reward)
    wrong = replace(SAMPLE, response="longer")
    right, other = built([SAMPLE, wrong])
    built.close()
    if name == "verl_batch":
        assert right == RewardResult(0.5, None, {"best": 6.0, "level": 2.0})  # it saw both
    assert (right.score, other.score) == (0.5 if name == "verl_batch" else 1.0, 0.0)
    # A manager that scores one sample after the other calls it with batches of one.
    assert build_reward_manager("prime", reward, options={"num_processes": 1})([wrong])[0].score == 0.0


def test_batches_that_do_not_fit(write: Write) -> None:
    path = write()
    with pytest.raises(RewardError, match="returned 1 scores for 2 samples"):
        FunctionReward(f"{path}:verl_batch_short").score_batch([SAMPLE, replace(SAMPLE, response="")])
    with pytest.raises(ConfigError, match=r"takes completions, as TRL's functions do; use reward=trl"):
        FunctionReward(f"{path}:trl")
    with pytest.raises(ConfigError, match="with the options bonsu"):
        FunctionReward(f"{path}:verl_batch", bonsu=1)


def test_numbers_of_numpy_and_torch_in_a_mapping_are_kept(write: Write) -> None:
    path = write()
    found = check_value(FunctionReward(f"{path}:verl_scalars").score(SAMPLE), SAMPLE)
    assert found == RewardResult(1.0, None, {"half": 0.5, "count": 3.0, "norm": 2.0})
    refused = check_value(FunctionReward(f"{path}:verl_many").score(SAMPLE), SAMPLE)
    assert "norms = tensor" in str(refused)
    assert "not a number" in str(refused)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "by_smple",
            r"has no 'by_smple'; its functions: by_sample, compute_score, no_score, trl, two, verl, .*with_option",
        ),
        ("number", "'number' in .* is of type int and cannot be called"),
        ("two", r"mine\.py:two\(sample, other\) cannot be called: missing a required argument: 'other'"),
        ("with_option", "missing a required .*'bonus'"),
    ],
)
def test_functions_that_do_not_fit(write: Write, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.reward_kwargs\.path: .*{complaint}"):
        FunctionReward(f"{write()}:{name}")


def test_options_that_the_function_does_not_take(write: Write) -> None:
    for name in ("by_sample", "verl"):
        with pytest.raises(ConfigError, match="with the options bonsu: got an unexpected keyword argument 'bonsu'"):
            FunctionReward(f"{write()}:{name}", bonsu=1)


def test_files_that_do_not_fit(write: Write, tmp_path: Path) -> None:
    write()
    with pytest.raises(ConfigError, match=r"mien\.py does not exist; did you mean mine\.py\?"):
        FunctionReward(f"{tmp_path}/mien.py:f")
    with pytest.raises(ConfigError, match=r"does not exist; Python files there: mine\.py"):
        FunctionReward(f"{tmp_path}/zzzz:f")
    with pytest.raises(ConfigError, match=r"does not exist; Python files there: none"):
        FunctionReward(f"{tmp_path}/nowhere/zzzz.py:f")
    for path in (":f", "mine.py:", "mine.py:a b"):
        with pytest.raises(ConfigError, match=r"it has to be 'file\.py:function'"):
            FunctionReward(path)
    with pytest.raises(ConfigError, match="is not a Python file"):
        FunctionReward(f"{write(name='mine.txt')}:by_sample")
    with pytest.raises(ConfigError, match="does not import: ZeroDivisionError") as caught:
        FunctionReward(f"{write('1 / 0', 'broken.py')}:f")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ConfigError, match="does not import: SyntaxError"):
        FunctionReward(f"{write('def', 'broken2.py')}:f")
    assert not [name for name in sys.modules if "_rollcast_reward_broken" in name]


def test_a_file_hides_no_module_and_two_of_one_name_differ(write: Write) -> None:
    first = FunctionReward(f"{write('def f(sample): return 1', 'json.py')}:f")
    second = FunctionReward(f"{write('def f(sample): return 2', 'other/json.py')}:f")
    assert (first.score(SAMPLE), second.score(SAMPLE)) == (1, 2)
    import json

    assert json.dumps(1) == "1"


def test_relative_paths_survive_a_change_of_folder(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.chdir(path.parent)
    reward = FunctionReward("mine.py:by_sample")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(reward)).score(SAMPLE) == 1.0


def test_another_process_scores_too(write: Write, tmp_path: Path) -> None:
    reward = FunctionReward(f"{write()}:with_option", bonus=2)
    (tmp_path / "reward.pkl").write_bytes(pickle.dumps((reward, SAMPLE)))
    code = "import pickle, sys; reward, sample = pickle.load(open(sys.argv[1], 'rb')); print(reward.score(sample))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "reward.pkl")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "2"
