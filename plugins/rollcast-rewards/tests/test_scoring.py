"""From generated rows to samples and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollcast import WorkerGroup
from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, RewardSettings, build_reward, rewards
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ConfigError, RewardError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.tokenizer import load_tokenizer
from rollcast_rewards.reward_worker import RewardWorker, RewardWorkers, RewardWorkerSetup
from rollcast_rewards.scoring import RewardScorer, RewardSetup, RolloutRows, Scored, summarize
from rollcast_testing.simulated import SimulatedRuntime

SEEN: list[RewardSample] = []


def echo(sample: RewardSample) -> RewardResult:
    SEEN.append(sample)
    score = float(len(sample.response))
    return RewardResult(score, extra={"length": score} if sample.finished else {})


class Short(BaseReward):
    """Forgets its last sample."""

    def score(self, sample: RewardSample) -> float:
        return 0.0

    def score_batch(self, samples: Sequence[RewardSample]) -> list[float]:
        return [0.0] * (len(samples) - 1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    parts: dict[str, Any] = {
        "test_echo": echo,
        "test_nan": lambda sample: float("nan"),
        "test_short": Short,
    }
    for name, part in parts.items():
        rewards.register(name, part)
    SEEN.clear()
    yield
    for name in parts:
        rewards.unregister(name)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return load_tokenizer(model_folder)


def rows_of(rows: Sequence[Sequence[float]]) -> Jagged:
    """Rows of numbers as a jagged column, flat."""
    lengths = torch.tensor([len(row) for row in rows])
    return Jagged.from_lengths(torch.tensor([value for row in rows for value in row]), lengths)


def level(scored: Scored, mask: Jagged) -> list[list[float]]:
    return [row.tolist() for row in scored.token_level_scores(mask).column().unbind()]


def generated(tokenizer: Any) -> DataProto:
    """Two rows: "7+1=" answered by "8" and the end token, and "2=" by "1a b" without one."""
    eos = tokenizer.eos_token_id
    prompts = [tokenizer("7+1=")["input_ids"], tokenizer("2=")["input_ids"]]
    responses = [[*tokenizer("8")["input_ids"], eos], tokenizer("1a b")["input_ids"]]
    ids = rows_of(responses)
    return DataProto.from_dict(
        tensors={
            "prompts": rows_of(prompts).column(),
            "responses": ids.column(),
            "response_mask": ids.like(torch.ones(len(ids.values), dtype=torch.bool)),
            "finished": torch.tensor([True, False]),
        },
        non_tensors={
            "ground_truth": ["8", "x"],
            "data_source": ["sums", "others"],
            "extra_info": [{"level": 3}, {}],
        },
    )


def test_samples_carry_text_ids_and_the_row(tokenizer: Any) -> None:
    scored = RewardScorer(RewardSetup("test_echo"), tokenizer).score(generated(tokenizer))
    first, second = SEEN
    assert (first.prompt, first.response, first.ground_truth, first.data_source) == ("7+1=", "8", "8", "sums")
    assert (first.finished, dict(first.extra_info)) == (True, {"level": 3})
    assert list(first.response_ids) == [*tokenizer("8")["input_ids"], tokenizer.eos_token_id]
    assert (second.prompt, second.response, second.finished) == ("2=", "1a b", False)
    assert scored.scores.tolist() == [1.0, 4.0]


def test_the_score_stands_at_the_last_token_of_the_policy() -> None:
    samples = [RewardSample("", "") for _ in range(3)]
    scored = Scored(samples, [RewardResult(score) for score in (1.0, 2.0, 3.0)], 1.0)
    # Whole, with another's tokens at its end, and empty.
    assert level(scored, rows_of([[1, 1, 1], [1, 1, 0], []])) == [[0, 0, 1], [0, 2, 0], []]
    assert level(scored, rows_of([[1, 0, 1], [0, 1, 0, 1], [0, 0]])) == [[0, 0, 1], [0, 0, 0, 2], [3, 0]]


def test_metrics_of_a_batch(tokenizer: Any) -> None:
    scored = RewardScorer(RewardSetup("test_echo"), tokenizer).score(generated(tokenizer))
    assert scored.metrics("reward") == {
        "reward/mean": 2.5,
        "reward/max": 4.0,
        "reward/min": 1.0,
        "reward/errors": 0.0,
        # Only the finished sample has it.
        "reward/length": 1.0,
    }
    assert scored.accuracy == 1.0


def test_correct_is_what_the_result_says_or_a_full_score() -> None:
    samples = [RewardSample("", "") for _ in range(4)]
    results = [RewardResult(1.0), RewardResult(0.9), RewardResult(0.0, correct=True), RewardResult(1.0, correct=False)]
    scored = Scored(samples, results, 1.0)
    assert scored.correct == [True, False, True, False]
    assert scored.accuracy == 0.5


def test_sample_rows_keep_their_own_columns_whatever_a_reward_adds() -> None:
    scored = Scored([RewardSample("p", "r", "t", "s")], [RewardResult(0.5, extra={"prompt": 9.0, "length": 2.0})], 1.0)
    (row,) = scored.as_rows()
    assert row == {
        "prompt": "p",
        "response": "r",
        "ground_truth": "t",
        "data_source": "s",
        "finished": True,
        "score": 0.5,
        "correct": False,
        "length": 2.0,
    }


def test_a_validation_is_summed_up_by_source_too() -> None:
    rows = [
        {"correct": True, "score": 1.0, "data_source": "a"},
        {"correct": False, "score": 0.5, "data_source": "a"},
        {"correct": True, "score": 1.0, "data_source": "b"},
        {"correct": True, "score": 1.0, "data_source": "b"},
    ]
    metrics = summarize(rows)
    assert metrics == {
        "val/accuracy": 0.75,
        "val/reward": 0.875,
        "val/samples": 4.0,
        "val/accuracy/a": 0.5,
        "val/accuracy/b": 1.0,
    }
    assert "val/accuracy/a" not in summarize(rows[:2])


@pytest.mark.parametrize(("name", "says"), [("test_nan", "nan"), ("test_short", "2 samples were given, 1 scores")])
def test_bad_scores_are_refused(tokenizer: Any, name: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        RewardScorer(RewardSetup(name), tokenizer).score(generated(tokenizer))


def test_options_that_a_reward_does_not_take(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward.reward_kwargs .*'test_short'"):
        RewardScorer(RewardSetup("test_short", {"limit": 3}), tokenizer)


def test_scores_stand_at_their_tokens_and_the_rest_at_the_last() -> None:
    mask = rows_of([[1, 1, 0, 1, 0], [1, 1, 1], [0, 0], [1]])
    results = [
        RewardResult(1.0, token_scores=[0.5, 0.25, 0.125]),
        RewardResult(2.0),
        RewardResult(3.0, token_scores=[]),
        RewardResult(-1.0, token_scores=[-1.0]),
    ]
    scored = Scored([RewardSample("", "")] * 4, results, 1.0)
    expected = [[0.5, 0.25, 0, 0.25, 0], [0, 0, 2], [3, 0], [-1]]
    assert level(scored, mask) == expected
    # A reward model's 10, and half of the results' own.
    scored.rule_weight, scored.scores = 0.5, 10.0 + 0.5 * scored.scores
    expected = [[0.25, 0.125, 0, 10.125, 0], [0, 0, 11], [11.5, 0], [9.5]]
    assert level(scored, mask) == expected


def test_samples_have_the_turns_of_their_chosen_tokens(tokenizer: Any) -> None:
    batch = generated(tokenizer)
    scorer = RewardScorer(RewardSetup("test_echo"), tokenizer)
    scorer.score(batch)
    assert [list(sample.turn_ids) for sample in SEEN] == [[], []]
    SEEN.clear()
    responses = Jagged.of(batch["responses"])
    mask = responses.values != responses.values[0]
    scorer.score(
        batch.with_columns(
            {"turn_ids": responses.with_values(responses.places), "response_mask": responses.with_values(mask)}
        )
    )
    assert list(SEEN[0].turn_ids) == [1]
    for sample, row in zip(SEEN, responses.like(mask).unbind(), strict=True):
        assert list(sample.turn_ids) == row.nonzero().squeeze(-1).tolist()
        assert len(sample.turn_ids) == len(sample.response_ids)


def jagged(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return Jagged.from_lengths(flat, torch.tensor([len(row) for row in rows])).column()


def rollouts_of_several_rows(tokenizer: Any) -> DataProto:
    """Rollout 0 has rows 0 and 2 and tools' rewards, 1 is scored by its environment, and 2 has failed."""
    ids = tokenizer("ab12", add_special_tokens=False)["input_ids"]
    return DataProto.from_dict(
        {
            "prompts": jagged([ids[:1]] * 4, torch.int32),
            "responses": jagged([ids] * 4, torch.int32),
            "response_mask": jagged([[True, True, False, True]] * 4, torch.bool),
            "turn_ids": jagged([[0, 0, 1, 1]] * 4, torch.int32),
            "environment_scores": jagged([[0, 0.25, 0, 0], [0, 1, 0, 2], [0, 0.5, 0, 0], [0, 0, 0, 9]], torch.float32),
            "rollout_index": torch.tensor([0, 1, 0, 2]),
            "is_final": torch.tensor([False, True, True, True]),
            "is_scored": torch.tensor([False, True, False, True]),
            "rollout_failed": torch.tensor([False, False, False, True]),
            "finished": torch.tensor([True] * 4),
        },
        {"messages": [[{"role": "tool", "content": f"{row}"}] for row in range(4)], "ground_truth": ["2"] * 4},
    )


