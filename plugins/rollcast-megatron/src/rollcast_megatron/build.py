"""Building this rank's stage of the model from a Hugging Face config and the engine's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollcast.errors import ConfigError
from rollcast_engine.keys import EngineKeyError
from rollcast_megatron import cpu
from rollcast_megatron.maps import Mixture, ModelMap, Split, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_megatron.layout import Mesh
    from rollcast_megatron.module import DecoderModel, Stage
    from rollcast_megatron.schemas import MegatronConfig

__all__ = ["DTYPES", "Plan", "Placed", "build_model", "check_attention", "check_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_model(plan: ModelMap, config: MegatronConfig) -> tuple[int, ...]:
    """Check that the model can be split as the keys say; return the number of layers of each pipeline stage.

    Raises:
        EngineKeyError: it cannot; the message names the key, the model's size and valid values.
    """
    tensor = config.tensor_model_parallel_size
    heads, groups = plan.transformer["num_attention_heads"], plan.transformer["num_query_groups"]
    for size, what in (
        (heads, "attention heads"),
        # Several ranks may share a key-value head.
        (groups if groups > tensor or tensor % groups else tensor, "key-value heads"),
        (plan.transformer["ffn_hidden_size"], "rows of the MLP (intermediate_size)"),
    ):
        if size % tensor:
            fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
            raise EngineKeyError(
                "tensor_model_parallel_size",
                f"is {tensor}, which does not divide the model's {size} {what}; "
                f"sizes that fit its heads: {', '.join(map(str, fitting))}",
            )
    if plan.mixture is not None:
        _check_mixture(plan.mixture, int(plan.transformer["moe_ffn_hidden_size"]), config)
    elif config.expert_model_parallel_size > 1:
        raise EngineKeyError(
            "expert_model_parallel_size",
            f"is {config.expert_model_parallel_size}, but the model has no experts; set it to 1",
        )
    layers = config.stage_layers(plan.layers)
    if layers is None:
        raise _stage_error(plan.layers, config)
    if any(count % config.chunks for count in layers):
        raise _chunk_error(layers, config)
    return layers


def _check_mixture(mixture: Mixture, rows: int, config: MegatronConfig) -> None:
    tensor, ranks = config.tensor_model_parallel_size, config.expert_model_parallel_size
    if mixture.rule.experts % ranks:
        fitting = ", ".join(str(n) for n in range(1, mixture.rule.experts + 1) if mixture.rule.experts % n == 0)
        raise EngineKeyError(
            "expert_model_parallel_size",
            f"is {ranks}, which does not divide the model's {mixture.rule.experts} experts; sizes that fit: {fitting}",
        )
    if rows % tensor:
        raise EngineKeyError(
            "tensor_model_parallel_size",
            f"is {tensor}, which does not divide the {rows} rows of the model's experts (moe_intermediate_size)",
        )
    if tensor > 1 and not config.sequence_parallel:
        raise EngineKeyError(
            "sequence_parallel",
            f"is false, but the model has experts and tensor_model_parallel_size is {tensor}: ranks that share "
            "positions would route each of them; set it to true",
        )


def check_attention(config: MegatronConfig) -> None:
    """Check that Transformer Engine, if layers are built with it, has a kernel for the rows.

    Raises:
        EngineKeyError: its kernels for packed rows and for context parallelism do not compute in float32.
    """
    from rollcast_megatron.module import has_transformer_engine

    if config.dtype != "float32" or not has_transformer_engine():
        return
    for key, chosen in (
        ("use_remove_padding", config.use_remove_padding),
        ("context_parallel_size", config.context_parallel_size > 1),
    ):
        if chosen:
            raise EngineKeyError(
                key,
                f"is {str(getattr(config, key)).lower()}, but dtype is float32: Transformer Engine computes the "
                "attention of packed rows and of context-parallel ranks only in 16 bits; set dtype to bfloat16",
            )


def _stage_error(layers: int, config: MegatronConfig) -> EngineKeyError:
    stages = config.pipeline_model_parallel_size
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    if first is None and last is None:
        fitting = [n for n in range(1, layers + 1) if layers % n == 0]
        return EngineKeyError(
            "pipeline_model_parallel_size",
            f"is {stages}, which does not divide the model's {layers} layers; sizes that fit: "
            f"{', '.join(map(str, fitting))}; or give the first or last stage another number of layers "
            "(num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage)",
        )
    key = "num_layers_in_first_pipeline_stage" if first is not None else "num_layers_in_last_pipeline_stage"
    between = stages - sum(stage_layers is not None for stage_layers in (first, last))
    left = layers - sum(stage_layers for stage_layers in (first, last) if stage_layers is not None)
    return EngineKeyError(
        key,
        f"is {first if first is not None else last}: with num_layers_in_first_pipeline_stage={first} and "
        f"num_layers_in_last_pipeline_stage={last}, {left} of the model's {layers} layers are left for the {between} "
        "other stages, which have to share them evenly",
    )


def _chunk_error(layers: tuple[int, ...], config: MegatronConfig) -> EngineKeyError:
    fitting = [n for n in range(1, min(layers) + 1) if all(count % n == 0 for count in layers)]
    sizes = ", ".join(map(str, fitting[1:]))
    fits = f"sizes that fit: {sizes}, or null" if sizes else "only null fits"
    return EngineKeyError(
        "virtual_pipeline_model_parallel_size",
        f"is {config.chunks}, which does not divide the layers of each pipeline stage "
        f"({', '.join(map(str, layers))}); {fits}",
    )


@dataclass(frozen=True)
class Placed:
    """A parameter of megatron-core, and its stage and chunk.

    Attributes:
        weight: the parameter with its names in megatron-core, within the chunk, and in transformers.
        stage: pipeline stage that holds it.
        chunk: number of the stage's chunk that it belongs to.
        is_vocabulary: True if its rows are words, padded to a multiple of the tensor-parallel ranks.
        is_copy: True for a copy of another stage's parameter (the head of a tied model), which is not exported.
        peers: for an expert's parameter, the transformers names on each expert-parallel rank, this one included.
    """

    weight: Weight
    stage: int
    is_vocabulary: bool = False
    is_copy: bool = False
    peers: tuple[tuple[str, ...], ...] = ()
    chunk: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameter in its :class:`~rollcast_megatron.module.Stage`."""
        return tuple(f"chunks.{self.chunk}.{name}" for name in self.weight.names)

    @property
    def all_sources(self) -> list[str]:
        """Transformers names of the parameter on all expert-parallel ranks."""
        return [name for sources in self.peers or (self.weight.sources,) for name in sources]


