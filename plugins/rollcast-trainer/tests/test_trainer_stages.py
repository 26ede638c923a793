"""The list of stages: what is put in for what is read, in which order, and what a recipe can change."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics, run_stages, set_up

from rollcast import Worker, register
from rollcast.config import compose
from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantages
from rollcast.contracts.engine import engines
from rollcast.contracts.stage import Stage, StageSpec, roles, stages
from rollcast.errors import CapabilityError, ConfigError, PluginNotFoundError
from rollcast.protocol import DataProto, Jagged
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.settings import check_run
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage, list_workers
from rollcast_trainer.run.supply import Changes, supply
from rollcast_trainer.workers.reward_model import with_end_state

A = {
    "make": StageSpec(reads=("prompt",), writes=("text", "x/")),
    "score": StageSpec(reads=("text",), writes=("score",)),
    "learn": StageSpec(reads=("score", "weight"), after=("check",)),
    "weigh": StageSpec(reads=("text", "score"), writes=("weight",)),
    "check": StageSpec(reads=("text",)),
    "never": StageSpec(reads=("nothing",), writes=("unused",)),
}


def names(*goals: str, specs: dict[str, StageSpec] = A, changes: Changes | None = None) -> list[str]:
    return [place.name for place in supply(goals, specs, ["prompt"], changes)]


def test_what_is_read_is_written_before() -> None:
    assert names("learn") == ["make", "score", "weigh", "learn"]
    assert {place.name: place.reason for place in supply(["learn"], A, ["prompt"])} == {
        "make": "score reads text",
        "score": "learn reads score",
        "weigh": "learn reads weight",
        "learn": "goal of the trainer",
    }


def test_a_prefix_stands_for_all_its_columns() -> None:
    assert names("read", specs={**A, "read": StageSpec(reads=("x/3",))}) == ["make", "read"]


def test_a_stage_takes_the_place_of_another() -> None:
    other = StageSpec(reads=("prompt",), writes=("text", "x/", "more"), replaces=("make",))
    late = StageSpec(reads=("more",), writes=("weight",), after=("make",), brings=("make",))
    specs = {**A, "other": other, "weigh": late}
    assert names("learn", specs=specs) == ["other", "score", "weigh", "learn"]
    assert names("make", specs=specs) == ["other"]
    with pytest.raises(ConfigError, match=r"'other' and 'third' both replace 'make'"):
        names("learn", specs={**specs, "third": other})
    with pytest.raises(ConfigError, match=r"insert names 'make', which 'other' replaces"):
        names("learn", specs=specs, changes=Changes(insert=["make"]))


def test_nothing_writes_a_column() -> None:
    with pytest.raises(ConfigError, match=r"'never' reads the column 'nothing', which no stage writes"):
        names("never")


def test_two_writers_of_a_column_need_a_choice() -> None:
    specs = {**A, "heavier": StageSpec(writes=("weight",))}
    with pytest.raises(ConfigError, match=r"'learn' reads the column 'weight', which weigh and heavier both write"):
        names("learn", specs=specs)
    assert names("learn", specs={name: specs[name] for name in specs if name != "weigh"}) == [
        "make",
        "score",
        "heavier",
        "learn",
    ]
    # A writer that is in the list anyway is taken.
    assert "weigh" not in names("heavier", "learn", specs=specs)


def test_stages_that_wait_for_each_other_are_named() -> None:
    specs = {"a": StageSpec(reads=("y",), writes=("x",)), "b": StageSpec(reads=("x",), writes=("y",))}
    with pytest.raises(ConfigError, match="a -> b -> a"):
        names("a", specs=specs)


def test_what_changes_rows_comes_before_all_that_it_does_not_need() -> None:
    specs = {
        **A,
        "filter": StageSpec(reads=("score",), changes_rows=True),
        "score": StageSpec(reads=("text",), writes=("score",), brings=("filter",)),
    }
    assert names("learn", "check", specs=specs) == ["make", "score", "filter", "weigh", "check", "learn"]


def test_a_recipe_inserts_replaces_and_removes() -> None:
    specs = {**A, "other": StageSpec(reads=("prompt",), writes=("text",))}
    without = {name: spec for name, spec in specs.items() if name != "make"}
    assert names("learn", specs=without, changes=Changes(insert=["check"])) == [
        *("other", "score", "weigh", "check", "learn"),
    ]
    assert names("learn", "check", changes=Changes(remove=["check"])) == ["make", "score", "weigh", "learn"]


# -- in a run -------------------------------------------------------------------------------------


class Difficulty(Stage):
    """The share of wrong samples of each prompt."""

    spec: ClassVar[StageSpec] = StageSpec(reads=("uid", "token_level_scores"), writes=("old_log_probs_seen",))

    def __call__(self, batch: DataProto) -> DataProto:
        wrong = (batch["token_level_scores"].sum(-1) <= 0).float()
        self.run.record({"reward/wrong": float(wrong.mean())})
        return batch.with_columns({"old_log_probs_seen": wrong})


class Grader(Worker):
    """A stranger's worker: counts the digits of each response."""

    mesh: ClassVar[str] = "bench"

    def __init__(self, setup: Any) -> None:
        self.setup = setup

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        self.register_mesh("bench", self.rank, True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("bench"))
    def grader(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"graded": (data["responses"] * data["response_mask"]).sum(-1).float()})


