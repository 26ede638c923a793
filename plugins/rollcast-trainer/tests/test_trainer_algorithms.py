"""Every installed algorithm in a run, the critic, and roles in pools of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics, run_stages, set_up, without_times, worker_of

from rollcast.contracts.algorithm import advantages, policy_losses
from rollcast.errors import ConfigError
from rollcast.plugins import Registry
from rollcast.protocol import DataProto, Jagged
from rollcast_testing.tiny import padded_batch
from rollcast_trainer.batch.groups import first_groups, groups_that_differ, join_groups
from rollcast_trainer.workers.roles import Role, role_trains

pytestmark = pytest.mark.long

SHORT = ["trainer.total_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]


TWO_PARTS = """
from rollcast.contracts.reward import RewardResult


def two_parts(sample):
    length = float(len(sample.response))
    return RewardResult(length % 2, extra={"length": length, "digit": float("1" in sample.response)})
"""


def finite(run_dir: Path) -> list[dict[str, float]]:
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


def shipped(registry: Registry[Any]) -> list[str]:
    """Names of the plugins of rollcast-algorithms; others may be installed too."""
    return [name for name in registry.names() if registry.find(name).distribution == "rollcast-algorithms"]


#: Estimators that need turns, which only agents write; rollcast-agents trains with them.
OF_TURNS = {"gae_turn", "gigpo"}


@pytest.mark.parametrize("name", sorted(OF_TURNS))
def test_an_estimator_of_turns_needs_agents(small_task: SmallTask, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="reads the column 'turn_ids', which no stage writes"):
        launch(small_task.ppo(tmp_path / "run", *SHORT, f"algorithm.adv_estimator={name}"))


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", sorted(set(shipped(advantages)) - OF_TURNS))
def test_every_estimator_trains(small_task: SmallTask, tmp_path: Path, name: str) -> None:
    file = tmp_path / "parts.py"
    file.write_text(TWO_PARTS)
    changes = [f"reward.reward_kwargs.path={file}:two_parts"] if name == "gdpo" else []
    launch(small_task.ppo(tmp_path / "run", *SHORT, f"algorithm.adv_estimator={name}", *changes))
    rows = finite(tmp_path / "run")
    assert rows[0]["actor/grad_norm"] > 0
    assert ("critic/vf_loss" in rows[0]) == (name == "gae")
    assert ("reward/baseline_mean" in rows[0]) == (name == "remax")


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", sorted(shipped(policy_losses)))
def test_every_policy_loss_trains(small_task: SmallTask, tmp_path: Path, name: str) -> None:
    options = {"dro": ["actor.policy_loss_kwargs={dro_beta: 0.1}"]}.get(name, [])
    launch(small_task.ppo(tmp_path, *SHORT, f"actor.policy_loss={name}", "actor.ppo_epochs=2", *options))
    assert finite(tmp_path)[1]["actor/grad_norm"] > 0


def test_a_correction_weighs_and_rejects(small_task: SmallTask, tmp_path: Path) -> None:
    section = "algorithm.rollout_correction"
    launch(
        small_task.ppo(
            tmp_path,
            *SHORT,
            f"{section}.rollout_is=token",
            f"{section}.rollout_rs=token_k1",
            f"{section}.rollout_rs_threshold=1.01",
        )
    )
    assert finite(tmp_path)[0]["rollout_corr/k3_kl"] < 1e-6


@pytest.mark.parametrize("weights", ["null", "token"])
def test_old_log_probs_may_be_the_rollouts(small_task: SmallTask, tmp_path: Path, weights: str) -> None:
    section = "algorithm.rollout_correction"
    launch(small_task.ppo(tmp_path, *SHORT, f"{section}.bypass_mode=true", f"{section}.rollout_is={weights}"))
    assert all("rollout/logprob_gap_max" not in row for row in finite(tmp_path))


@pytest.mark.parametrize(
    "change", ["top_p=0.9", "top_k=5", "min_p=0.1", "repetition_penalty=1.1", "logit_bias={3: 1.0}"]
)
def test_log_probs_of_a_cut_distribution_are_no_old_ones(small_task: SmallTask, tmp_path: Path, change: str) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    with pytest.raises(ConfigError, match=rf"bypass_mode uses the rollout's .* rollout\.{change.partition('=')[0]}="):
        launch(small_task.ppo(tmp_path, *SHORT, bypass, f"rollout.{change}"))


def test_a_penalty_brings_the_pass_of_old_log_probs_back(small_task: SmallTask, tmp_path: Path) -> None:
    """The rollout's log-probs are of the distribution with penalty, the policy's are not."""
    launch(small_task.ppo(tmp_path, *SHORT, "rollout.repetition_penalty=1.3", "rollout.min_p=0.05"))
    assert all(row["rollout/logprob_gap_max"] > 1e-3 for row in finite(tmp_path))


def test_configured_stops_end_responses(small_task: SmallTask, tmp_path: Path) -> None:
    """Every id is a stop, so that each response is one token long."""
    launch(small_task.ppo(tmp_path, *SHORT, f"rollout.stop_token_ids={list(range(90))}"))
    assert all(row["rollout/response_length_mean"] == row["rollout/finished"] == 1 for row in finite(tmp_path))


@pytest.mark.exhaustive
def test_when_the_gap_was_measured_is_part_of_a_checkpoint(small_task: SmallTask, tmp_path: Path) -> None:
    section = "algorithm.rollout_correction"
    changes = [f"{section}.bypass_mode=true", f"{section}.bypass_max_kl=1.0", f"{section}.bypass_check_freq=3"]
    launch(small_task.ppo(tmp_path / "whole", *changes))
    launch(small_task.ppo(tmp_path / "parts", *changes, "trainer.total_steps=2"))
    launch(small_task.ppo(tmp_path / "parts", *changes))
    whole = without_times(read_metrics(tmp_path / "whole"))
    assert whole == without_times(read_metrics(tmp_path / "parts"))
    assert ["rollout/logprob_gap_max" in row for row in whole[1:]] == [True, False, False, True]


def critic_run(small_task: SmallTask, run_dir: Path, *changes: str) -> list[str]:
    return small_task.ppo(run_dir, "algorithm=gae", "critic.optim.lr=1e-2", *changes)


def test_the_critic_learns_and_a_stopped_run_goes_on_with_it(small_task: SmallTask, tmp_path: Path) -> None:
    launch(critic_run(small_task, tmp_path / "whole"))
    launch(critic_run(small_task, tmp_path / "parts", "trainer.total_steps=2"))
    torch.manual_seed(99)
    launch(critic_run(small_task, tmp_path / "parts"))
    whole = without_times(read_metrics(tmp_path / "whole"))
    assert whole == without_times(read_metrics(tmp_path / "parts"))
    assert whole[1]["critic/vpred_mean"] != whole[4]["critic/vpred_mean"]
    assert (tmp_path / "whole" / "checkpoints" / "step_4" / "critic").is_dir()


@pytest.mark.exhaustive
def test_the_weight_of_an_adaptive_penalty_is_part_of_a_checkpoint(small_task: SmallTask, tmp_path: Path) -> None:
    changes = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_controller=adaptive",
        "algorithm.kl_coef=0.1",
        "algorithm.target_kl=0.001",
        "algorithm.horizon=50",
        "algorithm.kl_penalty=k3",
    ]
    launch(small_task.ppo(tmp_path / "whole", *changes))
    launch(small_task.ppo(tmp_path / "parts", *changes, "trainer.total_steps=2"))
    launch(small_task.ppo(tmp_path / "parts", *changes))
    whole = without_times(read_metrics(tmp_path / "whole"))
    assert whole == without_times(read_metrics(tmp_path / "parts"))
    assert len({row["actor/kl_coef"] for row in whole[1:]}) == 4


def test_the_actor_waits_while_the_critic_warms_up(small_task: SmallTask, tmp_path: Path) -> None:
    launch(critic_run(small_task, tmp_path, *SHORT, "trainer.critic_warmup=1"))
    first, second = finite(tmp_path)
    assert "actor/grad_norm" not in first
    assert first["critic/grad_norm"] > 0
    assert second["actor/grad_norm"] > 0


def test_a_greedy_baseline_is_that_of_the_rows_prompt(small_task: SmallTask, tmp_path: Path) -> None:
    with set_up(small_task.ppo(tmp_path, "algorithm.adv_estimator=remax")) as trainer:
        batch = trainer.run.prompts.draw()
        baselines = run_stages(trainer, batch, until="reward_baselines")["reward_baselines"].view(len(batch), -1)
        assert torch.equal(baselines, baselines[:, :1].expand_as(baselines))
        assert worker_of(trainer) is not None


@pytest.mark.exhaustive
def test_roles_in_pools_of_their_own_compute_the_same(small_task: SmallTask, ray_is_up: None, tmp_path: Path) -> None:
    on_ray = ["runtime=ray", "runtime.threads_per_worker=1", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"]
    launch(critic_run(small_task, tmp_path / "fused", *SHORT, *on_ray))
    apart = ["placement.pools={critics: [1], refs: [1]}", "placement.mapping={critic: critics, ref: refs}"]
    launch(critic_run(small_task, tmp_path / "split", *SHORT, *on_ray, *apart))
    assert without_times(finite(tmp_path / "split")) == without_times(finite(tmp_path / "fused"))


def test_what_checkpoints_keep() -> None:
    frozen = {Role.REF, Role.REWARD_MODEL, Role.ROLLOUT, Role.JUDGE, Role.REWARD}
    assert {role for role in Role if not role_trains(role)} == frozen


def test_groups_that_score_alike_are_replaced_up_to_a_limit(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3", "rollout.n=2"]
    with set_up(small_task.ppo(tmp_path, *changes)) as trainer:
        for _ in range(3):
            trainer.run.recorder.take()
            batch = run_stages(trainer, until="filter_groups")
            metrics = trainer.run.recorder.take()
            kept = int(metrics["rollout/kept_groups"])
            assert kept <= 4
            assert kept == 4 or metrics["rollout/gen_batches"] == 3
            assert batch["uid"].unique().tolist() == list(range(max(kept, 1)))[: len(batch["uid"].unique())]
            if kept:
                assert bool(groups_that_differ(batch["uid"], Jagged.of(batch["token_level_scores"]).sums()).all())
                for group in batch["uid"].unique():
                    prompts = batch.select_idxs(batch["uid"] == group)["prompts"].unbind()
                    assert all(torch.equal(prompt, prompts[0]) for prompt in prompts)


def test_dynamic_batches_train_and_go_on(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=remax"]
    launch(small_task.ppo(tmp_path / "whole", *changes))
    launch(small_task.ppo(tmp_path / "parts", *changes, "trainer.total_steps=2"))
    launch(small_task.ppo(tmp_path / "parts", *changes))
    assert without_times(read_metrics(tmp_path / "whole")) == without_times(read_metrics(tmp_path / "parts"))


def test_groups_of_several_batches_are_joined() -> None:
    def generated(length: int, scores: list[float]) -> DataProto:
        rows = len(scores)
        responses = Jagged.from_lengths(torch.full((rows * length,), 7, dtype=torch.int32), torch.full((rows,), length))
        last = responses.places == length - 1
        return DataProto.from_dict(
            {
                "uid": torch.arange(rows) // 2,
                "responses": responses.column(),
                "score": torch.tensor(scores),
                "token_level_scores": responses.like(last * torch.tensor(scores)[responses.rows]),
            }
        )

    first, second = generated(3, [0.0, 1.0, 1.0, 1.0]), generated(2, [0.0, 0.0, 2.0, 1.0])
    assert groups_that_differ(first["uid"], first["score"]).tolist() == [True, True, False, False]
    assert (
        groups_that_differ(first["uid"], first["score"], torch.tensor([True, False, True, True])).tolist()
        == [False] * 4
    )
    joined = join_groups([first, second], 9)
    assert joined["uid"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Jagged.of(joined["responses"]).lengths.tolist() == [3] * 4 + [2] * 4
    assert Jagged.of(joined["token_level_scores"]).sums().tolist() == joined["score"].tolist()
    differing = groups_that_differ(joined["uid"], joined["score"])
    kept = first_groups(joined.select_idxs(differing.nonzero().flatten()), 1)
    assert kept["uid"].tolist() == [0, 0]
    assert join_groups([first, second], 3)["uid"].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.fixture(scope="module")
def judge(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as transformers saves it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(small_task.model)
    config = AutoConfig.from_pretrained(small_task.model, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_scores_as_transformers_does(small_task: SmallTask, judge: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    changes = ["reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.rule_weight=0.5"]
    with set_up(small_task.ppo(tmp_path, *changes, "reward_model.weight=2.0")) as trainer:
        jagged = run_stages(trainer, until="reward")
        rules = trainer.run.scorer.score(jagged).scores
        batch = padded_batch(jagged)
        scores = batch["token_level_scores"].sum(-1)
        model = AutoModelForSequenceClassification.from_pretrained(judge)
        for row in range(len(batch)):
            ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]
            with torch.no_grad():
                hidden = model.model(input_ids=ids[None]).last_hidden_state[0, -1]
                wanted = 2.0 * float(model.score(hidden)) + 0.5 * float(rules[row])
            assert float(scores[row]) == pytest.approx(wanted, abs=1e-5)


def test_a_reward_model_in_a_pool_of_its_own_trains(
    small_task: SmallTask, judge: Path, ray_is_up: None, tmp_path: Path
) -> None:
    on = ["reward_model.enable=true", f"reward_model.model.path={judge}"]
    ray = ["runtime=ray", "placement.pools={judges: [1]}", "placement.mapping={reward_model: judges}"]
    launch(small_task.ppo(tmp_path, *SHORT, *on, *ray))
    assert all("reward/model_mean" in row for row in finite(tmp_path))


def test_what_is_no_reward_model_is_refused(small_task: SmallTask, tmp_path: Path) -> None:
    for path, reason in (
        ("null", "is empty"),
        ("nowhere", "not a folder"),
        (small_task.model, r"no head `score\.weight`"),
    ):
        with pytest.raises(ConfigError, match=reason):
            launch(small_task.ppo(tmp_path, "reward_model.enable=true", f"reward_model.model.path={path}"))
    assert not list(tmp_path.iterdir())
