"""What a profiler sees of a run, and that a process without torch stays one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from controller_workers import Probe

from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
from rollcast.contracts.marks import add_listener, mark, remove_listener
from rollcast.runtime.local import LocalRuntime


def names_of(profiler: torch.profiler.profile) -> dict[str, int]:
    return {event.key: event.count for event in profiler.key_averages()}


def test_blocks_are_named_in_a_trace() -> None:
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            with mark("outer"), mark("inner {0}"):
                torch.ones(2)
        with pytest.raises(ZeroDivisionError), mark("failing"):
            raise ZeroDivisionError
    names = names_of(profiler)
    assert (names["outer"], names["inner {0}"], names["failing"]) == (2, 2, 1)


def test_calls_on_workers_are_named_by_role_and_method() -> None:
    with LocalRuntime() as runtime:
        group = WorkerGroup(ResourcePool([1]), {"critic": ClassWithInitArgs(Probe)}, runtime=runtime).spawn(["critic"])
        with torch.profiler.profile() as profiler:
            group["critic"].add([3], y=[4])
            group["critic"].waited(1)
    names = names_of(profiler)
    assert names["critic.add"] == names["critic.waited"] == 1


def test_ranges_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    with mark("outer"), mark("inner"):
        pass
    with pytest.raises(ZeroDivisionError), mark("failing"):
        raise ZeroDivisionError
    assert seen == ["outer", "inner", "end", "end", "failing", "end"]


def test_a_listener_is_around_every_block_until_it_is_removed() -> None:
    seen: list[str] = []

    @contextmanager
    def listen(name: str) -> Iterator[None]:
        seen.append(name)
        try:
            yield
        finally:
            seen.append(f"end of {name}")

    add_listener(listen)
    try:
        with mark("outer"), mark("inner"):
            pass
        with pytest.raises(ZeroDivisionError), mark("failing"):
            raise ZeroDivisionError
    finally:
        remove_listener(listen)
    with mark("later"):
        pass
    remove_listener(listen)
    assert seen == ["outer", "inner", "end of inner", "end of outer", "failing", "end of failing"]


def test_marking_imports_no_torch() -> None:
    code = (
        "import sys; from rollcast.contracts.marks import mark\nwith mark('x'): pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
