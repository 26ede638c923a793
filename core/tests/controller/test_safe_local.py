"""Memory that a worker shares, handles that chain and coroutines that run beside each other, in one process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safe_workers import WAYS, Asynchronous, Careless, OneByOne, Stage

from rollcast import ClassWithInitArgs, DataProto, DataProtoFuture, ResourcePool, WorkerGroup, register
from rollcast.errors import DataProtoError, DispatchError, WorkerError
from rollcast.runtime.local import LocalRuntime


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[[type], WorkerGroup]]:
    with LocalRuntime() as runtime:
        yield lambda cls: WorkerGroup(ResourcePool([1]), ClassWithInitArgs(cls), runtime=runtime, name="g")


@pytest.fixture(scope="module")
def careless(make: Any) -> WorkerGroup:
    group: WorkerGroup = make(Careless)
    return group


def batch() -> DataProto:
    return DataProto({"x": torch.arange(6.0).view(3, 2), "other": torch.zeros(3)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_handle", [False, True])
def test_a_write_that_is_not_declared_is_an_error_that_names_it(careless, way: str, as_handle: bool) -> None:
    data: Any = careless.keep.remote(batch()) if as_handle else batch()
    with pytest.raises(WorkerError, match=r"worker\.write wrote in place to column 'x'.*mutates=\('x',\)"):
        careless.write(data, way)


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_a_write_that_torch_does_not_count_is_seen_in_a_large_column(careless, way: str) -> None:
    with pytest.raises(WorkerError, match="column 'x'"):
        careless.write(DataProto({"x": torch.zeros(300, 1000)}), way)


def test_ragged_columns_are_watched(careless) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(WorkerError, match="column 'r'"):
        careless.write(DataProto({"r": ragged}), "add_", "r")


def test_a_declared_write_is_private(careless) -> None:
    data = batch()
    for _ in range(2):
        assert careless.write_own(data, "add_") == [[1, 2, 3, 4, 5, 6]]
    weights = {"w": torch.ones(2)}
    for _ in range(2):
        assert careless.write_all(data, weights) == [[21.0, 4.0]]
    assert data["x"].sum() == 15
    assert weights["w"].tolist() == [1, 1]
    with pytest.raises(WorkerError, match="column 'x'"):
        careless.write_others(data)


def test_damaged_rows_of_a_handle_cannot_be_read_any_more(careless) -> None:
    handle = careless.keep.remote(batch())
    with pytest.raises(WorkerError, match="wrote in place"):
        careless.write(handle, "add_")
    with pytest.raises(DataProtoError, match=r"damaged and cannot be read: worker\.write wrote in place to column 'x'"):
        handle.get()
    with pytest.raises(WorkerError, match="damaged"):
        careless.read(handle)


def test_what_the_controller_reads_is_its_own(careless) -> None:
    handle = careless.keep.remote(batch())
    handle.select("x")["x"].add_(1)
    handle.get()["x"].add_(1)
    assert careless.read(handle) == [[0, 1, 2, 3, 4, 5]]


def test_arguments_are_watched_and_containers_are_private(careless) -> None:
    with pytest.raises(WorkerError, match="argument 'weights'"):
        careless.write_argument({"layers": [torch.zeros(2)]})
    with pytest.raises(WorkerError, match="read-only"):
        careless.write_array(np.zeros(2))
    names, options = ["a"], {"nested": {"key": 0}}
    data = batch().with_columns({"info": [{"row": n} for n in range(3)]})
    assert careless.edit(names, options, data) == [2]
    assert (names, options, data.meta_info) == (["a"], {"nested": {"key": 0}}, {})
    assert "y" not in data
    assert data["info"][0] == {"row": 0}


def test_handles_inside_containers_are_read(careless) -> None:
    assert careless.count({"batches": [careless.keep.remote(batch())]}) == [[3, 15]]


def test_options_of_register_are_checked() -> None:
    with pytest.raises(DispatchError, match=r"mutates='x'.*a tuple of names"):
        register(mutates="x")
    with pytest.raises(DispatchError, match="rows='all'"):
        register(rows="all")  # type: ignore[arg-type]


def test_a_handle_knows_its_length_and_chains(make, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    group = make(Stage)
    first = group.after.remote(batch(), str(tmp_path))
    chained = group.plus.remote(first.select(["y"]))
    assert (len(first), len(chained)) == (3, 3)
    assert chained.select("z").joined(first.select("y"))["z"].tolist() == [[1, 3], [5, 7], [9, 11]]
    with pytest.raises(DataProtoError, match=r"rows='same' should return 3 rows and returned 1"):
        group.fewer.remote(batch()).get()


def test_an_error_that_nobody_waited_for_is_reported(make, caplog: pytest.LogCaptureFixture) -> None:
    group = make(Stage)
    handle = group.fail.remote(batch())
    kept = group.fail.remote(batch())
    del handle
    gc.collect()
    with caplog.at_level(logging.ERROR):
        group.ranked("")
        assert caplog.text.count("g.worker.fail failed, and nobody has waited for its handle") == 1
        assert "this stage breaks" in caplog.text
        with pytest.raises(WorkerError, match="this stage breaks"):
            kept.get()
        group.shutdown()
    assert caplog.text.count("nobody has waited") == 1


def test_coroutines_run_beside_other_calls(make) -> None:
    group = make(Asynchronous)
    waiting = group.wait.remote()
    assert not waiting.done()
    group.plain()
    group.release()
    assert waiting.get() == ["released"]
    assert list(waiting.as_completed()) == [(0, "released")]


def test_coroutines_can_be_kept_in_the_thread_of_all_calls(make) -> None:
    group = make(OneByOne)
    handles = [group.step.remote() for _ in range(3)]
    assert [handle.get() for handle in handles] == [[(1, "MainThread")]] * 3


def test_parts_of_a_call_have_no_ranks(make) -> None:
    handle = DataProtoFuture(lambda _: batch())
    with pytest.raises(DataProtoError, match="the future that a call of a registered method returned"):
        handle.as_completed()


def test_a_method_is_started_by_its_function(make) -> None:
    group = make(Stage)
    assert group.submit(Stage.plus, DataProto({"y": torch.zeros(3)})).select("z")["z"].tolist() == [1, 1, 1]
    with pytest.raises(
        DispatchError, match=r"Asynchronous.plain is not a registered method of the role 'worker'.*plus"
    ):
        group.submit(Asynchronous.plain)
