"""TRL's reward functions: what they get, what their results become, and parity with TRL's own sums."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollcast.contracts.reward import (
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward_manager,
    rewards,
)
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.trl import TrlReward
from rollcast_testing.reward import RewardSuite

SOURCE = """
import asyncio
import functools

seen = []

def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    seen.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids,
                 "state": (trainer_state.global_step, trainer_state.max_steps), **kwargs})
    return [1.0] * len(completions)

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def only_even(completions, number, **kwargs):
    return [None if n % 2 else float(n) for n in number]

def right(completions, answer):
    return [1.0 if text == expected else 0.0 for text, expected in zip(completions, answer)]

def right_too(completions, answer, **kwargs):
    return right(completions, answer)

async def slow(completions, **kwargs):
    await asyncio.sleep(0.05)
    return [None if "x" in text else 0.5 for text in completions]

async def slow_too(prompts, completions, **kwargs):
    await asyncio.sleep(0.05)
    return [0.25 for _ in prompts]

def logs(completions, log_extra, log_metric, **kwargs):
    log_extra("extracted", [text[:1] for text in completions])
    log_metric("calls", 1.0)
    log_metric("calls", 3.0)
    return [0.0] * len(completions)

class Longer:
    def __init__(self, limit):
        self.limit = limit

    async def __call__(self, completions, **kwargs):
        return [float(len(text) > self.limit) for text in completions]

longer = Longer(2)
half = functools.partial(length)

def fails_at_x(completions, **kwargs):
    return [{"a": 1.0, "b": 0.0}[text] for text in completions]

def too_few(completions, **kwargs):
    return [1.0 for text in completions if text != "b"]

def number_alone(completions, **kwargs):
    return 1.0

def not_a_number(completions, **kwargs):
    return ["high" if text == "b" else 1.0 for text in completions]

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def needs(completions, solution, **kwargs):
    return [0.0] * len(completions)

def short_column(completions, log_extra, **kwargs):
    log_extra("column", [1])
    return [0.0] * len(completions)

def asks_epoch(completions, trainer_state, **kwargs):
    return [float(trainer_state.epoch)] * len(completions)

def by_sample(sample):
    return 0.0

async def blocks(completions, **kwargs):
    import time
    time.sleep(3)
    return [0.0] * len(completions)

async def hangs(completions, **kwargs):
    await asyncio.sleep(60)
