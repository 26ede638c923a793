"""The cost model ``measured``: prices from tables, carried to other meshes, corrected by runs; ``map --check``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_tools import SmallTask, launch
from typer.testing import CliRunner

from rollcast.errors import ConfigError, DataError
from rollcast_automap.composition import predict
from rollcast_automap.contract import Lengths, Mesh, Placement, Pool, Problem, StageCost
from rollcast_automap.contract import Mapping as RoleMapping
from rollcast_automap.map_command import app as map_app
from rollcast_automap.profiling.command import app as profile_app
from rollcast_automap.profiling.costs import CostTable, Measurement, RoleLayout
from rollcast_automap.profiling.devices import DeviceInfo
from rollcast_automap.profiling.measured_costs import Grid, MeasuredConfig, MeasuredCosts
from rollcast_automap.simulation.mapping_simulation import simulate_mapping
from rollcast_automap.testing import CostModelSuite, small_problem

ROWS, LENGTHS = (1, 16, 64), (64, 512)
Law = Callable[[int, int], float]


def make_table(
    folder: Path,
    name: str,
    laws: Mapping[tuple[str, str], Law],
    *,
    ranks: int = 1,
    parameters: int = 10**9,
    engine: str = "fsdp",
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Write a table in which each phase of a role follows a law of rows and tokens; return its path."""
    layouts = {
        role: RoleLayout(
            engine if role != "rollout" else "vllm",
            f"models/{name}",
            parameters,
            ranks,
            ranks,
            settings=dict(settings or {}) if role != "rollout" else {"mode": "hybrid"},
        )
        for role, _ in laws
    }
    measured = []
    for (role, phase), law in laws.items():
        sizes = [(0, 0)] if phase in ("optimizer", "sync") else [(rows, length) for length in LENGTHS for rows in ROWS]
        for rows, length in sizes:
            seconds = law(rows, length)
            measured.append(
                Measurement(role, phase, rows, length, 1, rows * length, seconds, seconds, seconds, 3)  # type: ignore[arg-type]
            )
    device = DeviceInfo("cpu", 1 << 34)
    file = folder / f"{name}_{ranks}.json"
    CostTable("2026-01-01T00:00:00+00:00", {}, device, [ranks], layouts, measured).write(file)
    return str(file)


def costs(tables: Iterable[str], runs: Iterable[str] = ()) -> MeasuredCosts:
    return MeasuredCosts(MeasuredConfig(tables=list(tables), runs=list(runs)))


def price(model: MeasuredCosts, name: str, mesh: Mesh, rows: int, problem: Problem | None = None) -> StageCost:
    problem = problem or fixed()
    (stage,) = (each for each in problem.stages if each.name == name)
    return model.stage_cost(
        problem, stage, Placement(stage.role, "pool", mesh, rows), Pool("pool", ((0, mesh.size),)), "hybrid"
    )


def fixed() -> Problem:
    """Return a problem whose rows are all equally long: 64 rows of 64 + 192 tokens."""
    return replace(small_problem(), prompt_lengths=Lengths(64, 64), response_lengths=Lengths(192, 192))


#: Seconds of each phase by rows and tokens, of one rank.
LAWS: dict[tuple[str, str], Law] = {
    ("actor", "forward"): lambda rows, length: 1e-3 + 1e-6 * rows * length,
    ("actor", "forward_backward"): lambda rows, length: 2e-3 + 3e-6 * rows * length,
    ("actor", "optimizer"): lambda rows, length: 0.5,
    ("rollout", "prefill"): lambda rows, length: 1e-6 * rows * length,
    ("rollout", "decode"): lambda rows, length: 1e-3 + 1e-5 * rows,
    ("rollout", "sync"): lambda rows, length: 0.25,
}


def test_a_stage_takes_what_its_passes_took(tmp_path: Path) -> None:
    model = costs([make_table(tmp_path, "small", LAWS)])
    # Two mini-batches of 32 rows in passes of 16, and the optimizer's step after each.
    update = price(model, "update_actor", Mesh(), 16)
    assert update.seconds == pytest.approx(4 * (2e-3 + 3e-6 * 16 * 256) + 2 * 0.5)
    assert update.note == ""
    # 64 prompts of 64 tokens, then 192 steps in which all of them decode.
    generated = price(model, "rollout", Mesh(), 64)
    assert generated.seconds == pytest.approx(1e-6 * 64 * 64 + 192 * (1e-3 + 1e-5 * 64), rel=0.01)
    trained, rollout = ((Placement(role, "pool", Mesh(), 16), Pool("pool", ((0, 1),))) for role in ("actor", "rollout"))
    assert model.sync_cost(fixed(), trained, rollout, "hybrid").seconds == pytest.approx(0.25)
    assert "was not measured: analytical" in model.sync_cost(fixed(), trained, rollout, "standalone").note