def test_rollouts_of_several_rows_are_scored_once(model_folder: Path) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    batch = rollouts_of_several_rows(tokenizer)
    SEEN.clear()
    scored = RewardScorer(RewardSetup("test_echo"), tokenizer).score(batch)
    # Only the final row that nobody has scored; its answer is the last reply, and the tools' results are in its messages.
    assert [(each.response, each.extra_info["messages"][0]["content"]) for each in SEEN] == [("2", "2")]
    assert scored.scores.tolist() == [0.25, 3.0, 1.5, 0.0]
    assert scored.rollout_scores.tolist() == [1.75, 3.0, 1.75, 0.0]
    levels = scored.token_level_scores(Jagged.of(batch["response_mask"])).column().unbind()
    assert [row.tolist() for row in levels] == [[0, 0.25, 0, 0], [0, 1, 0, 2], [0, 0.5, 0, 1], [0, 0, 0, 0]]
    # A tool's reward does not make an answer correct or wrong.
    assert scored.correct == [True, True, True, False]
    assert scored.accuracy == pytest.approx(2 / 3)
    assert scored.metrics("reward")["reward/mean"] == pytest.approx((1.75 + 3.0 + 0.0) / 3)
    assert [row["score"] for row in scored.as_rows()] == [3.0, 1.75, 0.0]