class Grading(Stage):
    spec: ClassVar[StageSpec] = StageSpec(reads=("responses", "response_mask"), writes=("graded",), roles=("grader",))

    def __call__(self, batch: DataProto) -> DataProto:
        rows = batch.select(["prompts", "responses", "response_mask"])
        graded = self.run.call("grader", Grader.grader, rows)
        self.run.record({"grader/mean": float(graded["graded"].mean())})
        return batch.joined(graded)


@pytest.fixture
def strangers() -> Iterator[None]:
    with (
        stages.temporarily("difficulty", Difficulty),
        stages.temporarily("grading", Grading),
        roles.temporarily("grader", Grader),
    ):
        yield


SHORT = ["trainer.total_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]


def places_of(overrides: list[str]) -> list[str]:
    return [place.name for place in check_run(compose(overrides).config, PpoTrainer).places]


def test_each_estimator_gets_what_it_reads(small_task: SmallTask, tmp_path: Path) -> None:
    plain = ["rollout", "reward", "advantage", "log_prob_check", "update_actor"]
    assert places_of(small_task.ppo(tmp_path)) == plain
    critic = places_of(small_task.ppo(tmp_path, "algorithm=gae", "actor.use_kl_loss=true"))
    assert {*critic} == {*plain, "ref_log_prob", "values", "update_critic"}
    assert critic[-2:] == ["log_prob_check", "update_actor"] or critic[-1] == "update_actor"
    assert critic.index("values") < critic.index("advantage") < critic.index("update_critic")
    kl = places_of(small_task.ppo(tmp_path, "algorithm.use_kl_in_reward=true"))
    assert kl.index("ref_log_prob") < kl.index("kl_in_reward") < kl.index("advantage")
    remax = places_of(small_task.ppo(tmp_path, "algorithm=remax", "algorithm.filter_groups.enable=true"))
    assert remax.index("filter_groups") == 2
    assert "reward_baselines" in remax


@pytest.mark.usefixtures("strangers")
def test_a_strangers_stage_is_inserted(small_task: SmallTask, tmp_path: Path) -> None:
    launch(small_task.ppo(tmp_path, *SHORT, "trainer.stages.insert=[difficulty]"))
    row = read_metrics(tmp_path)[-1]
    assert row["reward/wrong"] == pytest.approx(1 - row["reward/accuracy"])
    assert row["time/difficulty_s"] > 0


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize("placement", [[], ["placement.pools={bench: [1]}", "placement.mapping={grader: bench}"]])
def test_a_strangers_role_gets_workers_and_a_pool(small_task: SmallTask, tmp_path: Path, placement: list[str]) -> None:
    def graded(inputs: AdvantageInputs) -> AdvantageOutputs:
        return AdvantageOutputs.from_scores(inputs.token_level_rewards.sum(-1), inputs.response_mask)

    with advantages.temporarily("graded", graded):
        overrides = small_task.ppo(tmp_path, "algorithm.adv_estimator=graded", "trainer.stages.insert=[grading]")
        with set_up([*overrides, *placement]) as trainer:
            batch = run_stages(trainer, until="grading")
            assert torch.equal(batch["graded"], Jagged.of(batch["responses"]).sums().float())
            assert set(trainer.run.groups) == {"actor_rollout", "grader"}
            same = trainer.run.groups["grader"].name == trainer.run.groups["actor_rollout"].name
            assert same == (not placement)


def test_what_a_recipe_names_has_to_exist(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(PluginNotFoundError, match=r"'nowhere'[\s\S]*trainer\.stages\.insert"):
        places_of(small_task.ppo(tmp_path, "trainer.stages.insert=[nowhere]"))
    with pytest.raises(ConfigError, match=r"values.*no stage writes"):
        places_of(small_task.ppo(tmp_path, "algorithm=gae", "trainer.stages.remove=[values]"))
    with pytest.raises(ConfigError, match=r"kl_in_reward.*does not apply"):
        places_of(small_task.ppo(tmp_path, "trainer.stages.insert=[kl_in_reward]"))


def test_a_role_has_an_engine_of_its_own(small_task: SmallTask, tmp_path: Path) -> None:
    overrides = small_task.ppo(tmp_path, "algorithm=gae", "critic.engine.param_offload=true")
    with set_up(overrides) as trainer:
        settings = trainer.run.settings
        assert (settings.engine.param_offload, settings.role_engine("critic").param_offload) == (False, True)
        critic = trainer.run.workers("critic")
        assert critic.workers[0].handle.workers[critic.role].setup.engine.param_offload
    with pytest.raises(
        ConfigError, match=r"'critic\.engine\.param_ofload'; did you mean 'critic\.engine\.param_offload'"
    ):
        places_of(small_task.ppo(tmp_path, "algorithm=gae", "critic.engine.param_ofload=true"))


def test_a_run_refuses_an_engine_of_one_rank_on_two(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class = engines.get("fsdp")
    limited = dataclasses.replace(engine_class.capabilities, max_world_size=1)
    monkeypatch.setattr(engine_class, "capabilities", limited)
    config = compose(small_task.ppo(tmp_path, "runtime=ray", "placement.n_gpus_per_node=2")).config
    with pytest.raises(CapabilityError, match=r"actor\.engine\.name=fsdp runs on at most 1 rank"):
        check_run(config, PpoTrainer)


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_critic_of_fsdp_beside_an_actor_of_megatron(small_task: SmallTask, tmp_path: Path) -> None:
    pytest.importorskip("rollcast_megatron")
    pytest.importorskip("megatron.core")
    two = ["runtime=ray", "runtime.threads_per_worker=1", "placement.n_gpus_per_node=2"]
    engines = ["engine=megatron", "actor.engine.tensor_model_parallel_size=2", "critic.engine={name: fsdp}"]
    few = ["trainer.total_steps=2", "trainer.save_freq=2", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    launch(small_task.ppo(tmp_path, "algorithm=gae", *two, *engines, *few))
    rows = read_metrics(tmp_path)
    assert all(row[f"{role}/grad_norm"] > 0 for row in rows for role in ("actor", "critic"))
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in rows)
    kept = {role: tmp_path / "checkpoints" / "step_2" / role / "engine.json" for role in ("actor", "critic")}
    assert {role: json.loads(file.read_text())["engine"] for role, file in kept.items()} == {
        "actor": "megatron",
        "critic": "fsdp",
    }


def test_stop_tokens_of_the_model_reach_workers_and_replicas(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_task.model, model)
    everything = list(range(90))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": everything, "temperature": 0.0}))
    changes = [f"model.path={model}", *SHORT]
    with set_up(small_task.ppo(tmp_path / "run", *changes)) as trainer:
        settings = trainer.run.settings
        ids = settings.stop_token_ids
        assert ids[0] == settings.tokenizer.eos_token_id
        assert sorted(ids) == everything
        assert settings.served_model.stop_token_ids == ids
        batch = run_stages(trainer, until="rollout")
    assert Jagged.of(batch["response_mask"]).sums().eq(1).all()
    assert batch["finished"].all()
    assert len(set(Jagged.of(batch["responses"]).values.tolist())) > 2  # rollout.temperature decides, not the file's


def test_end_state_follows_whatever_token_ended_the_response() -> None:
    pad, eos, second = 0, 2, 9
    prompts = torch.nested.nested_tensor([torch.tensor(row) for row in ([5], [7, 5], [7, 5])], layout=torch.jagged)
    responses = torch.nested.nested_tensor(
        [torch.tensor(row) for row in ([6, eos], [6, 8, second], [6, 8, 8])], layout=torch.jagged
    )
    batch = DataProto.from_dict({"prompts": prompts, "responses": responses, "response_mask": responses})
    out = with_end_state(batch, pad)
    assert [row.tolist() for row in out["responses"].unbind()] == [[6, eos, pad], [6, 8, second, pad], [6, 8, 8, pad]]
    masks = [[0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]]
    assert [row.tolist() for row in out["response_mask"].unbind()] == masks
    assert [row.tolist() for row in out["prompts"].unbind()] == [[5], [7, 5], [7, 5]]


class NeedsJudge(TrainingStage):
    """Needs a model that its declaration does not name."""

    spec = StageSpec(reads=("uid",))

    def needs(self) -> list[ModelNeeds]:
        return [ModelNeeds("judge_model", entropy=True)]

    def __call__(self, batch: DataProto) -> DataProto:
        return batch


class Colder(NeedsJudge):
    """Needs another temperature of the actor's logits than the next one."""

    def needs(self) -> list[ModelNeeds]:
        return [ModelNeeds("actor_rollout", temperature=0.5)]


class Warmer(NeedsJudge):
    def needs(self) -> list[ModelNeeds]:
        return [ModelNeeds("actor_rollout", temperature=2.0)]


def test_needs_that_cannot_be_met_are_refused(small_task: SmallTask, tmp_path: Path) -> None:
    settings = check_run(compose(small_task.ppo(tmp_path)).config)
    with pytest.raises(ConfigError, match="NeedsJudge needs something of the role judge_model"):
        list_workers(settings, [NeedsJudge(None)], 1)
    with pytest.raises(ConfigError, match="Colder and Warmer need different values of temperature"):
        list_workers(settings, [Colder(None), Warmer(None)], 1)