def test_a_simulation_takes_the_measured_speeds(tmp_path: Path) -> None:
    model, problem = costs([make_table(tmp_path, "small", LAWS)]), fixed()
    (stage,) = (each for each in problem.stages if each.kind == "generate")
    placement, pool = Placement("rollout", "pool", Mesh(), 16), Pool("pool", ((0, 1),))
    speed = model.generation_speed(problem, stage, placement, pool, "hybrid")
    assert speed is not None
    assert speed.prefill == pytest.approx(1e-6 * 64)
    assert speed.decode(16, 200) == pytest.approx(1e-3 + 1e-5 * 16)
    trained = Placement("actor", "pool", Mesh(), 16)
    mapping = RoleMapping((pool,), (trained, placement, Placement("critic", "pool", Mesh(), 16)), "hybrid")
    simulated = simulate_mapping(problem, mapping, model, steps=2, seed=0)
    assert simulated.step_seconds == pytest.approx(predict(problem, model, mapping).step_seconds, rel=0.01)


def test_skipped_rows_are_not_priced(tmp_path: Path) -> None:
    model = costs([make_table(tmp_path, "small", LAWS)])
    half = replace(fixed(), trained_share=0.5)
    whole, less = (price(model, "update_actor", Mesh(), 16, each).seconds for each in (fixed(), half))
    assert less - 1.0 == pytest.approx((whole - 1.0) / 2)
    assert price(model, "update_actor", Mesh(), 16, replace(fixed(), trained_share=0.0)).seconds >= 1.0


def test_what_lies_beyond_the_measured_sizes_is_said(tmp_path: Path) -> None:
    model = costs([make_table(tmp_path, "small", LAWS)])
    many = replace(fixed(), prompts=64, mini_batches=1)
    assert price(model, "update_actor", Mesh(), 256, many).note == "256 rows: 4 times the largest measured"
    long = replace(fixed(), response_lengths=Lengths(1984, 1984))
    assert price(model, "update_actor", Mesh(), 16, long).note == "2,048 tokens a row: 4 times the largest measured"
    unknown = replace(fixed(), roles=tuple(replace(role, plugin="other") for role in fixed().roles))
    assert price(model, "update_actor", Mesh(), 16, unknown).note.startswith("other with this model was not measured")


def slowed(laws: Mapping[tuple[str, str], Law], slope: float, offset: float) -> dict[tuple[str, str], Law]:
    def changed(law: Law) -> Law:
        return lambda rows, length: slope * law(rows, length) + offset

    return {key: changed(law) for key, law in laws.items()}


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_another_mesh_is_as_another_model_shows(tmp_path: Path, engine: str) -> None:
    """Of the same engine, or of another one where the engine has no such pair."""
    engine_laws = {key: law for key, law in LAWS.items() if key[0] == "actor"}
    other = {key: (lambda rows, length, law=law: 2 * law(rows, length)) for key, law in engine_laws.items()}
    model = costs(
        [
            make_table(tmp_path, "small", LAWS),
            make_table(tmp_path, "other", other, parameters=7, engine=engine),
            make_table(tmp_path, "other", slowed(other, 1.5, 0.01), parameters=7, engine=engine, ranks=2),
        ]
    )
    two = price(model, "update_actor", Mesh(data=2), 16)
    # One pass of 16 rows for each mini-batch on each rank. Of the optimizer one figure is known on either mesh.
    step = 0.5 * (1.5 * 1.0 + 0.01) / 1.0
    assert two.seconds == pytest.approx(2 * (1.5 * (2e-3 + 3e-6 * 16 * 256) + 0.01 + step))
    assert two.note == "from a mesh of data 1, tensor 1, pipeline 1, as other changes"