def test_a_rollout_is_dropped_whole(model_folder: Path) -> None:
    samples = [RewardSample("", "")] * 3
    rollouts = RolloutRows(torch.tensor([0, 1, 0]), torch.tensor([False, True, True]))
    results = [RewardResult(0.0), RewardResult(1.0), RewardResult(0.0, dropped=True)]
    assert Scored(samples, results, 1.0, rollouts).kept.tolist() == [False, True, False]


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_workers_score_as_the_trainer_does(model_folder: Path, tokenizer: Any, ranks: int) -> None:
    setup = RewardWorkerSetup(RewardSetup("test_echo"), str(model_folder))
    batches = [generated(tokenizer), rollouts_of_several_rows(tokenizer)]
    with SimulatedRuntime(1, ranks) as runtime:
        group = WorkerGroup(ResourcePool([ranks]), ClassWithInitArgs(RewardWorker, setup), runtime=runtime)
        for batch in batches:
            here, there = (RewardScorer(RewardSetup("test_echo"), tokenizer) for _ in range(2))
            there.score_by(RewardWorkers(group))
            assert there.score(batch).results == here.score(batch).results
            assert there.score(there.scored(batch)).results == here.score(batch).results


def test_a_bad_sample_at_a_worker_is_the_reward_s_error(model_folder: Path, tokenizer: Any) -> None:
    def fails(sample: RewardSample) -> float:
        raise KeyError(sample.response)

    setup = RewardWorkerSetup(RewardSetup("test_fails"), str(model_folder))
    with rewards.temporarily("test_fails", fails), SimulatedRuntime(1, 2) as runtime:
        group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(RewardWorker, setup), runtime=runtime)
        scorer = RewardScorer(RewardSetup("test_fails"), tokenizer)
        scorer.score_by(RewardWorkers(group))
        with pytest.raises(RewardError, match=r"reward test_fails failed: KeyError: '8'[\s\S]*prompt: '7\+1='"):
            scorer.score(generated(tokenizer))


