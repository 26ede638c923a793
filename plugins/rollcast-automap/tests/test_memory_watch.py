"""The most memory that calls take, by method."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics

from rollcast import Worker
from rollcast.contracts import marks
from rollcast.contracts.marks import mark
from rollcast.errors import WorkerError
from rollcast_automap.profiling import memory_watch
from rollcast_automap.profiling.memory_watch import MemoryWatch, Peak, start_watch, stop_watch, take_peaks

HERE = Worker()


@pytest.fixture
def watched() -> Iterator[None]:
    start_watch(HERE)
    start_watch(HERE)  # as each role of a process may ask
    yield
    stop_watch()


def fill(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes << 18)


@pytest.mark.usefixtures("watched")
def test_a_call_is_charged_what_was_resident_while_it_ran() -> None:
    with mark("actor.small"):
        fill(1)
    with mark("actor.large"):
        fill(300)
    with mark("actor.small"):
        fill(1)
    with mark("step 1"):
        fill(1)
    peaks = take_peaks(HERE)
    assert set(peaks) == {"small", "large"}
    assert peaks["large"].resident - peaks["small"].resident > 250 << 20
    assert (peaks["large"].allocated, peaks["large"].reserved) == (0, 0)
    assert take_peaks(HERE) == {}


def test_freed_memory_is_returned() -> None:
    """Blocks below those that are still in use stay with the C library until they are asked for."""
    memory_watch.reset_peak()
    before = memory_watch.read_peak().resident
    blocks = [bytes(100_000) for _ in range(3000)]
    kept = blocks[::100]
    del blocks
    memory_watch.return_free_memory()
    memory_watch.reset_peak()
    assert len(kept) == 30
    assert memory_watch.read_peak().resident - before < 100 << 20


@pytest.mark.usefixtures("watched")
def test_blocks_within_each_other_share_their_peaks() -> None:
    with mark("actor.outer"):
        with mark("actor.inner"):
            fill(300)
        with mark("actor.later"):
            pass
    peaks = take_peaks(HERE)
    assert peaks["outer"].resident >= peaks["inner"].resident
    assert peaks["inner"].resident - peaks["later"].resident > 250 << 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="the profiler works here")
def test_a_run_that_cannot_begin_leaves_nothing_behind(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no CUDA device"):
        launch(small_task.ppo(tmp_path / "run", "profiler=torch_memory", "profiler.steps=[1]"))
    assert marks._listeners == []


def test_peaks_join_number_by_number() -> None:
    assert Peak(1, 5, 2) | Peak(3, 4, 2) == Peak(3, 5, 2)


def test_a_run_leaves_nothing_behind_and_has_no_utilization_on_a_device_without_a_figure(
    small_task: SmallTask, tmp_path: Path
) -> None:
    changes = ["algorithm=gae", "actor.use_kl_loss=true", "trainer.total_steps=1"]
    launch(small_task.ppo(tmp_path / "run", *changes))
    assert marks._listeners == []
    row = read_metrics(tmp_path / "run")[-1]
    phases = ("generate", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor", "update_weights")
    peaks = [row[f"perf/cpu_memory_used_gb/{phase}"] for phase in phases]
    assert row["perf/cpu_memory_used_gb"] == max(peaks)
    rates = {key.rpartition("/")[2] for key in row if key.startswith("perf/tflops/")}
    assert rates == {"actor", "actor_infer", "ref", "critic", "critic_infer"}
    assert not [key for key in row if "mfu" in key or "allocated" in key]
    # 16 rows of 3 prompt tokens (of 4 characters at most) and up to 6 more.
    assert 16 * 4 <= row["perf/total_num_tokens"] <= 16 * (5 + 6)


def test_calls_beside_each_other_have_peaks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call knows the most memory while it was under way, whatever ended meanwhile."""
    peaks = iter([1, 2, 30, 4])
    monkeypatch.setattr(memory_watch, "reset_peak", lambda: None)
    monkeypatch.setattr(memory_watch, "read_peak", lambda: Peak(resident=next(peaks, 0)))
    watch = MemoryWatch()
    first, second = watch("role.first"), watch("role.second")
    first.__enter__()  # reads 1, which was before it
    second.__enter__()  # 2: in the first alone
    first.__exit__(None, None, None)  # 30: in both
    second.__exit__(None, None, None)  # 4: in the second
    taken = watch.take()
    assert {name: peak.resident for name, peak in taken.items()} == {"first": 30, "second": 30}


def test_threads_may_call_at_once() -> None:
    watch, errors = MemoryWatch(), []

    def call(name: str) -> None:
        try:
            for _ in range(300):
                with watch(name):
                    pass
        except Exception as error:  # shown below
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call, args=(f"role.method{number % 2}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert set(watch.take()) == {"method0", "method1"}
