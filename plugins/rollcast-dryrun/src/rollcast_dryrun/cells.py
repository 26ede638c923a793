"""The table of dry runs: the combinations of the engines' keys, and the reasons for those left out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from rollcast_dryrun.engines import EngineCell
from rollcast_dryrun.syncs import SyncCell

__all__ = ["LEFT_OUT", "fsdp_cells", "megatron_cells", "sync_cells"]

_BOTH = (False, True)
#: Keys without a cell → the reason.
LEFT_OUT = {
    "fsdp use_torch_compile": "compiling needs Triton; what is compiled is the code of the other cells",
    "fsdp attn_implementation=flash_attention_2, flash_attention_3": "the libraries have no build for a CPU",
    "megatron virtual_pipeline_model_parallel_size, rows of different lengths": "a stage is told shapes by all others",
    "megatron with Transformer Engine, dtype=float32, packed rows": "it has no kernel for them, and the engine refuses",
    "checkpoints": "they are written from host memory, whose content a dry run does not have",
}


def fsdp_cells() -> list[EngineCell]:
    """Return the cells of the FSDP engine."""
    return [*_passes(), *_ranks(), *_moves(), *_models(), *_outputs(), *_images(), *_liger()]


def _fsdp(keys: dict[str, Any] | None = None, **options: Any) -> EngineCell:
    return EngineCell("fsdp", {"param_dtype": "bf16", "use_remove_padding": True, **(keys or {})}, **options)


def _passes() -> Iterator[EngineCell]:
    """Yield every combination of what a pass can do, in bfloat16 on eight ranks and partly in float32 on one."""
    for packs, fused, recomputes, offloads in product(_BOTH, repeat=4):
        keys = {
            "use_remove_padding": packs,
            "use_fused_kernels": fused,
            "enable_gradient_checkpointing": recomputes,
            "enable_activation_offload": offloads,
        }
        yield _fsdp(keys, world=8)
        if packs == offloads:
            yield _fsdp({**keys, "param_dtype": None})


def _ranks() -> Iterator[EngineCell]:
    """Yield meshes of 2 to 512 ranks, each as its first, a middle and its last rank."""
    heads = {"num_key_value_heads": 4}
    for world, copy, sequence in (
        *((2, -1, 1), (2, 1, 1), (2, -1, 2), (4, 2, 2), (8, 4, 1), (8, 4, 2), (8, 2, 4)),
        *((64, -1, 1), (64, 8, 1), (64, 8, 4), (512, -1, 1), (512, 64, 1), (512, 8, 4)),
    ):
        for rank in sorted({0, world // 2, world - 1}):
            keys = {"fsdp_size": copy, "ulysses_sequence_parallel_size": sequence}
            yield _fsdp(keys, changes=heads, world=world, rank=rank)


def _moves() -> Iterator[EngineCell]:
    """Yield the ways to keep state in host memory, and to gather weights."""
    offloads: tuple[dict[str, Any], ...] = (
        {"param_offload": True},
        {"optimizer_offload": True},
        {"param_offload": True, "optimizer_offload": True},
        {"offload_policy": True},
    )
    for offload, packs, world in product(offloads, _BOTH, (1, 8)):
        yield _fsdp({**offload, "use_remove_padding": packs}, world=world)
    for reshards, prefetches, copy in product(_BOTH, _BOTH, (-1, 4)):
        keys: dict[str, Any] = {"reshard_after_forward": reshards, "forward_prefetch": prefetches, "fsdp_size": copy}
        yield _fsdp(keys, world=8)
    for stored, computed, reduced in (("bf16", None, None), ("bf16", None, "fp32"), ("fp32", "bf16", "bf16")):
        keys = {"model_dtype": stored, "param_dtype": computed, "reduce_dtype": reduced}
        yield from (_fsdp(keys, world=world) for world in (1, 8))


def _models() -> Iterator[EngineCell]:
    """Yield architectures with heads and adapters."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"model_type": "value_model"},
        {"model_keys": {"lora_rank": 4}},
        {"model_keys": {"lora_rank": 4}, "model_type": "value_model"},
        {"changes": {"tie_word_embeddings": True}},
    )
    for model, kind, packs in product(("qwen2", "qwen3", "llama", "qwen3_moe"), kinds, _BOTH):
        yield _fsdp({"use_remove_padding": packs}, model=model, world=8, **kind)
        if packs and not kind:
            yield _fsdp(model=model)
    yield from (_fsdp({"router_aux_loss_coef": 0.01}, model="qwen3_moe", world=world) for world in (1, 8))


