"""``rollcast profile``: what it measures, the file that it writes, and what it refuses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask
from typer.testing import CliRunner, Result

from rollcast.cli.app import build_app
from rollcast.errors import DataError
from rollcast.protocol import DataProto
from rollcast_automap.profiling.cost_job import a_step
from rollcast_automap.profiling.costs import PHASES, CostTable, Measurement, RoleLayout, read_costs
from rollcast_automap.profiling.devices import DeviceInfo
from rollcast_automap.profiling.flops import read_model_flops
from rollcast_automap.profiling.passes import PassShape, random_rows
from rollcast_fsdp.engine import FsdpEngine
from rollcast_serving.sampler import InProcessSampler

GRID = ["--batch-sizes", "1,3", "--lengths", "4,12", "--new-tokens", "4", "--repeats", "2"]


def run(overrides: list[str], *options: str) -> Result:
    return CliRunner().invoke(build_app(), ["profile", *overrides, *options])


@pytest.fixture(scope="module")
def measured(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every role's table, and what was printed."""
    folder = tmp_path_factory.mktemp("costs")
    overrides = small_task.ppo(folder / "run", "algorithm=gae", "actor.use_kl_loss=true", "data.train_files=[]")
    result = run(overrides, *GRID, "--output", str(folder / "costs.json"))
    assert result.exit_code == 0, result.stderr
    return folder / "costs.json", result.stdout


def test_every_role_and_phase_is_measured(measured: tuple[Path, str], small_task: SmallTask) -> None:
    table = read_costs(measured[0])
    found = {(each.role, each.phase) for each in table.measurements} | {("actor", "backward"), ("critic", "backward")}
    trained = {"forward", "forward_backward", "backward", "optimizer"}
    assert found == {
        *(("rollout", phase) for phase in ("prefill", "decode", "sync")),
        *((role, phase) for role in ("actor", "critic") for phase in trained),
        ("ref", "forward"),
    }
    # What "backward" is the difference of may be lost in the noise of a busy machine.
    differs = {(role, phase) for role, phase in found if phase in ("sync", "optimizer", "backward")}
    for role, phase in found - differs:
        sizes = [(each.length, each.batch_size) for each in table.find(role, phase)]
        assert sizes == [(4, 1), (4, 3), (12, 1), (12, 3)], (role, phase)
    assert all(each.seconds_min <= each.seconds <= each.seconds_max for each in table.measurements)
    assert all(each.seconds > 0 for each in table.measurements)
    # Prompts of 16 and responses of 6 tokens make the shares of rows of any length.
    assert {each.response_tokens for each in table.find("actor", "forward") if each.length == 12} == {3}
    assert not measured[0].parent.joinpath("run").exists()


def test_operations_memory_and_layout(measured: tuple[Path, str], small_task: SmallTask) -> None:
    table = read_costs(measured[0])
    counter = read_model_flops(small_task.model)
    forward = next(each for each in table.find("actor", "forward") if (each.batch_size, each.length) == (3, 12))
    assert forward.flops == counter.count([12] * 3, 9)
    assert forward.tokens == 36
    both = next(each for each in table.find("actor", "forward_backward") if (each.batch_size, each.length) == (3, 12))
    assert both.flops == counter.count([12] * 3, 9, "train")
    decode = next(each for each in table.find("rollout", "decode") if (each.batch_size, each.length) == (3, 12))
    # One token more is the difference of two prompts, but for the pairs that the new token is not in.
    assert decode.flops == counter.count([13] * 3, 3) - counter.count([12] * 3, 0) - 2 * counter.pair * 3 * 13
    assert forward.peak_bytes is not None and forward.peak_bytes > 1 << 20
    actor = table.roles["actor"]
    assert (actor.engine, actor.world_size, actor.data_parallel, actor.tensor_parallel) == ("fsdp", 1, 1, 1)
    assert actor.settings["model_dtype"] == "fp32"
    assert actor.parameters is not None and 0 < actor.parameters - counter.body - counter.head < 10_000
    assert table.roles["rollout"].engine == "hf"
    assert table.versions["torch"] == torch.__version__
    assert (table.nodes, table.device.memory_bytes > 1 << 30) == ([1], True)


class _OnItsWay:
    """A batch that takes 50 ms to arrive, as the handle of a call that has not ended."""

    def __init__(self, batch: DataProto) -> None:
        self._batch = batch

    def local(self, keys: str) -> DataProto:
        time.sleep(0.05)
        return self._batch.local(keys)


