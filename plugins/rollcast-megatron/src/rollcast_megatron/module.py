"""The model: megatron-core's decoder with a head that computes per-token quantities.

Axes: ``b`` rows, ``s`` positions, ``h`` hidden size, ``n`` chosen positions, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from rollcast_megatron.inputs import PackedRows, Positions
from rollcast_megatron.router import TapeRouter

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

__all__ = ["ChunkAdapter", "DecoderModel", "Head", "Stage", "block_spec", "has_transformer_engine"]


class Head(Protocol):
    """Function from the last stage's hidden states to per-token quantities by name."""

    def __call__(self, model: DecoderModel, hidden: Tensor) -> dict[str, Tensor]: ...


class ChunkAdapter(Protocol):
    """A chunk's matrices of a LoRA adapter, which hooks add to the outputs of its layers."""

    def disabled(self) -> AbstractContextManager[None]:
        """Use only the base model in forward passes during the block."""
        ...


class RmsNorm(nn.RMSNorm):
    """PyTorch's RMS norm with megatron-core's constructor, and its mark for sequence parallelism.

    Under sequence parallelism each rank normalizes its own positions, so the weight's gradients must be summed over the
    tensor-parallel ranks; megatron-core does that for parameters with the mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark: Any = self.weight
        mark.sequence_parallel = config.sequence_parallel


class CausalAttention(nn.Module):
    """Causal attention by PyTorch's ``scaled_dot_product_attention``, which keeps no score matrix.

    Rows start at position 0 and are padded at the end, so no token attends to padding and no padding mask is needed.
    Packed rows are attended one after the other. Context-parallel ranks gather the keys and values of all of them;
    see :class:`~rollcast_megatron.inputs.RowLayout` for the chunks that each has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout
        #: Factor of the scores; None for one over the square root of a query head's size.
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRows | None = None,
        **_unused: Any,
    ) -> Tensor:
        """Compute ``[s, b, heads * d]`` from ``[s, b, heads, d]``, or from ``[s, heads, d]`` of packed rows.

        Keys and values may have fewer heads, and values another ``d``.
        """
        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        ranks = self.context_group.size()
        lengths = (len(query),) if packed_seq_params is None else [n // ranks for n in packed_seq_params.lengths]
        if ranks > 1:
            key, value = self._gather(key, value)
        mixed, start = [], 0
        for length in lengths:
            own = slice(start, start + length)
            if ranks == 1:
                mixed.append(self._attend(query[own], key[own], value[own]))
            else:
                mixed += self._attend_chunks(query[own], key[:, own], value[:, own])
            start += length
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(2)

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of all context-parallel ranks, ``[ranks, s, b, heads, d]``, in one collective.

        Each rank has its own queries, so the gradients of a key and its value are summed over the ranks.
        """
        both = torch.cat([key, value], 3)
        whole = gather_from_sequence_parallel_region(both, group=self.context_group)
        return whole.view(-1, *both.shape).split([key.size(3), value.size(3)], 4)  # type: ignore[no-any-return]

    def _attend_chunks(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the attention of this rank's two chunks of a row, each over the row up to its end."""
        ranks, rank, size = self.context_group.size(), self.context_group.rank(), len(query) // 2
        key, value = _in_order(key), _in_order(value)
        mixed = []
        for chunk, own in ((rank, query[:size]), (2 * ranks - 1 - rank, query[size:])):
            seen = (chunk + 1) * size
            mixed.append(self._attend(own, key[:seen], value[:seen]))
        return mixed

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of queries, the last of which sees all keys, ``[s, b, heads, d]``."""
        dropout = self.dropout if self.training else 0.0
        mask, ahead = None, len(key) - len(query)
        if ahead:
            mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(ahead)
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            mixed = nn.functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return mixed.permute(2, 0, 1, 3)


def _in_order(gathered: Tensor) -> Tensor:
    """Return a row whose chunks were gathered by rank, ``[ranks, s, ...]``, in the order of its positions."""
    early, late = gathered.chunk(2, 1)
    return torch.cat([early.flatten(0, 1), late.flip(0).flatten(0, 1)])


def has_transformer_engine() -> bool:
    """Return True if layers are built with Transformer Engine: it is installed and CUDA is available."""
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return bool(HAVE_TE) and torch.cuda.is_available()


def block_spec(config: TransformerConfig, chunk: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the modules that the layers of this stage, or of one of several chunks, are built from."""
    if config.num_moe_experts is None and has_transformer_engine():
        return _te_layer(config, has_experts=False)
    build, norm = (_te_layer, TENorm) if has_transformer_engine() else (_local_layer, RmsNorm)
    first = get_transformer_layer_offset(config, chunk)
    layers = range(first, first + get_num_layers_to_build(config, chunk))
    frequencies = config.moe_layer_freq if config.num_moe_experts is not None else []
    kinds = {
        has_experts: build(config, has_experts)
        for has_experts in {bool(frequency) for frequency in frequencies} | {False}
    }
    specs = [kinds[bool(frequencies and frequencies[number])] for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _te_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm or config.multi_latent_attention,
        multi_latent_attention=config.multi_latent_attention,
    )
    if has_experts:
        spec.submodules.mlp.submodules.router = TapeRouter
    return spec


def _local_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm or config.multi_latent_attention,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    if has_experts:
        layer.mlp.submodules.router = TapeRouter
    layer.sharded_state_dict_keys_map = _fused_names(config.multi_latent_attention, has_experts)
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = RmsNorm
        # The module assumes Transformer Engine also where it is not installed.
        multi_latent_attention.HAVE_TE = False
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec


def _fused_names(has_latent_attention: bool, has_experts: bool) -> dict[str, str]:
    """Return the beginnings of norms' names → those in checkpoints, where Transformer Engine fuses them with a product.

    Checkpoints are then the same with and without the library. megatron-core maps those of layers without experts.
    """
    fused = {f"self_attention.{which}_layernorm.": f"self_attention.linear_{which}_up_proj" for which in ("q", "kv")}
    names = fused if has_latent_attention else {"input_layernorm.": "self_attention.linear_qkv"}
    if not has_experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1"
    return {norm: f"{product}.layer_norm_" for norm, product in names.items()}


class LatentProjection(nn.Linear):
    """The projection to a latent vector, whole on each tensor-parallel rank.

    megatron-core's own modules split it or hold it whole. With both, a rank has only the gradient of its own heads for
    the part that all heads share, the rotated keys, unless it is summed here.

    Args:
        config: config of the model.
        rows: rows of the projection.
        shared: number of its last rows whose outputs all heads use as they are.
        group: tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, rows: int, shared: int, group: Any) -> None:
        super().__init__(config.hidden_size, rows, bias=False, dtype=config.params_dtype)
        self.shared, self.group = shared, group
        # Under sequence parallelism megatron-core's gather sums the gradient.
        self.sums_shared = shared > 0 and not config.sequence_parallel
        mark: Any = self.weight
        mark.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return ``[s, b, rows]`` of ``[s, b, h]``, and None for the bias, as megatron-core's modules do."""
        latent = super().forward(hidden)
        if self.sums_shared:
            own, shared = torch.split(latent, [latent.size(-1) - self.shared, self.shared], -1)
            shared = copy_to_tensor_model_parallel_region(shared, group=self.group)
            if shared.requires_grad:
                # megatron-core sums a copy of a gradient that is not contiguous, and returns the gradient.
                shared.register_hook(torch.Tensor.contiguous)
            latent = torch.cat([own, shared], -1)
        return latent, None


def _replace_latent_projections(model: nn.Module) -> None:
    for attention in model.modules():
        if isinstance(attention, MLASelfAttention):
            config, group = attention.config, attention.pg_collection.tp
            shared = config.qk_pos_emb_head_dim
            attention.linear_kv_down_proj = LatentProjection(config, config.kv_lora_rank + shared, shared, group)
            if config.q_lora_rank is not None:
                attention.linear_q_down_proj = LatentProjection(config, config.q_lora_rank, 0, group)


class DecoderModel(GPTModel):  # type: ignore[misc]
    """A chunk of a decoder; the last one passes its hidden states to the :class:`Head` given as ``labels``.

    Args:
        is_value_model: use a linear ``score`` with one output as the head instead of the vocabulary's. It starts at
            zero and is whole on each rank.
        **options: arguments of ``GPTModel``.
    """

    def __init__(self, *, is_value_model: bool, **options: Any) -> None:
        super().__init__(**options)
        _replace_latent_projections(self)
        self.is_value_model = is_value_model
        #: Waits for a weight that is read outside its module's forward pass; None if weights are always complete.
        self.await_weight: Callable[[Tensor], None] | None = None
        #: This chunk's matrices of the LoRA adapter; None without one.
        self.adapter: ChunkAdapter | None = None
        if is_value_model and self.post_process:
            del self.output_layer
            self.score = nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)
            nn.init.zeros_(self.score.weight)
            nn.init.zeros_(self.score.bias)

    def _postprocess(self, hidden_states: Tensor, *, labels: Head, **_unused: Any) -> Any:
        return labels(self, hidden_states) if self.post_process else hidden_states

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return each tensor with its position in the whole model.

        A value model skips ``GPTModel``'s method, which would look for the vocabulary head.
        """
        if self.is_value_model:
            return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the vocabulary head, ``[V / tensor ranks, h]``."""
        weight: Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        if self.await_weight is not None:
            self.await_weight(weight)
        return weight

    def hidden_at(self, hidden: Tensor, positions: Positions) -> Tensor:
        """Return hidden states ``[s, b, h]`` at chosen positions, ``[n, h]``, for a head split over the vocabulary.

        Each rank's head contributes a part of their gradient; the parts are summed here.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)
        return hidden.flatten(0, 1)[positions.places]

    def values_at(self, hidden: Tensor, positions: Positions) -> Tensor:
        """Return values ``[n]`` of chosen positions, float32."""
        if self.config.sequence_parallel:
            # All ranks compute the same from here on, so their gradients are equal and must not be summed.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        values: Tensor = self.score(hidden.flatten(0, 1)[positions.places])
        return values.squeeze(-1).float()


class Stage(nn.Module):
    """A pipeline stage: one chunk of the decoder, or several in an interleaved schedule.

    Args:
        chunks: the chunks, which share one config; the model passes through other stages between them.
    """

    def __init__(self, chunks: Sequence[DecoderModel]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    @property
    def config(self) -> TransformerConfig:
        """Config of the chunks."""
        return self.last.config

    @property
    def last(self) -> DecoderModel:
        """The last chunk, which has the head in the last stage."""
        chunk: Any = self.chunks[-1]
        return chunk  # type: ignore[no-any-return]

    @property
    def adapters(self) -> list[ChunkAdapter]:
        """Matrices of the LoRA adapter, by chunk; empty without one."""
        chunks: Any = self.chunks
        return [chunk.adapter for chunk in chunks if chunk.adapter is not None]

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Use only the base model in forward passes during the block."""
        with ExitStack() as stack:
            for adapter in self.adapters:
                stack.enter_context(adapter.disabled())
            yield

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return each tensor, by its name in this module, with its position in the whole model."""
        chunks: Any = self.chunks
        return {
            f"chunks.{number}.{name}": entry
            for number, chunk in enumerate(chunks)
            for name, entry in chunk.sharded_state_dict(metadata=dict(metadata)).items()
        }