class _Held(BaseReward):
    """Counts how often it was closed; ``broken`` fails in it."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.closed = broken, 0

    def score(self, sample: RewardSample) -> float:
        return 0.0

    def close(self) -> None:
        self.closed += 1
        if self.broken:
            raise OSError("no server")


@pytest.mark.parametrize("broken", [False, True])
def test_a_reward_is_closed_once(tokenizer: Any, caplog: pytest.LogCaptureFixture, broken: bool) -> None:
    with rewards.temporarily("test_held", _Held):
        scorer = RewardScorer(RewardSetup("test_held", {"broken": broken}), tokenizer)
    scorer.close()
    scorer.close()
    assert isinstance(scorer.reward, _Held)
    assert scorer.reward.closed == 1
    told = ["reward test_held: close failed: OSError: no server"] if broken else []
    assert [record.getMessage() for record in caplog.records] == told


def test_a_weighted_sum_closes_all_its_rewards() -> None:
    with rewards.temporarily("test_held", _Held):
        parts = [{"name": "test_held", "reward_kwargs": {"broken": broken}} for broken in (True, False, True)]
        total: Any = build_reward("weighted_sum", {"rewards": parts})
    with pytest.raises(OSError, match="no server"):
        total.close()
    assert [reward.closed for _, reward in total._parts.values()] == [1, 1, 1]


@pytest.mark.parametrize("policy", ["stop", "zero", "drop"])
@pytest.mark.parametrize("where", ["environment", "message", "component", "overflow"])
def test_a_number_of_a_rollout_that_is_not_finite_is_a_bad_sample(model_folder: Path, policy: str, where: str) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    batch = rollouts_of_several_rows(tokenizer)
    if where in ("environment", "overflow"):
        bad = torch.nan if where == "environment" else 1e38
        scores = Jagged.of(batch["environment_scores"])
        values = scores.values.clone()
        values[1] = bad  # the first row of the first rollout, whose final row is the third
        batch = batch.with_columns({"environment_scores": scores.like(values)})
    elif where == "message":
        batch = batch.with_columns(
            {"reward_error": ["the rollout gave reward = 'x', which is not a number", "", "", ""]}
        )
    else:
        batch = batch.with_columns({"reward_components": [{"style": float("inf")}, {}, {}, {}]})
    setup = RewardSetup("test_echo", settings=RewardSettings(on_error=policy, max_bad_share=0.5))
    scorer = RewardScorer(setup, tokenizer)
    if policy == "stop":
        with pytest.raises(RewardError, match=r"reward test_echo .*(not finite|beyond the limit|not a number)"):
            scorer.score(batch)
        return
    for scored in (scorer.score(batch), scorer.score(scorer.scored(batch))):
        assert scored.scores.tolist() == [0.0, 3.0, 0.0, 0.0]
        assert scored.metrics("reward")["reward/errors"] == 1.0
        assert scored.kept.tolist() == [policy == "zero", True, policy == "zero", True]
        assert bool(scored.token_level_scores(Jagged.of(batch["response_mask"])).values.isfinite().all())


def test_the_score_of_a_reward_model_has_the_same_policy(tokenizer: object) -> None:
    settings = RewardSettings(on_error="drop", max_bad_share=0.5)
    scorer = RewardScorer(RewardSetup("test_echo", settings=settings), tokenizer)
    batch = generated(tokenizer)
    plain = scorer.score(batch).scores
    added = torch.ones(len(batch))
    both = scorer.score(batch, added, 2.0)
    assert both.scores.tolist() == (1.0 + 2.0 * plain).tolist()
    added[0] = torch.inf
    scored = scorer.score(batch, added, 2.0)
    assert scored.kept.tolist() == [False] + [True] * (len(batch) - 1)
    assert scored.scores.tolist() == [0.0, *both.scores.tolist()[1:]]
    assert "reward model's score = inf" in scored.results[0].error


def test_components_mark_the_rows_that_lack_them() -> None:
    results = [
        RewardResult(1.0, extra={"a": 0.5, "b": 1.0}),
        RewardResult(0.5, extra={"a": 0.5, "b": None}),
        RewardResult(0.5, extra={"a": 0.5}),
        RewardResult(0.0, error="the reward failed"),
        RewardResult(0.0, error="the reward failed", dropped=True),
    ]
    scored = Scored([RewardSample("", "")] * 5, results, 1.0)
    columns = {
        name: [None if math.isnan(value) else value for value in values.tolist()]
        for name, values in scored.components().items()
    }
    assert columns == {"a": [0.5, 0.5, 0.5, 0.0, None], "b": [1.0, None, None, 0.0, None]}
    assert scored.metrics("reward")["reward/b"] == 1.0
