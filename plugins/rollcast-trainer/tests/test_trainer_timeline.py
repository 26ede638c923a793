"""timeline.jsonl: when stages and pools are at work, in runs with and without rollouts ahead of training."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from trainer_tools import SmallTask, launch, read_jsonl

from rollcast.config import compose
from rollcast.errors import DataError
from rollcast_serving.replicas import Replicas
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run
from rollcast_trainer.run.timeline import TIMELINE_FILE, Timeline, TimelineWriter
from rollcast_trainer.workers import busy
from rollcast_trainer.workers.busy import BusyClock, limited, merged

BESIDE = [
    "trainer.max_staleness=1",
    "rollout.mode=standalone",
    "rollout.weight_sync=shared_memory",
    "rollout.replica.env={OMP_NUM_THREADS: '1'}",
    "placement.pools={rollouts: [1]}",
    "placement.mapping={rollout: rollouts}",
]


def spans(line: dict[str, Any], pool: str, stage: str) -> list[tuple[float, float]]:
    """Intervals of a stage in a pool, in seconds since 1970."""
    found = line["pools"][pool]["calls"].get(stage, [])
    return [(line["began"] + start, line["began"] + end) for start, end in found]


def overlap(first: Iterable[tuple[float, float]], second: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def check_lines(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["seconds"] > 0
        for pool in line["pools"].values():
            everything = [span for each in pool["calls"].values() for span in each]
            assert all(0 <= start <= end <= line["seconds"] + 1e-3 for start, end in everything)
            assert 0 <= pool["busy_s"] <= line["seconds"] + 1e-3
            shown = sum(end - start for start, end in merged(map(tuple, everything)))
            assert shown == pytest.approx(pool["busy_s"], abs=1e-3 * (1 + len(everything)))
    for before, after in itertools.pairwise(lines):
        assert after["began"] == pytest.approx(before["began"] + before["seconds"], abs=0.01)


@pytest.mark.long
def test_pools_take_turns_in_a_synchronous_run_and_its_continuation_goes_on(
    small_task: SmallTask, tmp_path: Path
) -> None:
    changes = ["trainer.total_steps=4", "trainer.save_freq=1"]
    launch(small_task.ppo(tmp_path, *changes))
    lines = read_jsonl(tmp_path / TIMELINE_FILE)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    check_lines(lines)
    for line in lines[1:]:
        assert {"generate", "reward", "update_actor", "update_weights"} <= set(line["stages"])
        assert set(line["pools"]) == {"global_pool"}
        generate, update = (spans(line, "global_pool", name) for name in ("generate", "update_actor"))
        assert generate and update and overlap(generate, update) == 0
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    shutil.rmtree(tmp_path / "checkpoints" / "step_3")
    launch(small_task.ppo(tmp_path, *changes))
    again = read_jsonl(tmp_path / TIMELINE_FILE)
    assert [line["step"] for line in again] == [0, 1, 2, 3, 4]
    assert again[:3] == lines[:3] and again[3]["began"] > lines[4]["began"]


@pytest.mark.long
@pytest.mark.exhaustive
def test_pools_overlap_with_rollouts_ahead_of_training(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of the second step are held until the first has trained, so that the overlap is that whole update."""
    calls, respond, trained = itertools.count(1), Replicas.respond, threading.Event()

    async def held(self: Replicas, *args: Any, **named: Any) -> Any:
        if next(calls) > 4:
            while not trained.is_set():
                await asyncio.sleep(0.01)
        return await respond(self, *args, **named)

    def release(version: int) -> None:
        if version == 1:
            trained.set()

    monkeypatch.setattr(Replicas, "respond", held)
    config = compose(small_task.ppo(tmp_path, *BESIDE, "data.val_files=[]", "trainer.total_steps=2")).config
    run = Run(check_run(config, PpoTrainer))
    trainer = PpoTrainer(run)
    trainer.run.on_synced.append(release)
    with run:
        trainer.fit()
    lines = read_jsonl(tmp_path / TIMELINE_FILE)
    assert [line["step"] for line in lines] == [1, 2]
    check_lines(lines)
    for line in lines:
        assert set(line["pools"]) == {"global_pool", "rollouts"}
        assert not spans(line, "global_pool", "generate") and not spans(line, "rollouts", "update_actor")
    update = spans(lines[0], "global_pool", "update_actor")
    assert overlap(spans(lines[0], "rollouts", "generate"), update) == pytest.approx(overlap(update, update))


def test_blocks_of_a_thousand_groups_become_few_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr(busy.time, "time", lambda: float(next(clock)))
    watched = BusyClock()
    for _ in range(10_000):
        with watched.busy("generate"):
            pass
    assert len(watched._ended["generate"]) <= 4096
    assert len(limited(watched.take()["generate"], 64)) == 64


def test_blocks_beside_each_other_are_one_interval_and_open_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(busy.time, "time", lambda: now)
    watched = BusyClock()
    first, second = watched.busy("a"), watched.busy("a")
    first.__enter__()
    now = 1.0
    second.__enter__()
    now = 2.0
    first.__exit__(None, None, None)
    now = 3.0
    assert watched.take() == {"a": [(0.0, 3.0)]}
    now = 5.0
    second.__exit__(None, None, None)
    assert watched.take() == {"a": [(3.0, 5.0)]}
    assert watched.take() == {}


def test_limited_joins_what_lies_closest() -> None:
    assert limited([(4, 5), (0, 1), (1.5, 2), (2.1, 3), (4.5, 6)], 2) == [(0, 3), (4, 6)]
    assert limited([(0, 1), (2, 3)], 1) == [(0, 3)]
    assert limited([], 3) == []


def test_a_line_covers_the_time_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(busy.time, "time", lambda: now)
    timeline = Timeline(lambda role: "pool")
    now = 104.0
    timeline.add_stage("generate", 99.0, 101.0)  # began before the line, which shows its own part of it
    timeline.add_stage("generate", 102.0, 103.0)
    assert timeline.take() == {
        "began": 100.0,
        "seconds": 4.0,
        "stages": {"generate": [[0.0, 1.0], [2.0, 3.0]]},
        "pools": {},
    }
    assert timeline.take()["began"] == 104.0


def test_the_file_continues_where_the_run_does(tmp_path: Path) -> None:
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        writer = TimelineWriter(tmp_path, start)
        for step in steps:
            writer.append(step, {"part": start})
        writer.close()
    lines = [(line["step"], line["part"]) for line in read_jsonl(tmp_path / TIMELINE_FILE)]
    assert lines == [(1, 0), (2, 0), (3, 2), (4, 2)]


@pytest.mark.long
def test_a_damaged_file_is_refused_before_anything_starts(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["trainer.total_steps=2", "trainer.save_freq=1", "data.val_files=[]"]
    launch(small_task.ppo(tmp_path, *changes))
    (tmp_path / TIMELINE_FILE).write_text("[]\n" + json.dumps({"step": 1}) + "\n")
    shutil.rmtree(tmp_path / "checkpoints" / "step_2")
    threads = threading.active_count()
    with pytest.raises(DataError, match=r"timeline\.jsonl, line 1"):
        launch(small_task.ppo(tmp_path, *changes))
    assert threading.active_count() == threads
