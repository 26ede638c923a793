"""Validation with several samples a prompt: what is counted, and the laws."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.errors import RewardError
from rollcast_rewards.statistics import (
    answer_extractor,
    best_at_k,
    bootstrap_interval,
    extract_answer,
    majority_at_k,
    pick_samples,
    summarize_samples,
)


def make_rows(prompts: list[list[tuple[str, bool]]], sources: list[str] | None = None) -> list[dict[str, Any]]:
    named = sources or [""] * len(prompts)
    return [
        {"response": response, "correct": correct, "score": float(correct), "data_source": source}
        for samples, source in zip(prompts, named, strict=True)
        for response, correct in samples
    ]


@st.composite
def samples(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """``correct`` and ``answers`` ``[P, N]`` where an answer decides whether it is correct, and a ``k``."""
    count, prompts = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(st.integers(-1, 3), min_size=count, max_size=count), min_size=prompts, max_size=4))
    answers = torch.tensor(rows)
    return (answers == 1).double(), answers, draw(st.integers(1, count))


def vote(correct: list[float], answers: list[int]) -> float:
    """The majority of one prompt in plain words."""
    counts = {answer: answers.count(answer) for answer in answers if answer >= 0}
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    right = dict(zip(answers, correct, strict=True))
    return sum(right[answer] for answer in winners) / len(winners) if winners else 0.0


@given(samples())
@settings(deadline=None)
def test_best_and_majority_are_means_over_all_subsets(drawn: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    correct, answers, k = drawn
    best, majority = best_at_k(correct, k), majority_at_k(correct, answers, k)
    for row, (values, given_answers) in enumerate(zip(correct.tolist(), answers.tolist(), strict=True)):
        subsets = list(itertools.combinations(range(len(values)), k))
        best_of = [max(values[index] for index in chosen) for chosen in subsets]
        votes = [vote([values[i] for i in chosen], [given_answers[i] for i in chosen]) for chosen in subsets]
        assert float(best[row]) == pytest.approx(sum(best_of) / len(subsets))
        assert float(majority[row]) == pytest.approx(sum(votes) / len(subsets))


@given(samples(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_the_samples_does_not_matter(drawn: tuple[torch.Tensor, torch.Tensor, int], random: Any) -> None:
    correct, answers, k = drawn
    order = list(range(correct.shape[1]))
    random.shuffle(order)
    torch.testing.assert_close(best_at_k(correct[:, order], k), best_at_k(correct, k))
    torch.testing.assert_close(
        majority_at_k(correct[:, order], answers[:, order], k), majority_at_k(correct, answers, k)
    )


@given(st.integers(1, 40), st.data())
def test_best_at_k_of_zeros_and_ones_is_pass_at_k(count: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    values = torch.tensor([[1.0] * right + [0.0] * (count - right)])
    expected = 1 - math.comb(count - right, k) / math.comb(count, k)
    assert float(best_at_k(values, k)) == pytest.approx(expected, abs=1e-12)


def test_scores_between_zero_and_one_have_a_best_too() -> None:
    assert best_at_k(torch.tensor([[0.1, 0.9, 0.4]]), 2).tolist() == pytest.approx([(0.9 + 0.4 + 0.9) / 3])


def test_a_majority_among_many_samples_is_drawn_by_the_seed() -> None:
    """30 samples, 60 % of them right: a majority of 5 is right in about 70 % of all subsets."""
    answers = torch.tensor([[1] * 18 + [2] * 12] * 3)
    correct = (answers == 1).double()
    exact = sum(math.comb(18, r) * math.comb(12, 5 - r) for r in (3, 4, 5)) / math.comb(30, 5)
    estimates = torch.stack([majority_at_k(correct, answers, 5, seed)[0] for seed in range(40)])
    assert float(estimates.mean()) == pytest.approx(exact, abs=0.025)
    assert len(set(estimates.tolist())) > 1
    assert torch.equal(majority_at_k(correct, answers, 5, 3), majority_at_k(correct, answers, 5, 3))


@pytest.mark.parametrize("k", [0, 4])
def test_k_is_at_most_the_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}; .*the 3 samples"):
        best_at_k(torch.zeros(2, 3), k)


def test_the_interval_is_that_of_a_mean_over_many_prompts() -> None:
    values = (torch.arange(2000) % 10 < 3).double()
    low, high = bootstrap_interval(values, seed=4)
    error = math.sqrt(0.3 * 0.7 / 2000)
    assert float(low) == pytest.approx(0.3 - 1.96 * error, abs=0.15 * error)
    assert float(high) == pytest.approx(0.3 + 1.96 * error, abs=0.15 * error)
    again = bootstrap_interval(torch.stack([values, 1 - values], -1), seed=4)
    assert (float(again[0][0]), float(again[1][0])) == (float(low), float(high))
    torch.testing.assert_close(again[0][1], 1 - high)
    assert float(bootstrap_interval(values, seed=5)[0]) != float(low)


def test_more_prompts_than_one_piece_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    whole = bootstrap_interval(values)
    monkeypatch.setattr("rollcast_rewards.statistics._CHUNK", 120)
    assert bootstrap_interval(values) == whole
    answers = torch.randint(-1, 3, (40, 4), generator=torch.Generator().manual_seed(0))
    pieces = majority_at_k((answers == 1).double(), answers, 2)
    monkeypatch.undo()
    assert torch.equal(pieces, majority_at_k((answers == 1).double(), answers, 2))


def test_what_a_validation_reports() -> None:
    prompts = [
        [("#### 4", True), ("#### 4.0", True), ("#### 5", False), ("so: 9", False)],
        [("#### 7", False), ("#### 7", False), ("#### 8", True), ("", False)],
    ]
    metrics = summarize_samples(make_rows(prompts, ["a", "b/c"]), 4)
    names = ["mean@4", *(f"{kind}@{k}" for k in (2, 4) for kind in ("best", "maj"))]
    ends = [f"{name}{end}" for name in names for end in ("" if "mean@" in name else "/mean", "/low", "/high")]
    prefixes = ("val/acc", "val/a/acc", "val/b/c/acc")
    assert set(metrics) == {f"{prefix}/{end}" for prefix in prefixes for end in ends}
    assert metrics["val/acc/mean@4"] == 3 / 8
    assert metrics["val/acc/best@4/mean"] == 1.0
    assert metrics["val/acc/best@2/mean"] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert (metrics["val/a/acc/maj@4/mean"], metrics["val/b/c/acc/maj@4/mean"]) == (1.0, 0.0)
    # Of one prompt all resamples are the same.
    assert metrics["val/a/acc/mean@4/low"] == metrics["val/a/acc/mean@4/high"] == 0.5
    assert (metrics["val/acc/maj@4/low"], metrics["val/acc/maj@4/high"]) == (0.0, 1.0)


def test_one_sample_a_prompt_has_a_mean_and_its_interval() -> None:
    rows = make_rows([[("x", True)], [("y", False)]])
    assert set(summarize_samples(rows, 1)) == {"val/acc/mean@1", "val/acc/mean@1/low", "val/acc/mean@1/high"}
    assert summarize_samples([], 4) == {}
    with pytest.raises(ValueError, match="2 rows are no whole number of prompts with 3 samples"):
        summarize_samples(rows, 3)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so 3 + 4 = 7\n#### 1,080", "1080"),
        ("#### 3\n#### $7.50.", "7.5"),
        (r"thus \boxed{\frac{1}{2}}. #### 9", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{ 2.0 }", "2"),
        (r"cut off: \boxed{12", r"cut off: \boxed{12"),
        ("<think>4?</think> <answer> B </answer>", "b"),
        ("I think the answer is: Paris.", "paris"),
        ("  0123456 \n", "0123456"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("-$3.00", "-3"),
        ("$-3", "-3"),
        ("-0.0", "0"),
        ("+7", "7"),
        ("-", "-"),
        ("1" * 40, "1" * 40),
        ("Sorted:  A\n b", "sorted: a b"),
        (" \n", None),
        ("$", None),
        ("1e999999999", "1e999999999"),
        ("NaN", "nan"),
    ],
)
def test_answers_in_responses(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@given(st.text(max_size=60))
def test_any_text_has_an_answer_that_stays_itself(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or answer == " ".join(answer.split())


class Lettered:
    """Reads the first letter."""

    name = "lettered"

    def extract(self, response: str) -> str | None:
        return response[0] if response != "-" else None


def test_a_reward_may_read_the_answers_itself() -> None:
    extract = answer_extractor(Lettered())
    assert [extract("b, surely"), extract("-")] == ["b", None]
    with pytest.raises(RewardError, match=r"lettered.extract failed on the response '': string index out of range"):
        extract("")
    assert answer_extractor(object()) is extract_answer


@pytest.mark.parametrize(("most", "picked"), [(-1, list(range(10))), (20, list(range(10))), (3, [0, 3, 6]), (0, [])])
def test_picked_samples_are_spread(most: int, picked: list[int]) -> None:
    assert pick_samples(range(10), most) == picked