"""
Build = Callable[..., TrlReward]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    (tmp_path / "funcs.py").write_text(SOURCE)

    def build_reward(*names: str, **options: Any) -> TrlReward:
        return TrlReward([f"{tmp_path}/funcs.py:{name}" for name in names], **options)

    return build_reward


def texts(*responses: str, **columns: Sequence[Any]) -> list[RewardSample]:
    rows = [{name: values[row] for name, values in columns.items()} for row in range(len(responses))]
    return [
        RewardSample("decoded", text, response_ids=[7, 8], extra_info=row, raw_prompt="raw", step=3, total_steps=9)
        for text, row in zip(responses, rows, strict=True)
    ]


def scored(
    reward: TrlReward, samples: Sequence[RewardSample], manager: str = "naive", **settings: Any
) -> list[RewardResult]:
    built = build_reward_manager(manager, reward, RewardSettings(**settings))
    try:
        return built(samples)
    finally:
        built.close()


def seen_by(reward: TrlReward) -> dict[str, Any]:
    function = reward._functions[0]._call
    found: dict[str, Any] = function.__globals__["seen"][-1]
    return found


class TestTrl(RewardSuite):
    name = "trl"
    cases = (
        (RewardSample("?", "4", extra_info={"answer": "4"}), 1.0),
        (RewardSample("?", "5", extra_info={"answer": "4"}), 0.0),
    )

    @pytest.fixture(autouse=True)
    def _point_to_the_file(self, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "options", {"reward_funcs": f"{tmp_path}/funcs.py:right"})


def test_texts_and_columns_as_lists(build: Build) -> None:
    reward = build("everything")
    sample = RewardSample("decoded", "b", ground_truth="T", data_source="here", response_ids=[5], raw_prompt="raw")
    assert [result.score for result in scored(reward, [*texts("a", number=[4]), sample])] == [1.0, 1.0]
    assert seen_by(reward) == {
        "prompts": ["raw", "raw"],
        "completions": ["a", "b"],
        "completion_ids": [[7, 8], [5]],
        "state": (3, 9),
        "number": [4, None],
        "ground_truth": [None, "T"],
        "data_source": ["", "here"],
    }


def test_messages_where_the_prompt_is_one(build: Build) -> None:
    reward = build("everything")
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    called = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "4"}]
    turns = [*prompt, *called, {"role": "assistant", "content": "done"}]
    other = [{"role": "user", "content": "began otherwise"}, {"role": "assistant", "content": "x"}]
    samples = [
        RewardSample("decoded", "a", raw_prompt=prompt, extra_info={"level": 1}),
        RewardSample("decoded", "done", raw_prompt=prompt, extra_info={"messages": turns}),
        RewardSample("decoded", "x", raw_prompt=prompt, extra_info={"messages": other}),
    ]
    scored(reward, samples)
    found = seen_by(reward)
    assert found["prompts"] == [prompt, prompt, other[:1]]
    assert found["completions"] == [[{"role": "assistant", "content": "a"}], turns[2:], other[1:]]
    assert found["level"] == [1, None, None]
    assert "messages" not in found


def test_a_prefill_is_the_beginning_of_the_completion(build: Build) -> None:
    reward = build("everything")
    prompt = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "It"}]
    reply = {"role": "assistant", "content": " is"}
    turns = [*prompt, reply, {"role": "tool", "content": "4"}]
    samples = [
        RewardSample("decoded", " is", raw_prompt=prompt),
        RewardSample("decoded", "x", raw_prompt=prompt, extra_info={"messages": turns}),
    ]
    scored(reward, samples)
    found = seen_by(reward)
    whole = {"role": "assistant", "content": "It is"}
    assert found["prompts"] == [prompt[:1]] * 2
    assert found["completions"] == [[whole], [whole, turns[-1]]]


def test_none_leaves_only_that_function_out(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    reward = build("only_even", "slow", reward_weights=[2.0, 10.0])
    with caplog.at_level(logging.WARNING):
        results = scored(reward, texts("a", "a", "x", "x", number=[0, 1, 2, 3]))
    assert [result.score for result in results] == [5.0, 5.0, 4.0, 0.0]
    assert [dict(result.extra) for result in results] == [
        {"only_even": 0.0, "slow": 0.5},
        {"only_even": None, "slow": 0.5},
        {"only_even": 2.0, "slow": None},
        {"only_even": None, "slow": None},
    ]
    assert [result.dropped for result in results] == [False, False, False, True]
    assert results[3].error == "every function of reward trl returned None"
    assert "None for 1 of 4 samples" in caplog.text
    assert "completions='x', completion_ids=[7, 8], number=3" in caplog.text


def test_asynchronous_functions_run_together(build: Build) -> None:
    reward = build("slow", "slow_too", "longer", "half")
    assert reward.is_async
    built = build_reward_manager("naive", reward)
    start = time.perf_counter()
    results = built(texts("a", "abc"))
    seconds = time.perf_counter() - start
    built.close()
    assert [result.score for result in results] == [1.75, 4.75]
    assert [*results[0].extra] == ["slow", "slow_too", "longer", "half"]
    assert seconds < 5  # of a hang; both wait for 0.05 s at once
    assert not [
        thread for thread in threading.enumerate() if thread.name == "rollcast-reward-batches" and not thread.daemon
    ]


@pytest.mark.parametrize("manager", ["prime", "remote", "batch"])
def test_other_managers(build: Build, manager: str) -> None:
    results = scored(build("slow", "logs"), texts("a", "x"), manager)
    assert [result.score for result in results] == [0.5, 0.0]
    assert [result.columns for result in results] == [{"extracted": "a"}, {"extracted": "x"}]


def test_several_groups_are_in_flight_at_once(build: Build) -> None:
    built = build_reward_manager("naive", build("slow"))
    assert built.is_concurrent
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda: found.extend(result.score for result in built(texts("a", "b"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    built.close()
    assert found == [0.5] * 16


def test_logged_columns_and_metrics(build: Build) -> None:
    first, second = scored(build("logs"), texts("ab", "cd"))
    assert (first.columns, second.columns) == ({"extracted": "a"}, {"extracted": "c"})
    assert dict(first.extra) == {"logs": 0.0, "logs/calls": 2.0}


def test_correct_is_what_the_first_applicable_function_says(build: Build) -> None:
    samples = texts("a", "a", number=[0, 1])
    assert [each.correct for each in scored(build("only_even", "everything"), samples)] == [False, True]
    assert [each.correct for each in scored(build("only_even", correct_from=0.0), samples[:1])] == [True]


def test_errors_name_function_sample_and_arguments(build: Build) -> None:
    with pytest.raises(RewardError) as caught:
        scored(build("length", "fails_at_x"), texts("a", "b", "x", "a", number=[0, 1, 2, 3]))
    text = str(caught.value)
    assert "fails_at_x (funcs.py:fails_at_x) raised KeyError: 'x'" in text
    assert "called with prompts: 1 x str, completions: 1 x str, completion_ids: 1 x list, number: 1 x int" in text
    assert "response: 'x'" in text


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("too_few", r"too_few .* returned 0 rewards for 1 completions.*called with prompts: 1 x str"),
        ("number_alone", r"returned 1\.0 \(float\); it has to return a list with one number or None for each"),
        ("not_a_number", r"gave not_a_number = 'high', which is not a number"),
        ("nan", r"gave nan = nan, which is not finite"),
        ("needs", r"needs solution, and the dataset has no such column; its columns: answer"),
        ("short_column", r"logged 1 values in the column 'column' by log_extra, for 2"),
        ("asks_epoch", r"trainer_state has no 'epoch' in rollcast; it has global_step, max_steps"),
    ],
)
def test_results_that_do_not_fit(build: Build, name: str, complaint: str) -> None:
    samples = texts("a", "b", answer=["a", "b"])
    if name == "short_column":
        with pytest.raises(RewardError, match=complaint):
            build(name).score_batch(samples)
        return
    with pytest.raises(RewardError, match=complaint):
        scored(build(name), samples)


def test_a_bad_sample_is_found_in_its_batch(build: Build) -> None:
    results = scored(build("fails_at_x"), texts("a", "b", "x", "a"), on_error="zero", max_bad_share=0.5)
    assert [result.score for result in results] == [1.0, 0.0, 0.0, 1.0]
    assert [bool(result.error) for result in results] == [False, False, True, False]


@pytest.mark.parametrize("name", ["hangs", "blocks"])
def test_late_functions_end_and_leave_the_next_batch_alone(build: Build, name: str) -> None:
    built = build_reward_manager("naive", build(name), RewardSettings("zero", 1.0, timeout_s=0.2))
    for _ in range(2):
        results = built(texts("a", "b"))
        assert ["took longer than reward.timeout_s" in result.error for result in results] == [True, True]
    built.close()


def test_names_that_do_not_fit(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward_funcs is empty"):
        TrlReward([])
    with pytest.raises(ConfigError, match=r"reward_weights is \[1\.0\]; it needs one number for each of"):
        build("length", "right", reward_weights=[1.0])
    with pytest.raises(ConfigError, match=r"reward_weights is \['a', True\]"):
        build("length", "right", reward_weights=["a", True])
    with pytest.raises(ConfigError, match=r"reward_funcs\[0\]: .* has no 'lenght'"):
        build("lenght")
    with pytest.raises(ConfigError, match=r"does not take completions.*belong to reward=function"):
        build("by_sample")
    with pytest.raises(
        ConfigError, match=r"reward_funcs\[0\]: the module nowhere\.at\.all does not import.*nowhere.at.all.py"
    ):
        TrlReward(["nowhere.at.all:f"])
    with pytest.raises(ConfigError, match=r"is a folder; a reward model is reward_model\.enable=true"):
        TrlReward([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"math is a reward with settings"):
        TrlReward(["math"])


def test_modules_and_entry_points(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    reward = TrlReward(["funcs:length", "funcs:length"])
    assert dict(scored(reward, texts("abc"))[0].extra) == {"length": 3.0, "length_2": 3.0}
    import funcs  # type: ignore[import-not-found]

    with rewards.temporarily("mine", funcs.length):
        assert scored(TrlReward("mine"), texts("ab"))[0].score == 2.0


def test_it_pickles_with_its_options(build: Build) -> None:
    clone = pickle.loads(pickle.dumps(build("length", "slow_too", reward_weights=[2, 0])))
    assert [each.score for each in scored(clone, texts("abc"))] == [6.0]


# ---- parity ----

MIXED = ("length", "only_even", "slow", "right_too")
WEIGHTS = [0.5, 2.0, -1.0, 3.0]


def stated_again(
    functions: Sequence[Callable[..., Any]], weights: Sequence[float], samples: Sequence[RewardSample]
) -> list[float | None]:
    """TRL 1.16's ``_calculate_rewards`` and the sum after it, stated again: NaN for None, and a sum without NaN."""
    columns = {name: [sample.extra_info[name] for sample in samples] for name in samples[0].extra_info}
    rows = []
    for function in functions:
        values = function(
            prompts=[sample.raw_prompt for sample in samples],
            completions=[sample.response for sample in samples],
            completion_ids=[list(sample.response_ids) for sample in samples],
            trainer_state=SimpleNamespace(global_step=3),
            log_extra=lambda *_: None,
            log_metric=lambda *_: None,
            **columns,
        )
        values = asyncio.run(values) if asyncio.iscoroutine(values) else values
        rows.append([math.nan if value is None else float(value) for value in values])
    totals: list[float | None] = []
    for column in zip(*rows, strict=True):
        there = [weight * value for weight, value in zip(weights, column, strict=True) if not math.isnan(value)]
        totals.append(sum(there) if there else None)
    return totals