@dataclass(frozen=True)
class Plan:
    """Distribution of a model over the mesh.

    Attributes:
        map: map of the model.
        mesh: mesh of ranks.
        is_value_model: True if the model has a ``score`` instead of the vocabulary head.
        stage_layers: number of layers of each pipeline stage.
        chunks: number of chunks of each stage, between which its layers are divided evenly. The model passes through
            the first chunk of each stage, then through the second, and so on.
    """

    map: ModelMap
    mesh: Mesh
    is_value_model: bool
    stage_layers: tuple[int, ...]
    chunks: int = 1

    @property
    def rows(self) -> int:
        """Rows of the vocabulary on each rank, padding included."""
        return -(-self.map.vocab_size // self.mesh.tensor_size)

    @property
    def own_words(self) -> int:
        """Words of the vocabulary on this rank, without padding."""
        return max(0, min(self.map.vocab_size - self.mesh.tensor_rank * self.rows, self.rows))

    def weights(self) -> Iterator[Placed]:
        """Yield every parameter of the model, in the order of its layers."""
        model, last, top = self.map, self.mesh.pipeline_size - 1, self.chunks - 1
        yield Placed(Weight(("embedding.word_embeddings.weight",), (model.embedding,), Split(0)), 0, True)
        for number, (stage, chunk, own) in enumerate(self._places()):
            mixture = model.mixture if model.has_experts(number) else None
            for weight in model.layer if mixture is None else mixture.layer:
                names = tuple(f"decoder.layers.{own}.{name}" for name in weight.names)
                sources = tuple(source.format(layer=number) for source in weight.sources)
                yield Placed(replace(weight, names=names, sources=sources), stage, chunk=chunk)
            if mixture is not None:
                yield from self._experts(mixture, number, (stage, chunk), f"decoder.layers.{own}.")
        yield Placed(Weight(("decoder.final_layernorm.weight",), (model.final_norm,)), last, chunk=top)
        if self.is_value_model:
            for name in ("score.weight", "score.bias"):
                yield Placed(Weight((name,), (name,)), last, chunk=top)
        elif not model.tied:
            yield Placed(Weight(("output_layer.weight",), (model.head,), Split(0)), last, True, chunk=top)
        elif last:
            yield Placed(Weight(("output_layer.weight",), (model.embedding,), Split(0)), last, True, True, chunk=top)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Yield stage, chunk, and number within the chunk of each layer of the model, in order."""
        for chunk in range(self.chunks):
            for stage, count in enumerate(self.stage_layers):
                for own in range(count // self.chunks):
                    yield stage, chunk, own

    def _experts(self, mixture: Mixture, layer: int, place: tuple[int, int], prefix: str) -> Iterator[Placed]:
        """Yield the parameters of this rank's experts of a layer, which is in a stage and chunk."""
        ranks = self.mesh.expert_size
        stage, chunk = place
        count = mixture.rule.experts // ranks
        for own in range(count):
            for weight in mixture.expert:
                names = tuple(prefix + name.format(expert=own) for name in weight.names)
                peers = tuple(
                    tuple(source.format(layer=layer, expert=rank * count + own) for source in weight.sources)
                    for rank in range(ranks)
                )
                placed = Weight(names, peers[self.mesh.expert_rank], weight.layout)
                yield Placed(placed, stage, peers=peers, chunk=chunk)


def build_model(plan: Plan, config: MegatronConfig, device: torch.device) -> Stage:
    """Return this rank's stage, with weights not yet set.

    Raises:
        ConfigError: the rotary embedding is not supported, or the map leaves out parameters of the model.
    """
    from rollcast_megatron.module import Stage

    transformer = transformer_config(plan, config, device)
    module = Stage([_build_chunk(plan, transformer, number) for number in range(plan.chunks)])
    _mark_split(plan, dict(module.named_parameters()))
    stage: Stage = module.to(device)
    return stage


def _build_chunk(plan: Plan, transformer: Any, chunk: int) -> DecoderModel:
    from rollcast_megatron.module import DecoderModel, block_spec

    mesh, model = plan.mesh, plan.map
    virtual = chunk if plan.chunks > 1 else None
    with cpu.cuda_type_names():
        module = DecoderModel(
            is_value_model=plan.is_value_model,
            config=transformer,
            transformer_layer_spec=block_spec(transformer, virtual),
            vocab_size=plan.rows * mesh.tensor_size,
            max_sequence_length=model.max_positions,
            pre_process=mesh.is_first_stage and chunk == 0,
            post_process=mesh.is_last_stage and chunk == plan.chunks - 1,
            share_embeddings_and_output_weights=model.tied and not plan.is_value_model,
            position_embedding_type="rope",
            rotary_base=model.rope["rope_theta"],
            rotary_percent=model.rope["partial_rotary_factor"],
            vp_stage=virtual,
        )
    _set_frequencies(module, model)
    return module


def transformer_config(plan: Plan, config: MegatronConfig, device: torch.device) -> Any:
    """Return megatron-core's ``TransformerConfig`` from the map's fields and the engine's settings."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype, on_host = DTYPES[config.dtype], device.type == "cpu"
    options: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        **plan.map.transformer,
        "tensor_model_parallel_size": plan.mesh.tensor_size,
        "context_parallel_size": plan.mesh.context_size,
        "pipeline_model_parallel_size": plan.mesh.pipeline_size,
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
        "virtual_pipeline_model_parallel_size": plan.chunks if plan.chunks > 1 else None,
        "sequence_parallel": config.sequence_parallel,
        "recompute_granularity": config.recompute_granularity,
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": on_host,
        # Losses are already divided by counts of the whole mini-batch, so nothing may be averaged.
        "calculate_per_token_loss": True,
        "batch_p2p_comm": False,
        # Without overlap, the interleaved schedule exchanges activations and gradients in one call, which first waits
        # for the shapes of both: with two stages it confuses their shapes, with more each stage waits for the next.
        "overlap_p2p_comm": plan.chunks > 1,
        # Micro-batches differ in shape, which megatron-core only allows with this dispatcher.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        **_mixture_fields(plan.map.mixture, config),
        **fused_kernels(device.type == "cuda"),
    }
    if plan.map.has_latent_attention:
        # Its kernel knows only YaRN.
        return MLATransformerConfig(**{**options, "apply_rope_fusion": False})
    return TransformerConfig(**options)


def _mixture_fields(mixture: Mixture | None, config: MegatronConfig) -> dict[str, Any]:
    from rollcast_megatron.module import has_transformer_engine

    if mixture is None:
        return {}
    return {
        "num_moe_experts": mixture.rule.experts,
        "moe_layer_freq": [int(has_experts) for has_experts in mixture.layers],
        "moe_router_topk": mixture.rule.top_k,
        "moe_router_pre_softmax": not mixture.rule.normalize,
        # The engine's own router balances the load, so that the loss does not depend on the micro-batches.
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.tensor_model_parallel_size,
        "moe_grouped_gemm": has_transformer_engine(),
    }


def fused_kernels(on_cuda: bool) -> dict[str, bool]:
    """Return which of megatron-core's fused kernels run: those whose extension is installed, on CUDA only."""
    from rollcast_megatron.module import has_transformer_engine

    return {
        # Compiled by megatron-core itself.
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        # Transformer Engine's kernel; megatron-core's own needs interleaved rotary embeddings.
        "apply_rope_fusion": on_cuda and has_transformer_engine(),
        # Apex's kernel, which adds a weight's gradient to the float32 buffer in place.
        "gradient_accumulation_fusion": on_cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        # Attention with these is replaced by Transformer Engine's, or by PyTorch's.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def _set_frequencies(module: DecoderModel, model: ModelMap) -> None:
    """Set the frequencies of a scaled rotary embedding as in transformers."""
    kind = model.rope["rope_type"]
    # Latent attention has its own embedding.
    if kind == "default" or model.has_latent_attention:
        return
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"the model's rotary embedding has rope_type={kind!r}; the megatron engine supports default, linear and "
            "llama3; use engine=fsdp"
        )
    factor = float(model.rope["factor"])
    frequencies = module.rotary_pos_emb.inv_freq
    if kind == "linear":
        module.rotary_pos_emb.inv_freq = frequencies / factor
    else:
        module.rotary_pos_emb.inv_freq = module.rotary_pos_emb._apply_scaling(
            frequencies,
            factor=factor,
            low_freq_factor=model.rope["low_freq_factor"],
            high_freq_factor=model.rope["high_freq_factor"],
            original_max_position_embeddings=model.rope["original_max_position_embeddings"],
        )


def _mark_split(plan: Plan, parameters: Mapping[str, Tensor]) -> None:
    """Mark the parameters that differ between tensor-parallel ranks; megatron-core needs the mark to sum norms.

    megatron-core sets the mark itself only for parameters that it initializes.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    unknown = set(parameters)
    for placed in plan.weights():
        if placed.stage != plan.mesh.pipeline_rank:
            continue
        name = find_name(placed, parameters)
        unknown.discard(name)
        parameter, dim = parameters[name], placed.weight.layout.dim
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
    if unknown:
        raise ConfigError(f"the model's map in rollcast.megatron_models leaves out {', '.join(sorted(unknown))}")


def find_name(placed: Placed, parameters: Mapping[str, Any]) -> str:
    """Return the one of a weight's names that the model has.

    Raises:
        ConfigError: the model has none of them.
    """
    for name in placed.names:
        if name in parameters:
            return name
    raise ConfigError(
        f"the model's map in rollcast.megatron_models names {' or '.join(placed.weight.names)}, which this model in "
        "megatron-core lacks"
    )
