"""Any mixture of values of rewards, environments and reward models is finite, or the error that was configured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollcast.contracts.reward import MAX_REWARD, RewardResult, RewardSettings
from rollcast.errors import RewardError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.tokenizer import load_tokenizer
from rollcast_rewards.scoring import RewardScorer, RewardSetup

REWARD = """
import asyncio
import sys

import numpy as np
import torch

from rollcast.contracts.reward import RewardResult

NAN, INF = float("nan"), float("inf")

GOOD = {
    "one": 1.0,
    "integer": -3,
    "bool": True,
    "numpy": np.float32(0.5),
    "tensor": torch.tensor(0.25),
    "limit": 1e12,
    "component": RewardResult(0.5, extra={"a": 1.0, "b": None}),
    "without component": RewardResult(0.5, correct=True),
    "tokens": RewardResult(1.5, token_scores=[0.5, 1.0]),
}
BAD = {
    "nan": NAN,
    "infinity": -INF,
    "huge": 1e38,
    "huge integer": 10**400,
    "text": "1.0",
    "none": None,
    "list": [1.0],
    "complex": 1j,
    "object": ...,
    "component": RewardResult(1.0, extra={"a": NAN}),
    "text component": RewardResult(1.0, extra={"a": "x"}),
    "tokens": RewardResult(1.0, token_scores=[0.0, INF]),
    "missing tokens": RewardResult(1.0, token_scores=[0.0]),
}


def score(sample):
    kind, name = sample.extra_info["value"]
    if kind == "raise":
        raise KeyError(name)
    if kind == "exit":
        sys.exit(3)
    return (GOOD if kind == "good" else BAD)[name]


async def score_later(sample):
    await asyncio.sleep(0)
    return score(sample)
"""
MANAGERS: dict[str, dict[str, Any]] = {
    "naive": {},
    "batch": {"batch_size": 2},
    "dapo": {"overlong_buffer": {"len": 2, "penalty_factor": 1.0}},
    "remote": {"max_retries": 0},
}
#: The module of the reward.
VALUES: dict[str, Any] = {}
exec(REWARD, VALUES)  # the constant above
POLICIES = ["stop", "zero", "drop"]
ODD = [0.0, 0.25, -2.0, 1e12, float("nan"), float("inf"), -float("inf"), 1e38]
NUMBERS = st.sampled_from([0.5, 0.0]) | st.sampled_from(ODD)


def is_bad(value: float) -> bool:
    return not abs(value) <= MAX_REWARD


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the plan of one row: the value of its reward, and the numbers of its environment and reward model."""
    good = st.sampled_from([("good", name) for name in VALUES["GOOD"]])
    bad = st.sampled_from([("bad", name) for name in VALUES["BAD"]] + [("raise", "x"), ("exit", "x")])
    return {
        "value": draw(good | bad),
        "environment": draw(NUMBERS),
        "component": draw(st.sampled_from([{}, {"style": 1.0}, {"style": None}, {"style": float("nan")}])),
        "error": draw(st.sampled_from(["", "", "", "the rollout gave reward = 'x', which is not a number"])),
        "is_scored": draw(st.booleans()),
        "model": draw(NUMBERS),
    }


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[dict[tuple[str, ...], Any]]:
    path = tmp_path_factory.mktemp("reward") / "mixture.py"
    path.write_text(REWARD)
    tokenizer = load_tokenizer(str(model_folder))
    found: dict[tuple[str, ...], Any] = {}

    class Lazy(dict[tuple[str, ...], Any]):
        def __missing__(self, key: tuple[str, ...]) -> RewardScorer:
            manager, policy, function = key
            rules = RewardSettings(on_error=policy, max_bad_share=1.0, max_response_length=8)
            options = MANAGERS.get(manager, {"num_processes": 1})
            setup = RewardSetup("function", {"path": f"{path}:{function}"}, manager, options, rules)
            self[key] = found[key] = RewardScorer(setup, tokenizer)
            return self[key]

    yield Lazy()
    for scorer in found.values():
        scorer.close()


def batch_of(plans: list[dict[str, Any]], has_environment: bool) -> DataProto:
    """Return a batch with a row of two tokens per plan; each row is a rollout."""
    count = len(plans)
    ids = Jagged.from_lengths(torch.ones(2 * count, dtype=torch.int32), torch.full((count,), 2))
    columns: dict[str, Any] = {
        "prompts": ids.column(),
        "responses": ids.column(),
        "response_mask": ids.like(torch.ones(2 * count, dtype=torch.bool)),
        "finished": torch.ones(count, dtype=torch.bool),
    }
    objects: dict[str, Any] = {"extra_info": [{"value": plan["value"]} for plan in plans]}
    if has_environment:
        scores = torch.tensor([[0.0, plan["environment"]] for plan in plans]).flatten()
        columns |= {
            "environment_scores": ids.like(scores),
            "rollout_index": torch.arange(count),
            "is_final": torch.ones(count, dtype=torch.bool),
            "is_scored": torch.tensor([plan["is_scored"] for plan in plans]),
        }
        objects |= {
            "reward_components": [plan["component"] for plan in plans],
            "reward_error": [plan["error"] for plan in plans],
        }
    return DataProto.from_dict(columns, objects)


