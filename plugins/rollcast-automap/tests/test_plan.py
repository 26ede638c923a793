"""``rollcast plan``: what it says of runs, what it refuses, and that it leaves everything alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics, set_up, worker_of
from typer.testing import CliRunner

from rollcast.cli.app import build_app
from rollcast.config import compose
from rollcast.contracts.engine import ModelConfig
from rollcast.errors import ConfigError, DataError
from rollcast_algorithms import full
from rollcast_automap.composition import held_bytes, pool_bytes
from rollcast_automap.contract import Mesh, ModelFacts, RoleSpec
from rollcast_automap.memory.engine_layout import EngineLayout, describe_engine, has_known_keys
from rollcast_automap.memory.memory_facts import format_bytes
from rollcast_automap.memory.memory_model import (
    KL_LOGIT_COPIES,
    MemoryItem,
    Passes,
    bound_activations,
    bound_forward,
    bound_logits,
    count_gathered,
    count_kv_cache,
    count_unreduced,
    measure_model,
)
from rollcast_automap.memory.process_memory import ProcessMemory
from rollcast_automap.memory.role_memory import gather_parts
from rollcast_automap.plan import Plan, plan_run
from rollcast_testing.tiny import tiny_model_folder
from rollcast_trainer.batch.sizes import data_parallel_size
from rollcast_trainer.run.run_dir import differing_settings
from rollcast_trainer.run.settings import check_run


def make_plan(overrides: Sequence[str], read_data: bool = True) -> Plan:
    config = compose(list(overrides)).config
    return plan_run(check_run(config), read_data)


def gsm8k(model: Path, *changes: str) -> list[str]:
    files = ["data.train_files=[train.parquet]", "data.val_files=[test.parquet]"]
    return ["recipe=gsm8k_grpo", f"model.path={model}", *files, *changes]


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with nothing but a config."""
    folder = tiny_model_folder(tmp_path_factory.mktemp("plan") / "tiny", hidden=64, weights=False, tied=False)
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


