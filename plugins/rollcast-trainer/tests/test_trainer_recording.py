"""Calls that are recorded and run again."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recording_workers import Forgetful, Scaled, Sharded, batch
from typer.testing import CliRunner

from rollcast import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from rollcast.cli.app import build_app
from rollcast.errors import ConfigError, DispatchError, WorkerError
from rollcast.runtime.local import LocalRuntime
from rollcast_ray.runtime import RayRuntime
from rollcast_trainer import recording
from rollcast_trainer.recording import CallOutcome, CallRecord, CallRecorder, Replay, compare, load_record, replay


def replay_trusted(folder: Path) -> Replay:
    return replay(folder, trust_pickle=True)


def load_trusted(folder: Path) -> tuple[CallRecord, CallOutcome | None]:
    return load_record(folder, trust_pickle=True)


@pytest.fixture
def record(tmp_path: Path):
    """Records a call on the local runtime while a function runs; gives the record's folder."""

    def run(wanted: str, work, cls: type = Scaled) -> Path:
        with LocalRuntime() as runtime:
            runtime.recorder = CallRecorder(wanted, tmp_path / "records")
            work(WorkerGroup(ResourcePool([1]), ClassWithInitArgs(cls, 2.0), runtime=runtime, name="g"))
            assert runtime.recorder.recorded is not None
            return runtime.recorder.recorded

    return run


def grow_and_scale(group: WorkerGroup) -> None:
    group.scale(batch(2))
    group.grow(3.0)
    group.scale(batch(4), plus=1.0)
    group.grow(5.0)


def test_a_call_runs_again_with_its_arguments_and_the_state_before_it(record) -> None:
    folder = record("scale:2", grow_and_scale)
    about = json.loads((folder / "record.json").read_text())
    assert (about["group"], about["role"], about["method"], about["call"]) == ("g", "worker", "scale", 2)
    again = replay_trusted(folder)
    assert again.agrees(0.0)
    assert again.replayed.result[0]["y"].tolist() == [1.0, 7.0, 13.0, 19.0]
    assert {found.where for found in again.findings} == {
        "result[0]['y']",
        *(f"result[0]['u'][{row}]" for row in range(4)),
        "result[0].meta_info['factor']",
    }


def test_the_first_call_of_the_method_is_meant_where_no_number_is_given(record) -> None:
    folder = record("worker.scale", grow_and_scale)
    assert len(load_trusted(folder)[0].args[0]) == 2
    assert replay_trusted(folder).agrees(0.0)


def test_other_results_are_told_value_by_value(record) -> None:
    again = replay_trusted(record("scale:2", grow_and_scale, Forgetful))
    assert not again.agrees(1.0)
    gaps = {found.where: found.difference for found in again.findings}
    assert gaps["result[0]['y']"] == 12.0  # x up to 3, times 6 and times 2
    assert gaps["result[0].meta_info['factor']"] == 4.0
    assert gaps["result[0]['u'][0]"] == 0.0


def test_a_call_that_cannot_be_dispatched_has_failed(record) -> None:
    def work(group: WorkerGroup) -> None:
        with pytest.raises(DispatchError):
            group.own([1.0, 2.0, 3.0])

    _, outcome = load_trusted(record("own", work))
    assert outcome is not None
    assert outcome.error.startswith("DispatchError: ")


def test_a_call_that_failed_fails_again(record) -> None:
    def work(group: WorkerGroup) -> None:
        with pytest.raises(WorkerError):
            group.refuse(batch(3))

    again = replay_trusted(record("refuse", work))
    assert again.recorded is not None
    assert "3 rows are too many" in again.recorded.error
    assert "3 rows are too many" in again.replayed.error
    assert again.agrees(0.0)


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with RayRuntime(num_cpus=2) as made:
        yield made
        made.recorder = None


@pytest.mark.exhaustive
def test_a_call_of_several_ranks_with_handles_runs_on_one(runtime: RayRuntime, tmp_path: Path) -> None:
    runtime.recorder = recorder = CallRecorder("scale:2", tmp_path)
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Scaled, 2.0), runtime=runtime, name="g")
    handle = group.scale.remote(batch(4)).get()[0].rename({"y": "x"})
    group.grow(10.0)
    assert group.scale(handle)[1]["y"].tolist() == [0.0, 40.0, 80.0, 120.0]
    group.shutdown()
    assert recorder.recorded is not None
    again = replay_trusted(recorder.recorded)
    assert again.record.world_size == 2
    assert again.agrees(0.0)


