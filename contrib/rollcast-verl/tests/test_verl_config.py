"""``rollcast verl-config``: every key of verl's configuration gets an outcome, and the result fits our schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from rollcast import compose
from rollcast.errors import ConfigError
from rollcast_verl.commands import app
from rollcast_verl.keys import RULES, find_rule
from rollcast_verl.translate import Translation, load, translate

GRPO = """
    algorithm.adv_estimator=grpo data.train_files=/d/gsm8k/train.parquet data.val_files=/d/gsm8k/test.parquet
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.fsdp_config.param_offload=True
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
    trainer.project_name=verl_grpo trainer.experiment_name=qwen2_7b trainer.n_gpus_per_node=8 trainer.nnodes=1
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""
PPO = """
    algorithm.adv_estimator=gae data.train_files=['/d/a.parquet','/d/b.parquet'] data.val_files=['/d/c.parquet']
    data.train_batch_size=1024 actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat
    actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.rollout.name=sglang
    critic.optim.lr=1e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.ppo_micro_batch_size_per_gpu=4
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl algorithm.kl_ctrl.kl_coef=0.01
    trainer.default_local_dir=/ckpt/ppo trainer.total_training_steps=200 +trainer.val_before_train=False
    trainer.device=cuda
"""
DAPO = """
    data.prompt_key=prompt algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=10
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov actor_rollout_ref.actor.policy_loss.clip_cov_lb=1.5
    actor_rollout_ref.actor.policy_loss.dro_beta=0.1
    actor_rollout_ref.rollout.name=vllm reward.reward_manager.name=dapo actor_rollout_ref.model.path=/m
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=512
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    reward.custom_reward_function.path=/r/score.py reward.custom_reward_function.name=my_score
"""


def translated(text: str) -> Translation:
    return translate(load(None, text.split()))


@pytest.mark.parametrize("text", [GRPO, PPO, DAPO])
def test_the_arguments_of_an_example_fit_our_schemas(text: str) -> None:
    found = translated(text)
    assert len(found.lines) == len(text.split())
    assert not [line for line in found.lines if line.state == "unknown"]
    found.check()


def test_groups_keys_and_values_are_translated() -> None:
    plain = compose(translated(GRPO).overrides).plain()
    assert (plain["algorithm"]["adv_estimator"], plain["rollout"]["n"]) == ("grpo", 5)
    assert plain["actor"]["kl_loss_type"] == "k3"
    assert plain["actor"]["engine"]["enable_gradient_checkpointing"] is True
    assert plain["data"]["train_files"] == ["/d/gsm8k/train.parquet"]
    assert plain["data"]["ground_truth_key"] == "reward_model.ground_truth"
    assert (plain["placement"]["n_gpus_per_node"], plain["trainer"]["total_epochs"]) == (8, 15)
    assert plain["reward"]["name"] == "verl"
    assert plain["trackers"] == ["console", "wandb"]
    lines = {line.key: line for line in translated(GRPO).lines}
    assert lines["actor_rollout_ref.actor.ppo_mini_batch_size"].state == "same"
    assert lines["actor_rollout_ref.actor.kl_loss_type"].state == "translated"
    assert lines["trainer.project_name"].state == "no counterpart" and lines["trainer.project_name"].note


def test_an_engine_a_penalty_and_a_directory_are_renamed() -> None:
    plain = compose(translated(PPO).overrides).plain()
    assert (plain["actor"]["engine"]["name"], plain["rollout"]["name"]) == ("megatron", "sglang")
    assert (plain["algorithm"]["kl_penalty"], plain["algorithm"]["kl_coef"]) == ("k3", 0.01)
    assert (plain["run_dir"], plain["trainer"]["total_steps"]) == ("/ckpt/ppo", 200)
    assert plain["trainer"]["val_before_train"] is False


def test_options_that_belong_to_what_is_not_chosen_are_left_out() -> None:
    found = translated(DAPO)
    plain = compose(found.overrides).plain()
    assert plain["actor"]["policy_loss_kwargs"] == {"clip_cov_lb": 1.5}
    assert plain["reward"]["reward_kwargs"] == {"path": "/r/score.py:my_score"}
    overlong = {"overlong_buffer": {"len": 512, "penalty_factor": 1.0}}
    assert plain["reward"]["reward_manager_kwargs"] == {"inner": "prime", **overlong}
    assert plain["algorithm"]["filter_groups"]["metric"] == "accuracy"
    states = {line.key: line.state for line in found.lines}
    assert states["actor_rollout_ref.actor.policy_loss.dro_beta"] == "not set"


@pytest.mark.parametrize("manager", ["naive", "batch"])
@pytest.mark.parametrize("key", ["reward.reward_manager.name", "reward_model.reward_manager"])
def test_a_function_of_the_user_s_does_not_run_in_the_trainer_s_process(key: str, manager: str) -> None:
    found = translated(f"{GRPO} {key}={manager} reward.custom_reward_function.path=/r/score.py")
    assert compose(found.overrides).plain()["reward"]["reward_manager"] == "prime"


