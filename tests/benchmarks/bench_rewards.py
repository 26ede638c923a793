"""A batch of 512 samples of which four are bad: a hang, an exception, a NaN and a memory eater.

The batch has to end within the time limit plus 2 s, with the scores of the other 508 as they are
without the four. What a batch of good samples costs, by manager, stands below.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import Comparison, write_report

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward_manager,
)

ROWS = 512
BAD = {100: "hang", 200: "raise", 300: "nan", 400: "memory"}
#: What stands between the time limit and the end of the batch at most, in seconds.
SLACK_S = 2.0


class Mixed(BaseReward):
    """The share of digits in the response; bad where the sample says so."""

    name = "mixed"

    def score(self, sample: RewardSample) -> float:
        """Score, hang, raise, give NaN, or eat memory."""
        kind = sample.extra_info.get("kind", "good")
        while kind == "hang":
            pass
        if kind == "raise":
            raise KeyError("no such answer")
        if kind == "nan":
            return float("nan")
        eaten = []
        while kind == "memory":
            eaten.append(bytes(1 << 24))
        return sum(letter.isdigit() for letter in sample.response) / len(sample.response)


def samples(bad: bool) -> list[RewardSample]:
    """Responses of 2,000 characters."""
    return [
        RewardSample(
            f"prompt {row}",
            (f"{row} and then some text " * 100)[:2000],
            ground_truth=str(row),
            response_ids=range(500),
            extra_info={"kind": BAD.get(row, "good") if bad else "good"},
        )
        for row in range(ROWS)
    ]


def seconds(call: Callable[[], Any]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def unaffected(results: list[RewardResult], expected: list[RewardResult]) -> int:
    """Samples whose result is what it is among good ones."""
    return sum(result == other for result, other in zip(results, expected, strict=True))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="reward.timeout_s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/rewards.json"))
    options = parser.parse_args()
    logging.getLogger("rollcast_rewards").setLevel(logging.ERROR)
    settings = RewardSettings("zero", timeout_s=options.timeout_s)
    managers: dict[str, BaseRewardManager] = {
        name: build_reward_manager(name, Mixed(), settings, {"memory_limit_mb": 512} if name == "prime" else {})
        for name in ("naive", "prime")
    }
    good, mixed = samples(bad=False), samples(bad=True)
    expected = managers["naive"](good)
    comparisons, notes = [], []
    results: list[RewardResult] = []
    for place in range(options.repeats):
        taken = seconds(lambda: results.extend(managers["prime"](mixed)))
        limit = options.timeout_s + SLACK_S
        label = "started anew" if place == 0 else "running"
        comparisons.append(Comparison(f"512 with 4 bad, prime ({label}): seconds", taken, limit, at_most=1.0))
        same = unaffected(results[-ROWS:], expected)
        comparisons.append(Comparison("  samples unaffected", same, ROWS - len(BAD), at_least=1.0))
    for row in BAD:
        notes.append(f"sample {row}: {results[row].error}")
    for name, manager in managers.items():
        median = statistics.median(seconds(lambda manager=manager: manager(good)) for _ in range(9))
        notes.append(f"512 good samples, {name}: {median * 1e3:.1f} ms")
        manager.close()
    write_report("Rewards", comparisons, notes, options.output)
    if not all(each.holds for each in comparisons):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