def run_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which tells what it brought up."""
    code = (
        "import atexit, sys, torch\n"
        "def tell():\n"
        "    ray = sys.modules.get('ray')\n"
        "    started = bool(ray and ray.is_initialized()) or torch.cuda.is_initialized()\n"
        "    sys.stderr.write('STARTED' if started else 'nothing started')\n"
        "atexit.register(tell)\n"
        "from rollcast.cli.app import main\n"
        "main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_quick_start_before_its_first_run(tmp_path: Path) -> None:
    done = run_command("recipe=quickstart", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "nothing started")
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(done.stdout)
    batch = {"prompts": 64, "samples": 8, "rows": 512, "row_tokens": 26, "tokens": 13312, "mini_batches": 2}
    assert plan["batch"].items() >= {**batch, "optimizer_steps": 2, "rows_per_rank": 256}.items()
    run = {"steps": 90, "optimizer_steps": 180, "validations": 10, "checkpoints": 3, "train_batches_per_epoch": None}
    assert plan["run"].items() >= run.items()
    assert plan["roles"]["global_pool"]["roles"] == ["actor", "rollout"]
    assert plan["memory"] == {"parameters": None, "pools": None}
    notes = "\n".join(plan["notes"])
    assert "data.preprocess=sort_digits writes them" in notes
    assert "runs/quickstart/task/model does not exist" in notes
    assert "recipe quickstart_warmup is trained first" in notes


def test_gsm8k_on_eight_ranks(config_folder: Path) -> None:
    changes = ("placement.n_gpus_per_node=8", "placement.device=cuda", "trainer.total_steps=105")
    found = make_plan(gsm8k(config_folder, *changes), read_data=False).as_dict()
    assert found["batch"]["rows_per_rank"] == 160
    # 10 rows of 1,536 tokens fit into 16,384.
    assert found["batch"]["micro_batches_per_rank"] == 16
    assert found["run"].items() >= {"optimizer_steps": 420, "validations": 22, "checkpoints": 6}.items()
    assert found["run"]["checkpoints_kept"] == 4  # with the best
    assert found["roles"]["global_pool"]["roles"] == ["actor", "rollout", "reference"]
    items = found["memory"]["pools"]["global_pool"]["items"]
    shard = -(-found["memory"]["parameters"] // 8) * 4
    names = ("actor: parameters", "actor: gradients", "actor: optimizer state", "reference: parameters")
    assert [items[name] for name in names] == [shard, shard, 2 * shard, shard]
    process = items["workers: context and libraries"]
    # The gradients are dropped when training ends.
    assert found["memory"]["pools"]["global_pool"]["device"]["held"] == 4 * shard + process
    # All weights in bf16 while generating.
    assert items["rollout: weights"] == found["memory"]["parameters"] * 2
    assert found["notes"] == ["the data files were not read"]


def test_float32_on_a_gpu_is_noted(config_folder: Path) -> None:
    def notes(*changes: str) -> str:
        return "\n".join(make_plan(gsm8k(config_folder, *changes), read_data=False).as_dict()["notes"])

    slow = ("actor.engine.param_dtype=null", "actor.engine.model_dtype=fp32")
    said = notes("placement.device=cuda", *slow)
    assert "actor.engine computes in float32, which is slow on cuda" in said
    assert "try actor.engine.param_dtype=bf16 actor.engine.use_remove_padding=true" in said
    assert "float32" not in notes("placement.device=cuda", "actor.engine.param_dtype=bf16")
    assert "float32" not in notes("placement.device=cpu", *slow)


def test_a_reference_by_itself_and_the_exact_kl_count(config_folder: Path) -> None:
    def pool(*changes: str) -> dict[str, Any]:
        plan = make_plan(gsm8k(config_folder, "trainer.total_steps=1", *changes), read_data=False)
        return plan.as_dict()["memory"]["pools"]["global_pool"]

    plain, exact = pool(), pool("actor.kl_loss_type=full", "ref.engine.param_offload=true")
    reference = plain["items"]["reference: parameters"]
    assert exact["items"]["reference: parameters"] == reference
    assert exact["device"]["held"] == plain["device"]["held"] - reference
    # Six more [10 rows, 1024 tokens, vocabulary] in float32.
    size = measure_model(ModelConfig(str(config_folder)))
    more = exact["items"]["actor: logits"] - plain["items"]["actor: logits"]
    assert more == KL_LOGIT_COPIES * 4 * 10 * 1024 * size.vocabulary


def test_what_the_exact_kl_keeps_is_below_its_bound() -> None:
    shape, saved = (2, 3, 500), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    logits, reference = torch.randn(shape, requires_grad=True), torch.randn(shape)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kl = full(logits, reference)
    assert kl.requires_grad
    whole = 4 * logits.numel()
    # With the reference's logits, and without the gradient.
    assert (KL_LOGIT_COPIES - 3) * whole <= sum(saved.values()) + whole <= KL_LOGIT_COPIES * whole


def test_words_for_people(config_folder: Path, tmp_path: Path) -> None:
    done = run_command(*gsm8k(config_folder, "trainer.total_steps=1"), "--skip-data", folder=tmp_path)
    assert done.returncode == 0
    for words in (
        "4 mini-batches of 1,280 rows (256 prompts)",
        "1 pass over them",
        "1 training step\n",
        "(1 process on 1 node, ",
    ):
        assert words in done.stdout
    assert "  global_pool: in all " in done.stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["actor.ppo_mini_batch_size=100"], "actor.ppo_mini_batch_size=64 or 128, or data.train_batch_size=1000 or"),
        (["actor.ppo_max_token_len_per_gpu=1000"], "a row may have 1536 tokens"),
        (["actor.ppo_mini_batchsize=4"], "ppo_mini_batch_size"),
        (["model.path=/nowhere"], "model.path: /nowhere is not a folder"),
        (["data.train_files=[]"], "data.train_files is empty"),
        (["rollout.n=1"], "set rollout.n to 2 or more"),
        (["trainer.name=nobody"], "nobody"),
    ],
)
def test_what_train_refuses_is_refused(config_folder: Path, changes: list[str], says: str) -> None:
    from typer.testing import CliRunner

    from rollcast.cli.app import build_app

    result = CliRunner().invoke(build_app(), ["plan", *gsm8k(config_folder, *changes), "--skip-data"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert says in result.stderr


def test_a_run_without_a_trainer_is_refused() -> None:
    from typer.testing import CliRunner

    from rollcast.cli.app import build_app

    result = CliRunner().invoke(build_app(), ["plan"])
    assert (result.exit_code, "no trainer is chosen" in result.stderr) == (2, True)


def test_sizes_with_a_remainder_are_noted(config_folder: Path) -> None:
    sizes = ["data.train_batch_size=24", "rollout.n=2", "actor.ppo_mini_batch_size=2", "actor.use_dynamic_bsz=false"]
    changes = [*sizes, "placement.n_gpus_per_node=3", "actor.ppo_micro_batch_size_per_gpu=1"]
    plan = make_plan(gsm8k(config_folder, *changes), read_data=False)
    assert plan.notes[0].startswith("4 rows of a mini-batch do not divide over 3 ranks: 2 rows more to fill up; ")
    assert plan.notes[0].endswith("actor.ppo_mini_batch_size=3")
    near = make_plan(gsm8k(config_folder, *changes, "actor.ppo_mini_batch_size=3"), read_data=False)
    assert near.notes == ["the data files were not read"]
    uneven = ["actor.ppo_mini_batch_size=12", "actor.ppo_micro_batch_size_per_gpu=3"]
    plan = make_plan(gsm8k(config_folder, *changes, *uneven), read_data=False)
    assert plan.notes[0].endswith("actor.ppo_micro_batch_size_per_gpu=2 or 4")
    assert plan.as_dict()["batch"]["micro_batches_per_rank"] == 3


@pytest.mark.parametrize(
    "changes",
    [
        ["trainer.total_steps=3", "trainer.test_freq=2", "trainer.save_freq=2", "trainer.keep_best_ckpt=false"],
        ["trainer.total_steps=null", "trainer.total_epochs=1", "trainer.test_freq=-1", "trainer.save_freq=1"],
    ],
)
def test_a_run_does_what_its_plan_says(small_task: SmallTask, tmp_path: Path, changes: list[str]) -> None:
    overrides = small_task.ppo(tmp_path / "run", *changes, "rollout.val_kwargs.n=2", "trainer.max_ckpt_to_keep=1")
    found = make_plan(overrides).as_dict()["run"]
    assert not (tmp_path / "run").exists()
    result = launch(overrides)
    rows = read_metrics(tmp_path / "run")
    validated = [row["val/samples"] for row in rows if "val/samples" in row]
    assert found["steps"] == result.step == 3
    assert found["optimizer_steps"] == 6
    assert (found["validations"], found["validation_samples"]) == (len(validated), validated[0])
    assert found["train_batches_per_epoch"] == 3
    assert found["checkpoints"] == (2 if "trainer.save_freq=2" in changes else 3)
    assert found["checkpoints_kept"] == len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


def test_a_supervised_run(small_task: SmallTask, tmp_path: Path) -> None:
    plan = make_plan(small_task.sft(tmp_path, "trainer.stop_at.value=0.9"))
    found = plan.as_dict()
    assert (found["batch"]["rows"], found["batch"]["optimizer_steps"], found["run"]["optimizer_steps"]) == (5, 1, 4)
    assert "trainer.stop_at may end the run before its last step, at val/accuracy >= 0.9" in plan.notes


def test_rollouts_ahead_of_training_have_their_bound(small_task: SmallTask, tmp_path: Path) -> None:
    replicas = ["rollout.mode=colocated", "rollout.weight_sync=shared_memory"]
    changes = [*replicas, "trainer.max_staleness=4"]
    batch = make_plan(small_task.ppo(tmp_path, *changes)).as_dict()["batch"]
    assert (batch["max_staleness"], batch["max_age"]) == (
        4,
        6,
    )  # five of the six in the window may overtake: two steps of 4
    unbounded = make_plan(small_task.ppo(tmp_path, *changes, "trainer.admission=capacity")).as_dict()["batch"]
    assert unbounded["max_age"] is None
    assert "max_staleness" not in make_plan(small_task.ppo(tmp_path, *replicas)).as_dict()["batch"]


def test_what_is_generated_beyond_the_batch_is_noted(config_folder: Path) -> None:
    changes = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=4"]
    plan = make_plan(gsm8k(config_folder, "algorithm=remax", *changes), read_data=False)
    assert plan.notes[1].startswith("algorithm.filter_groups: up to 4 batches of 1,024 prompts are read")
    assert plan.notes[2] == "algorithm.adv_estimator=remax: one additional greedy response to each prompt"


def test_a_batch_larger_than_the_data_is_refused(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.train_batch_size: the batch size 40 is larger"):
        make_plan(small_task.ppo(tmp_path, "data.train_batch_size=40"))


def test_the_critic_in_a_pool_of_its_own(small_task: SmallTask, tmp_path: Path) -> None:
    changes = [
        "algorithm=gae",
        "critic.ppo_epochs=3",
        "placement.pools={apart: [2]}",
        "placement.mapping={critic: apart}",
    ]
    found = make_plan(small_task.ppo(tmp_path, *changes)).as_dict()
    assert found["batch"]["critic_optimizer_steps"] == 6
    assert found["roles"]["apart"]["roles"] == ["critic"]
    assert set(found["memory"]["pools"]["apart"]["device"]) == {"held", "updating"}
    assert set(found["memory"]["pools"]["global_pool"]["device"]) == {"held", "generating", "updating"}
    together = make_plan(small_task.ppo(tmp_path, "algorithm=gae")).as_dict()
    assert together["roles"]["global_pool"]["roles"] == ["actor", "rollout", "critic"]
    critic = together["memory"]["pools"]["global_pool"]["items"]["critic: parameters"]
    # Half of it, and half a parameter more, on each of two ranks.
    assert abs(2 * found["memory"]["pools"]["apart"]["items"]["critic: parameters"] - critic) <= 4


def test_a_reward_model_in_a_pool_of_its_own(config_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    judge = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(config_folder, num_labels=1))
    judge.config.pad_token_id = 0
    judge.save_pretrained(tmp_path / "judge")
    pools = ["placement.pools={judges: [1]}", "placement.mapping={reward_model: judges}"]
    on = ["reward_model.enable=true", f"reward_model.model.path={tmp_path / 'judge'}", "placement.device=cuda", *pools]
    found = make_plan(gsm8k(config_folder, *on), read_data=False).as_dict()
    assert found["roles"]["judges"]["roles"] == ["reward model"]
    memory = found["memory"]["pools"]["judges"]
    # Its head has no bias, which a value head has.
    weights = _bytes(judge.parameters()) + 4
    assert memory["items"]["reward model: parameters"] == weights
    assert memory["device"]["held"] == weights + memory["items"]["workers: context and libraries"]
    # A score is a number a row, so there are no logits.
    gathered, activations = (memory["items"][f"reward model: {what}"] for what in ("gathered weights", "activations"))
    assert memory["device"]["forward"] == memory["device"]["held"] + gathered + activations
    assert set(memory["device"]) == {"held", "forward"}


def test_the_models_of_other_roles_are_named_by_their_keys(config_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic.model.path: .*nowhere is not a folder"):
        make_plan(gsm8k(config_folder, "algorithm=gae", f"critic.model.path={tmp_path / 'nowhere'}"), read_data=False)


# -- numbers against the real thing ---------------------------------------------------------------


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_held_memory_is_what_workers_hold(small_task: SmallTask, tmp_path: Path, dtype: str) -> None:
    changes = ["algorithm=gae", "actor.use_kl_loss=true", f"actor.engine.model_dtype={dtype}"]
    overrides = small_task.ppo(tmp_path, *changes)
    items = make_plan(overrides).as_dict()["memory"]["pools"]["global_pool"]["items"]
    with set_up(overrides) as trainer:
        roles = trainer.run.actor.group.workers[0].handle.workers
        actor = worker_of(trainer)
        critic = next(worker for worker in roles.values() if hasattr(worker, "critic")).critic
        for name, training in (("actor", actor.actor), ("critic", critic)):
            engine = training.engine
            state = [
                value for entry in engine.optimizer.state.values() for key, value in entry.items() if key != "step"
            ]
            assert items[f"{name}: parameters"] == _bytes(engine.module.parameters())
            assert items[f"{name}: optimizer state"] == _bytes(state)
        assert items["reference: parameters"] == _bytes(actor.ref.engine.module.parameters())


def test_the_cache_is_as_large_as_transformers_makes_it(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    cache = model(torch.ones(3, 7, dtype=torch.int64), use_cache=True).past_key_values
    held = _bytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert count_kv_cache(measure_model(ModelConfig(str(model_folder))), 3, 7, 4) == held


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("attention", "stored"), [("sdpa", 4), ("sdpa", 2), ("eager", 4), ("eager", 2)])
def test_activations_are_near_and_below_their_bound(
    tmp_path: Path, checkpointing: bool, attention: str, stored: int
) -> None:
    """What autograd saves in a forward pass; weights and what is saved several times counted once."""
    from transformers import AutoModelForCausalLM

    from rollcast_fsdp.model import enable_checkpointing

    folder = tiny_model_folder(tmp_path / "m", hidden=64, layers=6)
    dtype = {4: torch.float32, 2: torch.bfloat16}[stored]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype).train()
    if checkpointing:
        enable_checkpointing(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.ones(4, 48, dtype=torch.int64), use_cache=False, logits_to_keep=16).logits.float()
        kept_alive = torch.logsumexp(logits, -1).sum()
    layout = EngineLayout(1, stored, stored, checkpointing=checkpointing)
    size = measure_model(ModelConfig(str(folder)))
    passes = Passes(4, 48, 16)
    kept, at_work = bound_activations(size, passes, layout, attention == "eager")
    bound = kept + at_work + bound_logits(size, passes, layout)
    assert kept_alive.requires_grad
    # Checkpointed layers are computed again in the backward, one after the other.
    assert bound / (20 if checkpointing else 3) < sum(saved.values()) < bound


def layout_of(engine: Any, ranks: int) -> EngineLayout:
    role = RoleSpec("actor", "trains", ModelFacts(1, 1, 1, 1, 1, 1, 1, 1), "fsdp")
    return EngineLayout.of(describe_engine(role, engine), Mesh(data=ranks), ranks)


def test_layouts_of_engines() -> None:
    from rollcast_fsdp.schemas import FsdpConfig

    assert layout_of(FsdpConfig(), 1) == EngineLayout(1, gradient=4, state=8)
    assert not layout_of(FsdpConfig(), 1).gathers
    mixed = layout_of(FsdpConfig(param_dtype="bf16", param_offload=True, fsdp_size=4), 8)
    assert mixed == EngineLayout(4, 4, 2, param_offload=True, gradient=4, state=8)
    assert (mixed.shard(10), mixed.gathers) == (3, True)
    streams = layout_of(FsdpConfig(offload_policy=True), 1)
    assert streams == EngineLayout(1, gradient=4, state=8, streams_weights=True)
    assert streams.gathers
    assert not has_known_keys(object())
    assert layout_of(object(), 4) == EngineLayout(1, gradient=4, state=8, keeps_gradients=True)
    lean = FsdpConfig(
        ulysses_sequence_parallel_size=2, use_fused_kernels=True, enable_activation_offload=True, model_dtype="bf16"
    )
    expected = EngineLayout(
        4, 2, 2, False, False, False, True, 2, head_positions=512, fused_logits=True, gradient=2, state=4
    )
    assert layout_of(lean, 4) == expected
    assert (data_parallel_size(lean, 8), data_parallel_size(object(), 8)) == (4, 8)


def test_keys_that_save_memory_lower_the_bound(config_folder: Path) -> None:
    size, passes = measure_model(ModelConfig(str(config_folder))), Passes(8, 2048, 1024)
    large = replace(size, vocabulary=150_000, layers=24)
    plain, gradients = bound_activations(large, passes, EngineLayout(1), eager=False)
    logits = 3 * 4 * 8 * 1024 * 150_000
    assert bound_logits(large, passes, EngineLayout(1)) == logits
    assert bound_logits(large, passes, EngineLayout(1, fused_logits=True, head_positions=512)) == logits / 16
    half = EngineLayout(1, computed=2, fused_logits=True, head_positions=512)
    assert bound_logits(large, passes, half) == logits / 16 + 4 * 150_000 * large.hidden
    assert bound_logits(large, passes, half, copies=2) == logits / 24
    halves = bound_activations(large, passes, EngineLayout(1, sequence_parts=2), eager=False)
    assert halves == (plain / 2, gradients / 2)
    assert bound_logits(large, passes, EngineLayout(1, sequence_parts=2)) == logits / 2
    at_work = plain / 24 + gradients
    assert bound_activations(large, passes, EngineLayout(1, activation_offload=True), eager=False) == (0, at_work)
    recomputed = bound_activations(large, passes, EngineLayout(1, checkpointing=True), eager=False)
    assert recomputed == (24 * 8 * 2048 * large.hidden * 4, at_work)
    assert bound_forward(large, passes, EngineLayout(1), eager=False) < at_work
    assert bound_forward(large, passes, EngineLayout(1), eager=True) > bound_forward(
        large, passes, EngineLayout(1), eager=False
    )


def test_interleaved_stages_keep_more_activations(config_folder: Path) -> None:
    size, passes = replace(measure_model(ModelConfig(str(config_folder))), layers=24), Passes(8, 2048, 1024)
    bounds = [
        bound_activations(size, passes, EngineLayout(1, pipeline=4, chunks=chunks), eager=False)[0]
        for chunks in (1, 2, 3)
    ]
    # The first stage holds stages * chunks + stages - 1 chunks of 24 / (stages * chunks) layers.
    assert [bound / (bounds[0] / 24) for bound in bounds] == [24, 33, 30]


def test_gathered_weights_are_two_layers_and_what_is_outside(config_folder: Path) -> None:
    size = measure_model(ModelConfig(str(config_folder)))
    outside = size.parameters - size.layers * size.layer
    # Embedding, head, and the last norm, which the mean layer takes a share of.
    assert outside == pytest.approx(2 * size.vocabulary * size.hidden, abs=size.hidden)
    assert count_gathered(size, EngineLayout(2)) == 4 * size.parameters
    deep = type(size)(**{**vars(size), "layers": 6, "parameters": outside + 6 * size.layer})
    deep = type(size)(**{**vars(deep), "value_parameters": size.value_parameters + 4 * size.layer})
    assert count_gathered(deep, EngineLayout(2)) == pytest.approx(4 * (outside + 2 * size.layer), rel=0.01)
    assert count_gathered(deep, EngineLayout(2, reshards=False)) == 4 * deep.parameters
    assert count_gathered(deep, EngineLayout(2), layers=3) - count_gathered(deep, EngineLayout(2)) == 4 * size.layer
    assert count_gathered(deep, EngineLayout(1)) == count_unreduced(deep, EngineLayout(1)) == 0
    mixed = count_unreduced(deep, EngineLayout(2, computed=2))
    assert mixed == 2 * deep.vocabulary * deep.hidden + (2 + 4) * size.layer
    assert count_unreduced(deep, EngineLayout(2, computed=2), value_model=True) == (2 + 4) * size.layer


def test_models_take_turns_and_offloaded_state_comes_back() -> None:
    role = RoleSpec("any", "trains", ModelFacts(1, 1, 1, 1, 1, 1, 1, 1), "fsdp")
    actor = [
        MemoryItem("actor: parameters", 100, on_host=True),
        MemoryItem("actor: optimizer state", 200, on_host=True),
        MemoryItem("actor: gradients", 10),
        MemoryItem("actor: activations", 50, "update"),
        MemoryItem("actor: kept activations", 999, "update", on_host=True),
    ]
    critic = [MemoryItem("critic: parameters", 7), MemoryItem("critic: activations", 90, "update")]
    rollout = [MemoryItem("rollout: weights", 100, "generate"), MemoryItem("rollout: KV cache", 30, "generate")]
    process = ProcessMemory(reserve=3, graphs=1)
    parts = [gather_parts(items, role, process) for items in (actor, critic, rollout)]
    assert [each.held for each in parts] == [10, 7, 0]
    # After the passes the optimizer state takes the place of activations.
    assert [each.passing for each in parts] == [100 + 200, 90, 130]
    assert (held_bytes(parts), pool_bytes(parts)) == (17 + 4, 17 + 4 + 300)
    on_device = [
        MemoryItem(item.name, item.bytes, item.phase) for item in actor if item.name != "actor: kept activations"
    ]
    parts = [gather_parts(items, role, process) for items in (on_device, critic, rollout)]
    assert (held_bytes(parts), pool_bytes(parts)) == (317 + 4, 317 + 4 + 130)
    replica = gather_parts(rollout, replace(role, own_process=True), process)
    assert held_bytes([parts[0], replica]) == 310 + 8


def test_gradients_leave_the_device_before_it_generates(config_folder: Path) -> None:
    def phases(*changes: str) -> dict[str, int]:
        plan = make_plan(gsm8k(config_folder, "trainer.total_steps=1", *changes), read_data=False).as_dict()
        return plan["memory"]["pools"]["global_pool"]

    found = phases("placement.device=cuda", "actor.engine.enable_gradient_checkpointing=true")
    items, device = found["items"], found["device"]
    held = ("actor: parameters", "actor: optimizer state", "reference: parameters", "workers: context and libraries")
    assert device["held"] == sum(items[name] for name in held)
    assert device["generating"] == device["held"] + items["rollout: weights"] + items["rollout: KV cache"]
    passes = ("gradients", "unreduced gradients", "activations", "logits", "gathered weights")
    assert device["updating"] == device["held"] + sum(items[f"actor: {name}"] for name in passes)
    found = phases("engine=megatron", "placement.device=cuda", "actor.engine.dtype=float32")
    items, device = found["items"], found["device"]
    assert device["held"] == sum(items[name] for name in held)


def test_both_ends_of_a_weight_sync_are_on_the_devices_at_once() -> None:
    role = RoleSpec("any", "trains", ModelFacts(1, 1, 1, 1, 1, 1, 1, 1), "fsdp")
    sender = gather_parts(
        [MemoryItem("actor: parameters", 100, on_host=True), MemoryItem("actor: sync bucket", 5, "sync")],
        role,
        ProcessMemory(0),
    )
    receiver = gather_parts(
        [MemoryItem("rollout: weights", 80, "generate"), MemoryItem("rollout: sync bucket", 5, "sync")],
        role,
        ProcessMemory(0),
    )
    assert (sender.passing, receiver.passing) == (100, 80)
    assert pool_bytes([sender, receiver]) == 105 + 85


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ConfigError, match=r"config.json does not describe a causal language model: .*nonsense"):
        measure_model(ModelConfig(str(tmp_path)))


def test_a_model_with_a_vision_tower_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLConfig

    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .*model_type=qwen2_5_vl has a vision tower") as caught:
        measure_model(ModelConfig(str(tmp_path)))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (3 * 2**29, "1.5 GiB")])
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_a_plan_shows_what_the_device_decided(config_folder: Path) -> None:
    def shown(*changes: str) -> tuple[str, Any]:
        options = gsm8k(config_folder, *changes)
        text, as_json = (
            CliRunner().invoke(build_app(), ["plan", *options, "--skip-data", *more]) for more in ([], ["--json"])
        )
        assert (text.exit_code, as_json.exit_code) == (0, 0)
        return text.stdout, json.loads(as_json.stdout).get("defaults of the device")

    text, found = shown("placement.device=cuda", "actor.engine.use_remove_padding=false")
    assert found == {
        "actor.engine.param_dtype": "bf16",
        "actor.engine.enable_gradient_checkpointing": True,
        "rollout.update_weights_bucket_megabytes": 512,
    }
    assert "actor.engine.param_dtype=bf16 (on cuda: the speed of bf16, with fp32 master weights)" in text
    assert shown("placement.device=cpu")[1] is None


def test_defaults_of_the_device_survive_a_resume(config_folder: Path) -> None:
    """A run's ``config.yaml`` holds the chosen values, so another kind of device cannot change them unnoticed."""

    def config(*changes: str) -> dict[str, Any]:
        return compose(gsm8k(config_folder, *changes)).plain()

    on_cuda, on_cpu = config("placement.device=cuda"), config("placement.device=cpu")
    assert on_cuda["ref"]["engine"]["param_dtype"] == "bf16"
    assert differing_settings(on_cuda, config("placement.device=cuda")) == []
    said = "; ".join(differing_settings(on_cuda, on_cpu))
    assert "actor.engine.param_dtype: 'bf16' then, None now" in said
    keys = ("param_dtype=bf16", "enable_gradient_checkpointing=true", "use_remove_padding=true")
    kept = config("placement.device=cpu", *(f"actor.engine.{key}" for key in keys))
    assert differing_settings(on_cuda, kept) == []