def of_trl(
    functions: Sequence[Callable[..., Any]], weights: Sequence[float], samples: Sequence[RewardSample]
) -> list[float | None]:
    """The same by TRL itself."""
    trl = pytest.importorskip("trl", reason="TRL is not installed; the restatement is compared")
    import torch

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", num_processes=1, is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=3),
        reward_funcs=list(functions),
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[str(index) for index in range(len(functions))],
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
    )
    found = trl.GRPOTrainer._calculate_rewards.__wrapped__(
        trainer,
        [{"prompt": sample.raw_prompt, **sample.extra_info} for sample in samples],
        [sample.raw_prompt for sample in samples],
        [sample.response for sample in samples],
        [list(sample.response_ids) for sample in samples],
    )
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    # The line of `_generate_and_score_completions` that follows, with its mask of rows without a reward.
    totals = (found * torch.tensor(weights).unsqueeze(0)).nansum(dim=1)
    without = found.isnan().all(dim=1).tolist()
    return [None if none else total for none, total in zip(without, totals.tolist(), strict=True)]


@pytest.mark.parametrize("reference", [stated_again, of_trl])
def test_the_sums_are_those_of_trl(build: Build, reference: Callable[..., list[float | None]]) -> None:
    samples = texts("4", "xx", "y", "4x", "x", number=[0, 1, 2, 3, 5], answer=["4", "4", "y", "4x", "-"])
    for names, weights in ((MIXED, WEIGHTS), (("only_even", "slow"), [2.0, -1.0])):
        reward = build(*names, reward_weights=weights)
        expected = reference([each._call for each in reward._functions], weights, samples)
        results = scored(reward, samples)
        assert [None if each.dropped else each.score for each in results] == pytest.approx(expected)
    assert None in expected
