"""`rollcast plan` and the cost model `analytical` of `rollcast map` say the same bytes of the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollcast.config import compose
from rollcast.contracts.engine import ModelConfig
from rollcast.errors import ConfigError
from rollcast_automap.composition import pool_bytes
from rollcast_automap.contract import Cluster, DeviceKind, Mesh, Node, Placement, Pool, Problem, RoleSpec
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.memory.memory_facts import plan_memory
from rollcast_automap.memory.memory_model import measure_model
from rollcast_automap.memory.role_specs import micro_batch_rows, slots_of
from rollcast_automap.memory.splits import check_split
from rollcast_automap.problem import build_problem
from rollcast_automap.search.search_space import list_meshes
from rollcast_testing.tiny import tiny_model_folder
from rollcast_trainer.api import RunSettings, check_run
from rollcast_trainer.batch.sizes import ParallelSizes

GPU = DeviceKind("gpu", 80 << 30, {"bfloat16": 1e15, "float32": 1e14}, 1e12, 1e10)
EIGHT = ["placement.n_gpus_per_node=8", "placement.device=cuda"]
MEGATRON = [*EIGHT, "recipe=gsm8k_megatron", "actor.engine.tensor_model_parallel_size=2"]
REPLICAS = ["rollout=vllm", "rollout.weight_sync=shared_memory"]
CASES = {
    "fsdp on one device": ["placement.device=cuda"],
    "prompts that responses share": [
        *("placement.device=cuda", "actor.engine.share_prompts=true", "actor.engine.param_dtype=null"),
        *("actor.engine.enable_gradient_checkpointing=false", "actor.engine.use_remove_padding=false"),
    ],
    "fsdp over eight": EIGHT,
    "bf16 passes, all saved": [
        *(*EIGHT, "actor.engine.param_dtype=bf16", "actor.engine.enable_gradient_checkpointing=true"),
        *("actor.engine.use_fused_kernels=true", "actor.engine.enable_activation_offload=true"),
    ],
    "two copies, each row on two devices": [
        *(*EIGHT, "actor.engine.fsdp_size=4", "actor.engine.ulysses_sequence_parallel_size=2"),
        "actor.engine.use_remove_padding=true",
    ],
    "offload": [*EIGHT, "actor.engine.param_offload=true", "actor.engine.optimizer_offload=true"],
    "FSDP2's offload policy": [*EIGHT, "actor.engine.offload_policy=true"],
    "FSDP2's offload policy on one device": ["placement.device=cuda", "actor.engine.offload_policy=true"],
    "offload of the reference alone": [*EIGHT, "ref.engine.param_offload=true"],
    "weights stay gathered": [*EIGHT, "actor.engine.reshard_after_forward=false", "actor.engine.model_dtype=bf16"],
    "adapter": [*EIGHT, "model.lora_rank=4"],
    "exact KL": [*EIGHT, "actor.kl_loss_type=full"],
    "eager attention": [*EIGHT, "model.attn_implementation=eager"],
    "megatron": MEGATRON,
    "megatron in stages": [*MEGATRON, "actor.engine.pipeline_model_parallel_size=2"],
    "megatron in interleaved stages": [
        *(*MEGATRON, "actor.engine.pipeline_model_parallel_size=2"),
        "actor.engine.virtual_pipeline_model_parallel_size=2",
    ],
    "megatron's distributed optimizer, recomputed": [
        *(*MEGATRON, "actor.engine.use_distributed_optimizer=true", "actor.engine.dtype=bfloat16"),
        *("actor.engine.recompute_granularity=full", "actor.engine.sequence_parallel=true"),
    ],
    "critic": [*EIGHT, "algorithm=gae", "critic.ppo_micro_batch_size_per_gpu=2", "actor.use_kl_loss=true"],
    "critic of another engine": [*EIGHT, "algorithm=gae", "critic.engine.name=megatron"],
    "replicas that take turns": [*EIGHT, *REPLICAS, "rollout.tensor_model_parallel_size=2"],
    "replicas without graphs": [*EIGHT, *REPLICAS, "rollout.enforce_eager=true", "rollout.free_cache_engine=false"],
    "replicas with a fixed cache and large buckets": [
        *(*EIGHT, *REPLICAS, "rollout.kv_cache_memory_bytes=1000000000"),
        "rollout.update_weights_bucket_megabytes=1024",
    ],
    "offload beside replicas": [*EIGHT, *REPLICAS, "actor.engine.param_offload=true"],
    "replicas of transformers": [*EIGHT, "rollout.mode=colocated", "rollout.weight_sync=shared_memory"],
    "replicas apart": [
        *(*EIGHT, *REPLICAS, "rollout.mode=standalone"),
        *("placement.pools.rollout=[4]", "placement.mapping.rollout=rollout"),
    ],
    "reference apart": [*EIGHT, "placement.pools.ref=[2]", "placement.mapping.ref=ref"],
    "on CPUs": ["placement.n_gpus_per_node=2", "placement.device=cpu"],
    "replicas on CPUs": ["placement.device=cpu", "rollout.mode=colocated", "rollout.weight_sync=shared_memory"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("agrees") / "tiny", hidden=64, layers=4, weights=False, tied=False)


def build(model: Path, changes: list[str]) -> RunSettings:
    files = ["data.train_files=[train.parquet]", "data.val_files=[test.parquet]"]
    small = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=8"]
    recipe = [] if any(change.startswith("recipe=") for change in changes) else ["recipe=gsm8k_grpo"]
    config = compose([*recipe, f"model.path={model}", *files, *small, *changes]).config
    return check_run(config)


def place(settings: RunSettings, problem: Problem, role: RoleSpec) -> tuple[Placement, Pool]:
    """Return where the run has a role, with the micro-batch of the longest rows."""
    algebra = settings.algebra
    titles = {"actor": "actor_rollout", "rollout": "rollout" if settings.uses_replicas else "actor_rollout"}
    name = settings.pools.mapping[titles.get(role.name, role.name)]
    ranks = settings.pools.resource_pool_dict[name].world_size
    if role.kind == "generates":
        tensor = ParallelSizes(settings.rollout.tensor_model_parallel_size)
        sizes = tensor if settings.uses_replicas else ParallelSizes.read(settings.engine)
        mesh, rows = Mesh(sizes.data(ranks), sizes.model), slots_of(settings, algebra, ranks)
    else:
        longest = problem.prompt_lengths.maximum + problem.response_lengths.maximum
        sizes, rows = ParallelSizes.read(settings.role_engine(role.name)), 0
        mesh = Mesh(sizes.data(ranks), sizes.tensor, sizes.pipeline)
        rows = micro_batch_rows(settings, algebra, role.name, ranks, longest)
    return Placement(role.name, name, mesh, rows), Pool(name, ((0, ranks),))


@pytest.mark.cases(14)
@pytest.mark.parametrize("name", CASES)
def test_plan_and_map_say_the_same_bytes(model: Path, name: str) -> None:
    settings = build(model, CASES[name])
    plan = dict(line[:2] for line in plan_memory(settings, settings.algebra, [], GPU.memory_bytes))["pools"]
    kind = GPU if settings.placement.device == "cuda" else replace(GPU, name="cpu")
    problem, costs = (
        build_problem(settings, Cluster((Node(kind, 8, 1e11),) * 2, 1e10)),
        AnalyticalCosts(AnalyticalConfig()),
    )
    memory: dict[str, dict[str, Any]] = {}
    for role in problem.roles:
        placement, pool = place(settings, problem, role)
        parts = costs.memory(problem, role, placement, pool, settings.rollout.mode)
        memory.setdefault(pool.name, {})[role.name] = parts
    assert memory.keys() == plan.keys()
    for pool_name, roles in memory.items():
        assert pool_bytes(list(roles.values())) == max(plan[pool_name]["device"].values())
    actor, items = memory[next(iter(plan))]["actor"], plan[next(iter(plan))]["items"]
    # Under FSDP2's policy the device has none of them.
    assert actor.gradients == items.get("actor: gradients", 0)
    assert actor.optimizer == items.get("actor: optimizer state", 0)
    assert ("actor: gradients" in items) != ("actor: kept gradients" in items)
    assert (actor.activations, actor.logits) == (items["actor: activations"], items["actor: logits"])


def test_plan_and_map_divide_stages_into_chunks(model: Path) -> None:
    """Map proposes no stages that plan would refuse; the model has four layers."""
    stages, key = "actor.engine.pipeline_model_parallel_size", "actor.engine.virtual_pipeline_model_parallel_size"
    settings = build(model, [*MEGATRON, f"{stages}=2", f"{key}=2"])
    problem = build_problem(settings, Cluster((Node(GPU, 8, 1e11),), 1e10))
    found = {mesh.pipeline for mesh in list_meshes(problem, problem.role("actor"), Pool("one", ((0, 8),)))}
    assert found == {2}
    size = measure_model(ModelConfig(str(model)))
    check_split(settings, size)
    with pytest.raises(ConfigError, match=rf"{key} is 3, .* 2 layers in each stage, .* would fit: 1, 2$"):
        check_split(build(model, [*MEGATRON, f"{stages}=2", f"{key}=3"]), size)
    uneven = "actor.engine.num_layers_in_first_pipeline_stage=2"
    check_split(build(model, [*MEGATRON, f"{stages}=2", f"{key}=2", uneven]), replace(size, layers=7))


def test_weights_from_host_memory_cost_copies_and_a_slower_optimizer(model: Path) -> None:
    costs, found = AnalyticalCosts(AnalyticalConfig()), []
    for changes in ([], ["actor.engine.offload_policy=true"]):
        settings = build(model, ["placement.device=cuda", *changes])
        problem = build_problem(settings, Cluster((Node(GPU, 8, 1e11),), 1e10))
        placement, pool = place(settings, problem, problem.role("actor"))
        stage = next(each for each in problem.stages if each.name == "update_actor")
        found.append(costs.stage_cost(problem, stage, placement, pool, "hybrid"))
    plain, streamed = found
    assert streamed.compute == plain.compute
    assert streamed.memory > plain.memory
    assert streamed.communication > plain.communication == 0


def test_chunks_of_stages_cost_exchanges_and_save_idle_time(model: Path) -> None:
    stages, costs = [*MEGATRON, "actor.engine.pipeline_model_parallel_size=2"], AnalyticalCosts(AnalyticalConfig())
    found = []
    for changes in ([], ["actor.engine.virtual_pipeline_model_parallel_size=2"]):
        settings = build(model, [*stages, *changes])
        problem = build_problem(settings, Cluster((Node(GPU, 8, 1e11),), 1e10))
        placement, pool = place(settings, problem, problem.role("actor"))
        stage = next(each for each in problem.stages if each.name == "update_actor")
        found.append(costs.stage_cost(problem, stage, placement, pool, "hybrid"))
    plain, chunks = found
    assert chunks.communication > plain.communication
    assert chunks.bubble < plain.bubble
    assert chunks.compute == plain.compute


def actor_of(model: Path, *changes: str, mesh: Mesh | None = None) -> tuple[Any, RoleSpec]:
    """Return the memory of the actor on eight devices, and the actor."""
    settings = build(model, [*EIGHT, *changes])
    problem = build_problem(settings, Cluster((Node(GPU, 8, 1e11),), 1e10))
    role = problem.role("actor")
    placement = Placement("actor", "p", mesh or Mesh(data=8), 4)
    parts = AnalyticalCosts(AnalyticalConfig()).memory(problem, role, placement, Pool("p", ((0, 8),)), "hybrid")
    return parts, role


def test_responses_share_the_activations_of_their_prompt(model: Path) -> None:
    def activations(shares: bool, ranks: int) -> int:
        changes = [*CASES["prompts that responses share"], f"placement.n_gpus_per_node={ranks}"]
        settings = build(model, [*changes, f"actor.engine.share_prompts={shares}"])
        problem = build_problem(settings, Cluster((Node(GPU, 8, 1e11),), 1e10))
        at, pool = Placement("actor", "p", Mesh(data=ranks), 10), Pool("p", ((0, ranks),))
        costs = AnalyticalCosts(AnalyticalConfig())
        memory = costs.memory(problem, problem.role("actor"), at, pool, "hybrid")
        # The layer at work takes more than the logits, which are whole here.
        return memory.activations + memory.logits

    # 5 samples of 512 + 1,024 tokens; the weights of two ranks are gathered, and then nothing is shared.
    assert activations(True, 1) / activations(False, 1) == pytest.approx((103 + 1024) / (512 + 1024))
    assert activations(True, 2) == activations(False, 2)


def test_an_adapter_has_the_only_gradients(model: Path) -> None:
    whole, _ = actor_of(model)
    parts, role = actor_of(model, "model.lora_rank=4")
    shard = -(-role.adapter_parameters // 8) * 4
    assert 0 < parts.gradients == shard < whole.gradients
    assert (parts.optimizer, parts.parameters) == (2 * shard, whole.parameters + shard)


def test_a_process_on_a_cpu_is_smaller_than_one_on_a_gpu(model: Path) -> None:
    gpu, role = actor_of(model)
    settings = build(model, ["placement.device=cpu"])
    problem = build_problem(settings, Cluster((Node(replace(GPU, name="cpu"), 1, 1e9),), 1e9))
    at, pool = Placement("actor", "p", Mesh(), 4), Pool("p", ((0, 1),))
    cpu = AnalyticalCosts(AnalyticalConfig()).memory(problem, problem.role("actor"), at, pool, "hybrid")
    assert 0.3e9 < cpu.reserve < 0.7e9 < gpu.reserve
    given = AnalyticalCosts(AnalyticalConfig(reserve_bytes=7, graph_bytes=5))
    assert given.memory(problem, problem.role("actor"), at, pool, "hybrid").reserve == 7
    replica = replace(problem.role("rollout"), own_process=True, plugin="vllm")
    there = replace(problem, cluster=Cluster((Node(GPU, 1, 1e9),), 1e9))
    assert given.memory(there, replica, replace(at, role="rollout"), pool, "hybrid").reserve == 12
    assert role.plugin == "fsdp"


def test_the_cache_takes_its_part_of_a_device_whatever_its_rows_need(model: Path) -> None:
    settings = build(model, [*EIGHT, *REPLICAS, "rollout.gpu_memory_utilization=0.25"])
    problem, costs = build_problem(settings, Cluster((Node(GPU, 8, 1e11),), 1e10)), AnalyticalCosts(AnalyticalConfig())
    role, pool = problem.role("rollout"), Pool("p", ((0, 8),))
    few, many = (
        costs.memory(problem, role, Placement("rollout", "p", Mesh(data=8), rows), pool, "hybrid") for rows in (1, 8)
    )
    assert few == many
    assert few.parameters + few.kv_cache + few.reserve == GPU.memory_bytes // 4
    assert (few.held, few.passing) == (0, few.parameters + few.kv_cache)
    apart = costs.memory(problem, role, Placement("rollout", "p", Mesh(data=8), 1), pool, "standalone")
    assert apart.held == few.passing
    tiny = replace(GPU, memory_bytes=1 << 30)
    none = replace(problem, cluster=Cluster((Node(tiny, 8, 1e11),), 1e10))
    # A replica for whose cache nothing is left fits no device.
    assert costs.memory(none, role, Placement("rollout", "p", Mesh(data=8), 1), pool, "hybrid").total > 1 << 30