def test_the_rows_of_a_result_by_rank_are_recorded(runtime: RayRuntime, tmp_path: Path) -> None:
    """A record is read in other processes, where no worker has the rows any more."""
    runtime.recorder = recorder = CallRecorder("scale", tmp_path)
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Scaled, 2.0), runtime=runtime, name="g")
    future = group.scale.remote(batch(4))
    expected = [part["y"].tolist() for part in future.get()]
    group.shutdown()
    assert recorder.recorded is not None
    _, outcome = load_trusted(recorder.recorded)
    assert outcome is not None
    assert [part["y"].tolist() for part in outcome.result] == expected


def test_ranks_need_no_folder_in_common(runtime: RayRuntime, tmp_path: Path, monkeypatch) -> None:
    """Each rank writes on its own node; the files come back through the object store, in parts."""
    monkeypatch.setattr(recording, "_PART", 5)
    runtime.recorder = recorder = CallRecorder("scale", tmp_path / "records")
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Sharded, 2.0), runtime=runtime, name="g")
    group.scale(batch(4))
    state = recorder.recorded / "state" / "worker"
    files = {str(file.relative_to(state)): file.read_text() for file in state.rglob("*") if file.is_file()}
    folders = group.folders()
    assert files == {"same": "2.0", "shards/0": "shard of rank 0", "shards/1": "shard of rank 1"}
    assert len(set(folders)) == 2
    assert not any(Path(folder).exists() for folder in folders)
    runtime.recorder = CallRecorder("scale", tmp_path / "records")
    group.disagree()
    with pytest.raises(WorkerError, match="rank 1 and one before it wrote a different same"):
        group.scale(batch(4))
    group.shutdown()


def test_no_pickle_is_loaded_without_the_flag(record, tmp_path: Path) -> None:
    folder = record("scale", grow_and_scale)
    (folder / "call.pkl").write_bytes(pickle.dumps(Evil(str(tmp_path / "ran"))))
    with pytest.raises(ConfigError, match=r"which can run any code when they are loaded\. Add --trust-pickle"):
        replay(folder)
    done = CliRunner().invoke(build_app(), ["replay", str(folder)])
    assert (done.exit_code, "--trust-pickle" in done.output) == (2, True)
    assert not (tmp_path / "ran").exists()
    load_trusted(folder)
    assert (tmp_path / "ran").exists()


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.file),)


@pytest.mark.parametrize("wanted", ["", "a b", "method:0", "method:x", ".method", "role."])
def test_what_names_no_method_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.record is"):
        CallRecorder(wanted, Path())


def test_the_command_tells_what_differs(record, tmp_path: Path) -> None:
    same, other = record("scale:2", grow_and_scale), record("scale:2", grow_and_scale, Forgetful)
    assert same != other
    done = CliRunner().invoke(build_app(), ["replay", "--trust-pickle", str(same)])
    assert (done.exit_code, "agrees to 1e-05" in done.output) == (0, True)
    done = CliRunner().invoke(build_app(), ["replay", "--trust-pickle", str(other)])
    assert done.exit_code == 1
    assert "result[0]['y']" in done.output
    assert "differs by more than 1e-05" in done.output
    assert CliRunner().invoke(build_app(), ["replay", "--trust-pickle", str(other), "--atol", "100"]).exit_code == 0
    done = CliRunner().invoke(build_app(), ["replay", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no record" in done.output


def test_the_debugger_stops_in_the_method(record) -> None:
    folder = record("scale:2", grow_and_scale)
    done = CliRunner().invoke(
        build_app(), ["replay", "--trust-pickle", str(folder), "--debug"], input="p self.factor\nc\n"
    )
    assert "recording_workers.py" in done.output
    assert "6.0" in done.output
    assert done.exit_code == 0


def test_comparison_of_single_values() -> None:
    def gap(left: object, right: object) -> float:
        return max(found.difference for found in compare(left, right))

    nan, inf = math.nan, math.inf
    assert gap(torch.tensor([1.0, nan]), torch.tensor([1.5, nan])) == 0.5
    assert gap(torch.tensor([1.0]), torch.tensor([nan])) == inf
    assert gap(torch.tensor([1]), torch.tensor([1.0])) == inf
    assert gap(torch.zeros(2), torch.zeros(3)) == inf
    assert gap({"a": 1, "b": 2}, {"a": 1.5}) == inf
    assert gap([1, "x"], [3, "x"]) == 2.0
    assert gap([1], [1, 2]) == inf
    assert gap(nan, nan) == 0.0
    assert gap(None, None) == 0.0
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert gap(DataProto.from_dict({"r": ragged}), DataProto.from_dict({"r": ragged * 2})) == 1.0