def test_keys_of_turns_count_if_there_are_turns() -> None:
    turn = "actor_rollout_ref.rollout.multi_turn"
    assert "agent.format" not in translated(f"{turn}.format=hermes").settings
    settings = translated(f"{turn}.enable=True {turn}.format=hermes {turn}.max_assistant_turns=5").settings
    assert (settings["agent.loop"], settings["agent.format"], settings["agent.max_assistant_turns"]) == (
        "tool",
        "hermes",
        5,
    )


def test_estimators_and_losses_that_only_verl_has_get_its_adapters() -> None:
    text = "algorithm.adv_estimator=mine actor_rollout_ref.actor.policy_loss.loss_mode=theirs"
    settings = translated(text).settings
    assert settings["algorithm.adv_estimator"] == "verl_mine"
    assert settings["actor.policy_loss"] == "verl_theirs"
    assert translated("algorithm.adv_estimator=rloo_vectorized").settings["algorithm"] == "rloo"


def test_a_key_that_verl_does_not_have_is_named() -> None:
    (line,) = translated("actor_rollout_ref.actor.ppo_minibatch_size=3").lines
    assert (line.state, line.overrides) == ("unknown", {})


def test_every_key_of_rollcast_in_the_table_exists() -> None:
    composed = compose(
        ["trainer=ppo", "engine=fsdp", "rollout=vllm", "data=prompts", "algorithm=grpo", "reward=function"],
        allow_missing=True,
    )
    plain, free = composed.plain(), ("kwargs", "overlong_buffer", "runtime_env")
    groups = {"engine", "rollout", "algorithm"}
    for rule in RULES:
        if not rule.ours or rule.ours in groups or any(part in rule.ours for part in free):
            continue
        node = plain
        for part in rule.ours.removesuffix(".*").split("."):
            assert part in node, f"{rule.theirs}: rollcast has no {rule.ours}"
            node = node[part]
        assert not rule.ours.endswith(".*") or isinstance(node, dict), f"{rule.ours} takes no keys of its own"


def test_no_key_stands_twice_and_every_missing_one_has_a_reason() -> None:
    keys = [rule.theirs for rule in RULES]
    assert len(keys) == len(set(keys)), sorted({key for key in keys if keys.count(key) > 1})
    assert all(rule.ours or rule.note for rule in RULES)


def test_the_nearest_prefix_counts() -> None:
    rule = find_rule("actor_rollout_ref.actor.checkpoint.save_contents")
    assert rule is not None and rule.theirs == "actor_rollout_ref.actor.checkpoint.*"
    assert find_rule("nothing.of.this") is None


def test_the_defaults_of_verl_are_translated_completely() -> None:
    pytest.importorskip("verl")
    found = translate(load(None, ["actor_rollout_ref.rollout.name=vllm"], complete=True))
    assert len(found.lines) > 600
    assert not [line.key for line in found.lines if line.state == "unknown"]
    found.check()
    plain = compose(found.overrides, allow_missing=True).plain()
    assert (plain["data"]["train_batch_size"], plain["actor"]["ppo_mini_batch_size"]) == (1024, 256)
    assert plain["actor"]["shuffle"] is False


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_command_lists_every_key_and_writes_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(OmegaConf.to_yaml(load(None, GRPO.split())))
    text = run(str(file), "trainer.total_epochs=3", "--write", str(tmp_path / "arguments"))
    assert "actor_rollout_ref.actor.kl_loss_type=low_var_kl → actor.kl_loss_type" in text
    assert "trainer.project_name=verl_grpo" in text and "no counterpart" in text
    assert "trainer.total_epochs=3" in (tmp_path / "arguments").read_text().splitlines()
    found = json.loads(run(str(file), "--json"))
    assert len(found["keys"]) == len(GRPO.split())
    compose(found["overrides"])


def test_what_cannot_be_read_or_does_not_fit_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="not key=value"):
        load(None, ["trainer.nnodes"])
    with pytest.raises(ConfigError, match=r"actor\.ppo_epochs"):
        translated("actor_rollout_ref.actor.ppo_epochs=many").check()


#: Sections of verl → those of rollcast that have the same subject.
SECTIONS = {
    "actor_rollout_ref.actor.": "actor.",
    "actor_rollout_ref.rollout.": "rollout.",
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.ref.": "ref.",
    **{name: name for name in ("critic.", "data.", "algorithm.", "reward.", "trainer.")},
}
#: Keys of both that mean something else, with the reason in their notes.
OTHER_MEANING = {
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.rollout.engine_kwargs.*",
    "actor_rollout_ref.rollout.mode",
    "critic.optim.clip_grad",
    "reward.reward_kwargs.*",
}


def test_no_key_that_rollcast_has_is_said_to_be_missing() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration-reference.md"
    ours = set(re.findall(r"^\| `([\w.]+)`", page.read_text(), re.MULTILINE))
    assert len(ours) > 200
    missing = {
        rule.theirs
        for rule in RULES
        for theirs, section in SECTIONS.items()
        if rule.outcome == "none" and rule.theirs.startswith(theirs)
        if section + rule.theirs.removeprefix(theirs).removesuffix(".*") in ours
    }
    assert missing == OTHER_MEANING