def _outputs() -> Iterator[EngineCell]:
    """Yield further outputs and layouts of a pass."""
    for fused, settings in product(_BOTH, ({"calculate_entropy": True}, {"calculate_sum_pi_squared": True})):
        yield _fsdp({"use_fused_kernels": fused}, settings=settings, world=8)
    yield _fsdp(settings={"temperature": 0.7}, world=8)
    yield _fsdp(settings={"micro_batch_size_per_gpu": None, "max_token_len_per_gpu": 128}, world=8)
    yield EngineCell("fsdp", {"share_prompts": True})
    yield from (_fsdp(model_keys={"random_init": True}, world=world) for world in (1, 8))
    yield _fsdp({"log_probs_chunk_size": 8, "use_fused_kernels": True}, world=8)
    for fused, packs in product(_BOTH, _BOTH):
        keys = {"use_fused_kernels": fused, "use_remove_padding": packs}
        yield _fsdp(keys, settings={"vocabulary_kl": "full"}, world=8)
    for packs, world in product(_BOTH, (1, 8)):
        yield _fsdp({"use_remove_padding": packs}, model="qwen3_moe", settings={"record_routing": True}, world=world)


def _images() -> Iterator[EngineCell]:
    """Yield models that see images, of which rows have several, one or none."""
    for model in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        yield _fsdp(
            {"use_remove_padding": False, "enable_gradient_checkpointing": model == "qwen2_vl"}, model=model, world=8
        )
    yield _fsdp({"use_remove_padding": False}, model="qwen2_5_vl")


def _liger() -> Iterator[EngineCell]:
    """Yield the architectures with Liger's kernels, which are compiled for the device."""
    for model, recomputes in product(("qwen2", "qwen3", "llama"), _BOTH):
        yield _fsdp({"enable_gradient_checkpointing": recomputes}, model=model, model_keys={"use_liger": True}, world=8)


def megatron_cells() -> list[EngineCell]:
    """Return the cells of the Megatron engine: with Transformer Engine, and with megatron-core's own layers."""
    return [
        *_megatron_alone(),
        *_megatron_meshes(),
        *_megatron_settings(),
        *_megatron_models(),
        *_megatron_outputs(),
        *_megatron_experts(),
        *_megatron_interleaved(),
    ]


#: Sizes of tensor, pipeline and context parallelism, and the ranks of the group.
_MESHES = (
    *((1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 4)),
    *((2, 1, 2, 8), (2, 2, 2, 8), (4, 1, 1, 8), (4, 2, 1, 64), (4, 4, 2, 64)),
)


def _mesh(tensor: int, pipeline: int, context: int) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "sequence_parallel": tensor > 1,
    }


def _megatron(keys: dict[str, Any], transformer_engine: bool = True, **options: Any) -> EngineCell:
    """Return a cell with as many layers and heads as its mesh splits."""
    stages = keys.get("pipeline_model_parallel_size", 1)
    changes = {"num_key_value_heads": 4, "num_hidden_layers": max(2, stages), **options.pop("changes", {})}
    return EngineCell("megatron", keys, changes=changes, transformer_engine=transformer_engine, **options)


def _megatron_alone() -> Iterator[EngineCell]:
    """Yield what differs in megatron-core's own layers: ways to split, to recompute and to offload."""
    for (*sizes, world), packs in product(((1, 1, 1, 1), (2, 1, 1, 2), (1, 1, 2, 2), (2, 2, 2, 8)), _BOTH):
        yield _megatron({**_mesh(*sizes), "use_remove_padding": packs}, False, world=world)
    for keys in ({"recompute_granularity": "selective"}, {"param_offload": True, "optimizer_offload": True}):
        yield _megatron({**_mesh(2, 1, 1), "use_remove_padding": True, **keys}, False, world=8)
    yield _megatron({**_mesh(2, 1, 1), "use_remove_padding": True, "dtype": "float32"}, False, world=8)