def expect(plan: dict[str, Any], has_environment: bool, has_model: bool) -> float | None:
    """Return the score of a row by the plan alone; None if the row is bad."""
    kind, name = plan["value"]
    total, bad = 0.0, False
    if not (has_environment and plan["is_scored"]):
        value = VALUES["GOOD"][name] if kind == "good" else 0.0
        total += float(value.score if isinstance(value, RewardResult) else value)
        bad |= kind != "good"
    if has_environment:
        # A batch has the environments' numbers in float32, which rounds the limit down.
        total += torch.tensor(plan["environment"], dtype=torch.float32).item()
        style = plan["component"].get("style")
        bad |= is_bad(plan["environment"]) or bool(plan["error"]) or (style is not None and is_bad(style))
    bad |= is_bad(total)
    if has_model:
        bad |= is_bad(plan["model"])
        total += plan["model"]
    return None if bad else total


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_is_finite_or_the_configured_error(
    scorers: dict[tuple[str, ...], Any], data: st.DataObject
) -> None:
    policy = data.draw(st.sampled_from(POLICIES), "policy")
    manager = data.draw(st.sampled_from(list(MANAGERS)), "manager")
    scorer = scorers[manager, policy, data.draw(st.sampled_from(["score", "score_later"]), "function")]
    plans = data.draw(st.lists(rows(), min_size=1, max_size=6), "rows")
    has_environment, has_model = data.draw(st.tuples(st.booleans(), st.booleans()), "sources")
    batch = batch_of(plans, has_environment)
    expected = [expect(plan, has_environment, has_model) for plan in plans]
    bad = sum(total is None for total in expected)
    model = torch.tensor([plan["model"] for plan in plans]) if has_model else None

    if bad and policy == "stop":
        with pytest.raises(RewardError):
            scorer.score(batch, model)
        return
    scored = scorer.score(batch, model)
    wanted = [0.0 if total is None else total for total in expected]
    assert scored.scores.tolist() == pytest.approx(wanted, rel=1e-6)
    assert scored.kept.tolist() == [total is not None or policy == "zero" for total in expected]
    levels = scored.token_level_scores(Jagged.of(batch["response_mask"]))
    assert bool(levels.values.isfinite().all())
    assert levels.sums().tolist() == pytest.approx(wanted, rel=1e-6)
    if bool(scored.kept.any()):
        metrics = scored.metrics("reward")
        assert metrics["reward/errors"] == bad
        # A model's score of the limit may be added to a score of the limit.
        assert all(abs(value) <= 2 * len(plans) * MAX_REWARD for value in metrics.values())


def test_processes_treat_every_value_the_same(scorers: dict[tuple[str, ...], Any]) -> None:
    names = [("good", name) for name in VALUES["GOOD"]] + [("bad", name) for name in VALUES["BAD"]]
    plans = [{"value": name, "model": 0.5} for name in [*names, ("raise", "x")]]
    found = [scorers[manager, "drop", "score"].score(batch_of(plans, False)) for manager in ("prime", "naive")]
    # The message of a process adds the line of an exception.
    there, here = ([replace(result, error=result.error[:40]) for result in scored.results] for scored in found)
    assert there == here
    assert found[0].kept.tolist() == [plan["value"][0] == "good" for plan in plans]


def test_the_share_of_bad_samples_counts_those_of_every_source(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mixture.py").write_text(REWARD)
    plan = {"value": ("good", "one"), "model": 0.5}
    batch = batch_of([plan, {**plan, "value": ("bad", "nan")}, plan, plan], has_environment=False)
    model = torch.tensor([torch.nan, 0.5, 0.5, 0.5])
    for share, is_allowed in ((0.5, True), (0.4, False)):
        rules = RewardSettings(on_error="zero", max_bad_share=share)
        setup = RewardSetup("function", {"path": f"{tmp_path / 'mixture.py'}:score"}, settings=rules)
        scorer = RewardScorer(setup, load_tokenizer(str(model_folder)))
        if is_allowed:
            assert scorer.score(batch, model).scores.tolist() == [0.0, 0.0, 1.5, 1.5]
        else:
            with pytest.raises(RewardError, match="2 of 4 samples got no score"):
                scorer.score(batch, model)