def test_generation_is_waited_for(small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = InProcessSampler.generate
    monkeypatch.setattr(InProcessSampler, "generate", lambda *arguments: _OnItsWay(real(*arguments)))
    grid = ["--batch-sizes", "2", "--lengths", "4", "--new-tokens", "2", "--repeats", "1", "--phases", "prefill"]
    result = run(small_task.ppo(tmp_path / "run"), *grid, "--output", str(tmp_path / "costs.json"))
    assert result.exit_code == 0, result.stderr
    (prefill,) = read_costs(tmp_path / "costs.json").find("rollout", "prefill")
    assert prefill.seconds_min is not None and prefill.seconds_min >= 0.05


def test_people_get_all_of_it(measured: tuple[Path, str]) -> None:
    for words in (
        "forward_backward",
        "prefill",
        "TFLOP/s",
        "peak memory",
        " measurements on ",
    ):
        assert words in measured[1]
    assert "…" not in measured[1]


def test_a_table_comes_back_as_it_was_written(measured: tuple[Path, str], tmp_path: Path) -> None:
    table = read_costs(measured[0])
    table.write(tmp_path / "deeper" / "again.json")
    assert read_costs(tmp_path / "deeper" / "again.json") == table
    assert [path.name for path in (tmp_path / "deeper").iterdir()] == ["again.json"]


def test_sizes_that_do_not_fit_are_told_and_larger_ones_left_out(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FsdpEngine.forward_backward_batch

    def small_device(self: FsdpEngine, data: Any, loss_function: Any, settings: Any, forward_only: bool = False) -> Any:
        if not forward_only and len(data) * data["input_ids"].shape[1] > 20:
            raise torch.OutOfMemoryError("no room")
        return real(self, data, loss_function, settings, forward_only)

    monkeypatch.setattr(FsdpEngine, "forward_backward_batch", small_device)
    output = tmp_path / "costs.json"
    phases = ["--phases", "forward_backward,optimizer", "--batch-sizes", "2,8,16", "--lengths", "6", "--repeats", "1"]
    result = run(small_task.ppo(tmp_path / "run"), *phases, "--output", str(output))
    assert result.exit_code == 0, result.stderr
    assert "out of memory" in result.stdout
    whole = read_costs(output).measurements
    shown = [(each.phase, each.batch_size, each.out_of_memory, each.seconds is None) for each in whole]
    assert shown == [
        ("forward_backward", 2, False, False),
        ("optimizer", 0, False, False),
        ("forward_backward", 8, True, True),
    ]
    assert [each.batch_size for each in read_costs(output).find("actor", "forward_backward")] == [2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--phases", "prefil"], f"--phases is 'prefil'; valid: {', '.join(PHASES)}"),
        (["--batch-sizes", "1,x"], "--batch-sizes is '1,x'; give whole numbers"),
        (["--batch-sizes", "0"], "--batch-sizes is 0; give numbers from 1"),
        (["--lengths", ""], "--lengths is ''; give whole numbers"),
        (["--lengths", "4", "--output", "."], "is a folder; name a file in it"),
        (["--lengths", "508"], "--lengths 508 and --new-tokens 16 make 524 tokens, but the model in"),
        (["actor.ppo_mini_batch_size=3"], "do not divide into mini-batches"),
        (["model.path=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_refused(small_task: SmallTask, tmp_path: Path, options: list[str], says: str) -> None:
    result = run(small_task.ppo(tmp_path / "run"), "--output", str(tmp_path / "costs.json"), *options)
    assert result.exit_code == 2
    assert says in result.stderr.replace("\n", " ")
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.parametrize(("seconds", "step"), [(9.0, 2.0), (1.0, 0.2), (0.5, 0.1)])
def test_a_step_that_is_lost_in_the_noise_is_bounded(seconds: float, step: float) -> None:
    assert a_step(seconds, 1.0, 4) == pytest.approx(step)


def make_table() -> CostTable:
    layout = RoleLayout("fsdp", "model", None, 1, 1)
    measurement = Measurement("actor", "forward", 1, 8, 4, 8, 0.5, 0.4, 0.6, 3)
    return CostTable("2026-01-01T00:00:00+00:00", {}, DeviceInfo("cpu", 1), [1], {"actor": layout}, [measurement])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": "other"}, "is no table of costs; `rollcast profile` writes one"),
        ({"version": 2}, "has version 2 of the table of costs, but version 1 is read here"),
        ({"nodes": None}, "is damaged"),
        (
            {"device": {"name": "cpu"}},
            "is damaged: ValueError: a DeviceInfo has the keys memory_bytes, name, peak_flops",
        ),
        ({"roles": {}}, "it measures 'forward' of 'actor', which it does not know"),
    ],
)
def test_files_that_are_no_tables_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file = tmp_path / "costs.json"
    make_table().write(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(DataError, match=says):
        read_costs(file)
    file.write_text("{")
    with pytest.raises(DataError, match="cannot be read as a table of costs"):
        read_costs(file)
    with pytest.raises(DataError, match="cannot be read as a table of costs"):
        read_costs(tmp_path / "none.json")


def test_what_did_not_fit_is_not_found() -> None:
    table = make_table()
    small = table.measurements[0]
    table.measurements.append(replace(small, batch_size=64, seconds=None, out_of_memory=True))
    assert table.find("actor", "forward") == [small]
    assert table.find("actor", "decode") == []


def test_rows_share_prompts_as_in_training() -> None:
    def prompts(rows: int, drawn: bool) -> int:
        return len(
            random_rows(PassShape(rows, 5, 2, 50, samples=8, batch_rows=512), 0, drawn)["input_ids"][:, :5].unique(
                dim=0
            )
        )

    assert [prompts(rows, drawn=False) for rows in (1, 8, 64)] == [1, 1, 8]
    # A draw of half of the rows meets nearly every prompt, four times on average; a few rows meet one each.
    assert prompts(256, drawn=True) >= 60
    assert prompts(8, drawn=True) >= 7
    assert prompts(512, drawn=True) == 64


def test_rows_are_whole_and_the_same_on_ranks_of_one_part() -> None:
    rows = random_rows(PassShape(3, 5, 2, 50), seed=4)
    assert torch.equal(rows["input_ids"], random_rows(PassShape(3, 5, 2, 50), seed=4)["input_ids"])
    assert not torch.equal(rows["input_ids"], random_rows(PassShape(3, 5, 2, 50), seed=5)["input_ids"])
    assert torch.equal(rows["responses"], rows["input_ids"][:, 5:])
    assert rows["response_mask"].shape == (3, 2) and bool(rows["attention_mask"].all())
    assert rows["position_ids"][1].tolist() == list(range(7))