def _megatron_meshes() -> Iterator[EngineCell]:
    """Yield meshes of 1 to 64 ranks, each as its first, a middle and its last rank."""
    for *sizes, world in _MESHES:
        for rank in sorted({0, world // 2, world - 1}):
            yield _megatron({**_mesh(*sizes), "use_remove_padding": True}, world=world, rank=rank)
        yield _megatron({**_mesh(*sizes), "use_remove_padding": False}, world=world)


def _megatron_settings() -> Iterator[EngineCell]:
    """Yield the other keys of the engine on a mesh with tensor and data parallelism."""
    recomputes: tuple[dict[str, Any], ...] = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
    )
    overlaps: tuple[dict[str, Any], ...] = (
        {"use_distributed_optimizer": False},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    )
    offloads: tuple[dict[str, Any], ...] = (
        {"param_offload": True},
        {"optimizer_offload": True},
        {"param_offload": True, "optimizer_offload": True},
    )
    for keys, packs in product((*recomputes, *overlaps, *offloads, {"head_chunk_size": 16}), _BOTH):
        yield _megatron({**_mesh(2, 1, 1), "use_remove_padding": packs, **keys}, world=8)
        if packs:
            yield _megatron({**_mesh(1, 1, 1), "use_remove_padding": True, **keys})
    yield _megatron({**_mesh(2, 1, 1), "use_remove_padding": False, "dtype": "float32"}, world=8)


def _megatron_models() -> Iterator[EngineCell]:
    """Yield architectures with heads and adapters, on one rank, on two that share tensors, and in two stages."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"model_type": "value_model"},
        {"model_keys": {"lora_rank": 4}},
        {"changes": {"tie_word_embeddings": True}},
        {"settings": {"calculate_entropy": True, "calculate_sum_pi_squared": True}},
    )
    meshes = (((1, 1, 1), 1), ((2, 1, 1), 4), ((1, 2, 1), 4))
    for model, kind, (sizes, world) in product(("qwen2", "qwen3", "llama"), kinds, meshes):
        yield _megatron(_mesh(*sizes), sizes[1] == 1, model=model, world=world, rank=world - 1, **kind)


def _megatron_outputs() -> Iterator[EngineCell]:
    """Yield the divergence over the vocabulary from a reference, whose stages run before the policy's."""
    for (sizes, world), packs in product((((1, 1, 1), 1), ((2, 1, 1), 4), ((2, 2, 1), 8)), _BOTH):
        keys = {**_mesh(*sizes), "use_remove_padding": packs}
        yield _megatron(keys, packs, settings={"vocabulary_kl": "full"}, world=world, rank=world - 1)


def _megatron_experts() -> Iterator[EngineCell]:
    """Yield mixtures of experts: split over ranks and in all other ways, shared, balanced, and with replay."""
    meshes = (
        *((1, (1, 1, 1), 1), (2, (1, 1, 1), 2), (4, (1, 1, 1), 8), (2, (2, 1, 1), 8)),
        *((2, (1, 2, 1), 8), (2, (1, 1, 2), 8), (2, (2, 2, 2), 16)),
    )
    for (experts, sizes, world), packs in product(meshes, _BOTH):
        keys = {**_mesh(*sizes), "expert_model_parallel_size": experts, "use_remove_padding": packs}
        yield _megatron(keys, packs, model="qwen3_moe", world=world, rank=world - 1)
    for model, (sizes, world), packs in product(("glm4_moe", "deepseek_v3"), (((1, 1, 1), 2), ((2, 2, 1), 8)), _BOTH):
        keys = {**_mesh(*sizes), "expert_model_parallel_size": 2, "use_remove_padding": packs}
        yield _megatron(keys, world == 8, model=model, world=world, rank=world - 1)
    further: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"router_aux_loss_coef": 0.01}, {}),
        ({"param_offload": True, "optimizer_offload": True}, {}),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {}),
        ({}, {"record_routing": True}),
    )
    for (keys, settings), sizes in product(further, ((1, 1, 1), (2, 2, 1))):
        spread = {**_mesh(*sizes), "expert_model_parallel_size": 2, **keys}
        yield _megatron(spread, model="qwen3_moe", settings=settings, world=8, rank=7)


def _megatron_interleaved() -> Iterator[EngineCell]:
    """Yield stages of two chunks each, for rows of one length."""
    for model, tensor, packs in product(("qwen2", "qwen3_moe"), (1, 2), _BOTH):
        rank = 7 if packs else 0
        keys = {**_mesh(tensor, 2, 1), "virtual_pipeline_model_parallel_size": 2, "use_remove_padding": packs}
        yield _megatron(keys, packs, model=model, changes={"num_hidden_layers": 4}, world=8, rank=rank, is_even=True)


def sync_cells() -> list[SyncCell]:
    """Return the cells of the weight syncs."""
    return [*_syncs(), *_large_syncs()]


def _syncs() -> Iterator[SyncCell]:
    """Yield every sync through memory from every kind of engine; small buckets have a few tensors each."""
    sharded = _fsdp(world=8)
    others = (
        _fsdp(),
        _fsdp({"param_offload": True}, world=8),
        _fsdp(model_keys={"lora_rank": 4}, world=8),
        _megatron(_mesh(2, 1, 1), False, world=8),
    )
    for sync in ("cuda_ipc", "collective", "shared_memory"):
        yield SyncCell(sync, sharded, 1 << 14)
        yield from (SyncCell(sync, engine) for engine in (sharded, *others))


#: Sizes of layers and vocabulary: Qwen2.5 7B and Llama 3 70B.
_LARGE: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "head_dim": 128,
    },
    "llama": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "head_dim": 128,
    },
}


def _large_syncs() -> Iterator[SyncCell]:
    """Yield syncs of tensors as large as those of 7B and 70B, of which some are larger than a bucket."""
    for (model, sizes), sync in product(_LARGE.items(), ("cuda_ipc", "collective")):
        yield SyncCell(sync, _fsdp(model=model, changes=sizes, world=8), 512 << 20, shards=4)
