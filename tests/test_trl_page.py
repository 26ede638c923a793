"""docs/coming-from-trl.md: its keys exist on both sides, and its code runs on the real trainer."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from page_packages import DOCS, titled_blocks
from run_commands import SMALL, Commands, read_metrics
from transformers import TrainingArguments

from rollcast import compose
from rollcast.config import sections as schemas

PAGE = "coming-from-trl.md"
#: Fields of TRL 1.16's own dataclasses, besides those of ``transformers.TrainingArguments``.
GRPO = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 remove_unused_columns
num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta
epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
"""
SFT = """
model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs
dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free
pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading pad_token
"""


def own_fields(name: str) -> set[str]:
    """The fields that TRL adds to a config: of the installed TRL, read without importing it, else of 1.16."""
    listed = set({"GRPOConfig": GRPO, "SFTConfig": SFT}[name].split())
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return listed
    file = Path(spec.origin).parent / "trainer" / f"{name.removesuffix('Config').lower()}_config.py"
    (found,) = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    names = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return names - {"learning_rate"}


def section(name: str) -> str:
    text = (DOCS / PAGE).read_text()
    return re.split(r"^## ", text.split(f"## Keys of {name}\n")[1], flags=re.MULTILINE)[0]


def table(name: str) -> list[tuple[list[str], list[str]]]:
    """TRL's keys and ours in each row of the table."""
    rows = [line.split("|") for line in section(name).split("### ")[0].splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", cells[1]), re.findall(r"`([\w.]+)`", cells[2])) for cells in rows]


@cache
def our_keys() -> frozenset[str]:
    composed = compose(["trainer=ppo", "data=prompts", "rollout=vllm"], allow_missing=True)
    placed = composed.sections.placed
    found = {key for each in placed for key, _ in schemas.walk(each.path, each.schema)}
    return frozenset({*found, *(each.path for each in placed)})


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig"])
def test_the_keys_exist_on_both_sides(name: str) -> None:
    theirs = own_fields(name) | {each.name for each in fields(TrainingArguments)}
    rows = table(name)
    assert len(rows) >= 10
    for trl, ours in rows:
        assert trl
        assert ours
        assert set(trl) <= theirs
        assert set(ours) <= our_keys()


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig"])
def test_no_key_of_trl_is_left_out(name: str) -> None:
    assert own_fields(name) <= set(re.findall(r"`(\w+)`", section(name)))


def test_losses_and_keys_in_the_text_exist() -> None:
    from rollcast.contracts.algorithm import loss_aggregations, policy_losses

    text = (DOCS / PAGE).read_text()
    for key, value in re.findall(r"`(?:[^`]*\s)?(actor\.(?:loss_agg_mode|policy_loss))=([\w-]+)", text):
        registry = loss_aggregations if key.endswith("mode") else policy_losses
        assert value in registry
    for key in re.findall(r"`((?:data|reward|reward_model|rollout|trainer|model)\.[\w.]+)[`=]", text):
        known = key.startswith(("reward.reward_kwargs.", "reward.reward_manager_kwargs."))
        assert known or key in our_keys(), key


def write_rows(folder: Path, conversational: bool = True) -> None:
    """The page's row, and more of its kind."""
    shown = json.loads(titled_blocks(PAGE)["row.json"])
    draw = random.Random(0)
    for name, count in (("train", 48), ("test", 16)):
        rows = []
        for number in range(count):
            digits = draw.sample("0123456789", 8)
            text = "".join(digits) + "="
            prompt = [{**shown["prompt"][0], "content": text}] if conversational else text
            row = {"prompt": prompt, "answer": "".join(sorted(digits)), "level": "easy" if number % 2 else "hard"}
            assert row.keys() == shown.keys()
            rows.append(row)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_script(rollcast: Commands) -> None:
    """GRPO with an asynchronous function and one that applies to half of the prompts, over conversations."""
    write_rows(rollcast.folder)
    (rollcast.folder / "my_rewards.py").write_text(titled_blocks(PAGE)["my_rewards.py"])
    lines = titled_blocks(PAGE)["train.sh"].replace("\\\n", "").splitlines()
    preprocess, arguments = (shlex.split(line.removeprefix("rollcast ")) for line in lines)
    rollcast.must_run(*preprocess)
    small = [each for each in SMALL if each.split("=")[0] not in " ".join(arguments)]
    rollcast.must_run(*arguments, *small, "runtime=local")
    run = rollcast.folder / "runs" / "digits"
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["reward/errors"] == 0
        assert 0 <= row["reward/sorted_digits"] <= 1
        assert 0 <= row["reward/brief"] <= 1
        assert row["reward/brief/progress"] == (row["step"] - 1) / 2
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 32
    for sample in samples:
        assert sample["first_digit"] == sample["response"][:1]
        expected = sample["sorted_digits"] + 0.1 * (sample["brief"] or 0.0)
        assert sample["score"] == pytest.approx(expected)
    assert {sample["brief"] is None for sample in samples} == {True, False}


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    right = sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)
    return {"score": right + bonus, "acc": right == 1.0, "digits": sum(map(str.isdigit, solution_str))}


async def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [compute_score(*row) for row in zip(data_sources, solution_strs, ground_truths, extra_infos)]
"""


@pytest.mark.parametrize("name", ["compute_score", "compute_scores"])
def test_a_function_and_a_file_of_verl(rollcast: Commands, name: str) -> None:
    from rollcast_data.files import write_parquet

    draw = random.Random(0)
    rows = []
    for index in range(48):
        digits = draw.sample("0123456789", 8)
        rows.append(
            {
                "data_source": "sort",
                "prompt": [{"role": "user", "content": "".join(digits) + "="}],
                "ability": "sorting",
                "reward_model": {"style": "rule", "ground_truth": "".join(sorted(digits))},
                "extra_info": {"split": "train", "index": index},
            }
        )
    write_parquet(rollcast.folder / "train.parquet", rows)
    write_parquet(rollcast.folder / "test.parquet", rows[:16])
    (rollcast.folder / "score.py").write_text(VERL)
    reward = ["reward=function", "reward.reward_kwargs.path=score.py", f"reward.reward_kwargs.name={name}"]
    reward += ["reward.reward_kwargs.bonus=0.5"] if name == "compute_score" else ["reward.reward_manager=batch"]
    rollcast.must_run("preprocess", "sort_digits", "--output", "digits")
    files = ["data.train_files=[train.parquet]", "data.val_files=[test.parquet]", "data.preprocess=null"]
    run = ["model.path=digits/model", "runtime=local", "trainer.total_steps=1", "run_dir=run"]
    rollcast.must_run("train", *SMALL, *reward, *files, *run)
    (before, after) = read_metrics(rollcast.folder / "run")
    assert after["reward/errors"] == 0
    assert after["reward/digits"] >= 0
    assert after["reward/min"] >= (0.5 if name == "compute_score" else 0.0)
    assert before["val/accuracy"] == 0