def test_meshes_that_compute_otherwise_are_not_compared(tmp_path: Path) -> None:
    """A sharded model computes every prompt of a group, so its ratio to a whole one says nothing of another run's."""
    shares = {"share_prompts": True}
    model = costs(
        [
            make_table(tmp_path, "small", LAWS),
            make_table(tmp_path, "other", LAWS, parameters=7, settings=shares),
            make_table(tmp_path, "other", slowed(LAWS, 3, 0), parameters=7, settings=shares, ranks=2),
        ]
    )
    assert price(model, "update_actor", Mesh(data=2), 16).note == "measured on a mesh of data 1, tensor 1, pipeline 1"


@given(
    st.dictionaries(st.tuples(st.integers(1, 64), st.integers(1, 512)), st.floats(0, 100), min_size=1, max_size=12),
    st.floats(0, 200),
    st.floats(0, 1000),
)
def test_a_grid_rises_and_meets_its_largest_points(
    points: dict[tuple[int, int], float], rows: float, length: float
) -> None:
    grid = Grid.build((*size, value) for size, value in points.items())
    assert grid.at(rows, length) >= 0
    for (count, tokens), value in points.items():
        # Noise is taken out upwards: more rows or tokens never take less.
        assert grid.at(count, tokens) >= value * (1 - 1e-9)
        assert grid.at(count + 1, tokens) >= grid.at(count, tokens) * (1 - 1e-9)
    assert bool(grid.note(rows, length)) == (rows > 1.25 * grid.rows[-1] or length > 1.25 * grid.lengths[-1])


def test_tables_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cost_model\.tables is empty; write a table with `rollcast profile`"):
        costs([])
    with pytest.raises(DataError, match=r"none\.json cannot be read as a table of costs"):
        costs([str(tmp_path / "none.json")])


class TestMeasuredCosts(CostModelSuite):
    name = "measured"
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "settings", {"tables": [make_table(tmp_path, "small", LAWS)]})


@pytest.fixture(scope="module")
def profiled_run(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a table of costs and a run of the same configuration."""
    folder = tmp_path_factory.mktemp("checked")
    overrides = small_task.ppo(folder / "run", "trainer.total_steps=4", "data.val_files=[]", "trackers=[jsonl]")
    grid = ["--batch-sizes", "4,32", "--lengths", "8,22", "--new-tokens", "4", "--repeats", "2"]
    table = folder / "costs.json"
    result = CliRunner().invoke(profile_app, [*overrides, *grid, "--output", str(table)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    launch(overrides)
    return table, folder / "run"


def check(*arguments: str) -> str:
    result = CliRunner().invoke(map_app, ["--check", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_that_corrects_the_prices_is_predicted(profiled_run: tuple[Path, Path]) -> None:
    table, run = profiled_run
    measured = ["--cost-model", "measured", f"cost_model.tables=[{table}]", f"cost_model.runs=[{run}]", "--json"]
    (found,) = json.loads(check(str(run), *measured))
    assert {"rollout", "update_actor", "weight_sync", "controller"} <= set(found["stages"])
    assert found["step"]["predicted_s"] == pytest.approx(found["step"]["measured_s"], rel=1e-6)
    for stage in ("rollout", "update_actor"):
        figures = found["stages"][stage]
        assert figures["predicted_s"] == pytest.approx(figures["measured_s"], rel=1e-6)
    assert found["memory"]["measured_bytes"] > 1 << 20


def test_predictions_stand_beside_measurements(profiled_run: tuple[Path, Path]) -> None:
    text = check(str(profiled_run[1]), "cluster.device=cpu")
    for word in ("predicted", "measured", "off by", "update_actor", "step", "memory"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["trainer.seed=1"], ConfigError, r"so trainer\.seed=1 has no effect; it takes cluster\.device and cost_model"),
        (["--check", "nowhere"], DataError, r"nowhere is no run directory"),
    ],
)
def test_what_cannot_be_checked_is_named(
    profiled_run: tuple[Path, Path], arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(str(profiled_run[1]), *arguments)


def test_a_run_of_one_step_is_too_short(profiled_run: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("config.yaml", "timeline.jsonl"):
        (tmp_path / name).write_text((profiled_run[1] / name).read_text())
    (tmp_path / "metrics.jsonl").write_text((profiled_run[1] / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match=r"has 1 steps, but the first is not counted; train more"):
        check(str(tmp_path))
