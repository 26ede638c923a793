"""The maps of Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE and DeepSeek-V3.

All are decoders with RMS norms, rotary embeddings and gated MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollcast.errors import ConfigError
from rollcast_engine.routing import RoutingRule
from rollcast_megatron.maps import FusedQkv, FusedRows, Mixture, ModelMap, Split, Weight

__all__ = ["decoder_map", "deepseek_v3", "glm4_moe", "llama", "qwen2", "qwen3", "qwen3_moe"]

_ROWS, _COLUMNS = Split(dim=0), Split(dim=1)


def llama(config: Any) -> ModelMap:
    """Return the map of ``LlamaForCausalLM``, such as Llama 2 and 3."""
    refuse(config, attention_bias=False, mlp_bias=False)
    return decoder_map(config)


def qwen2(config: Any) -> ModelMap:
    """Return the map of ``Qwen2ForCausalLM``, such as Qwen2.5: biases on queries, keys and values."""
    refuse(config, use_sliding_window=False)
    return decoder_map(config, qkv_bias=True)


def qwen3(config: Any) -> ModelMap:
    """Return the map of ``Qwen3ForCausalLM``: norms on the heads of queries and keys."""
    refuse(config, use_sliding_window=False, attention_bias=False)
    return decoder_map(config, qk_norm=True)


def qwen3_moe(config: Any) -> ModelMap:
    """Return the map of ``Qwen3MoeForCausalLM``: Qwen3 with experts in all layers, or in some."""
    refuse(config, use_sliding_window=False, attention_bias=False)
    dense = decoder_map(config, qk_norm=True)
    layers = [
        number not in config.mlp_only_layers and (number + 1) % config.decoder_sparse_step == 0
        for number in range(config.num_hidden_layers)
    ]
    rule = RoutingRule(config.num_experts, config.num_experts_per_tok, bool(config.norm_topk_prob))
    return _with_experts(dense, config, rule, layers)


def glm4_moe(config: Any) -> ModelMap:
    """Return the map of ``Glm4MoeForCausalLM``, such as GLM-4.5: routers with sigmoids, and experts for every token."""
    dense = decoder_map(config, qkv_bias=bool(config.attention_bias), qk_norm=bool(config.use_qk_norm))
    layers = [number >= config.first_k_dense_replace for number in range(config.num_hidden_layers)]
    return _with_experts(dense, config, sigmoid_rule(config), layers, shared=config.n_shared_experts)


def deepseek_v3(config: Any) -> ModelMap:
    """Return the map of ``DeepseekV3ForCausalLM``: latent attention, and experts as in GLM-4-MoE."""
    refuse(config, attention_bias=False, rope_interleave=True, num_key_value_heads=config.num_attention_heads)
    decoder = decoder_map(config)
    attention = "model.layers.{layer}.self_attn."
    queries, keys = (f"self_attention.linear_{which}_" for which in ("q", "kv"))
    weights = [
        Weight(("input_layernorm.weight",), ("model.layers.{layer}.input_layernorm.weight",)),
        *(weight for weight in decoder.layer if "linear_qkv" not in weight.names[-1]),
        Weight((f"{keys}down_proj.weight",), (f"{attention}kv_a_proj_with_mqa.weight",)),
        _latent_norm("kv", f"{attention}kv_a_layernorm.weight"),
        Weight((f"{keys}up_proj.weight",), (f"{attention}kv_b_proj.weight",), _ROWS),
    ]
    if config.q_lora_rank is None:
        weights.append(Weight((f"{queries}proj.weight",), (f"{attention}q_proj.weight",), _ROWS))
    else:
        weights += [
            Weight((f"{queries}down_proj.weight",), (f"{attention}q_a_proj.weight",)),
            _latent_norm("q", f"{attention}q_a_layernorm.weight"),
            Weight((f"{queries}up_proj.weight",), (f"{attention}q_b_proj.weight",), _ROWS),
        ]
    fields = {**decoder.transformer, **_latent_attention(config, decoder.rope)}
    latent = replace(decoder, transformer=fields, layer=weights)
    layers = [number >= config.first_k_dense_replace for number in range(config.num_hidden_layers)]
    return _with_experts(latent, config, sigmoid_rule(config), layers, shared=config.n_shared_experts)


def _latent_norm(which: str, source: str) -> Weight:
    """Return the norm before the projection from latent queries or keys, which Transformer Engine does in one."""
    names = f"self_attention.{which}_layernorm.weight", f"self_attention.linear_{which}_up_proj.layer_norm_weight"
    return Weight(names, (source,))


def _latent_attention(config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``MLATransformerConfig`` that other models lack.

    Raises:
        ConfigError: the rotary embedding is scaled in another way than by YaRN, or with options that would be ignored.
    """
    kind = rope["rope_type"]
    fields = {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_channels": config.v_head_dim,
        # True would sum the gradients of the norms over tensor-parallel ranks, which have each of them whole.
        "qk_layernorm": False,
        "rotary_base": rope["rope_theta"],
    }
    if kind == "default":
        # With another factor than 1, megatron-core would scale the scores as with YaRN.
        return {**fields, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    if kind != "yarn":
        raise ConfigError(
            f"the model's rotary embedding has rope_type={kind!r}; with latent attention, the megatron engine supports "
            "default and yarn; use engine=fsdp"
        )
    for name, value in (("attention_factor", None), ("truncate", True)):
        if rope.get(name, value) != value:
            raise ConfigError(
                f"the model's rotary embedding has {name}={rope[name]!r}; with latent attention, the megatron engine "
                "supports YaRN without it; use engine=fsdp"
            )
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    both = rope.get("mscale") and rope.get("mscale_all_dim")
    return {
        **fields,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        # As in transformers, one without the other does not scale the embedding; None has megatron-core's default.
        "mscale": rope["mscale"] if both else None,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def sigmoid_rule(config: Any) -> RoutingRule:
    """Return the rule of DeepSeek-V3's routers by the fields of a transformers config."""
    return RoutingRule(
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        normalize=bool(config.norm_topk_prob),
        sigmoid=True,
        groups=config.n_group,
        top_groups=config.topk_group,
        factor=float(config.routed_scaling_factor),
    )


def _with_experts(dense: ModelMap, config: Any, rule: RoutingRule, layers: Sequence[bool], shared: int = 0) -> ModelMap:
    """Return the map of a dense model with experts in some layers.

    Args:
        dense: map of the model without experts.
        config: transformers config of the model.
        rule: rule of the routers.
        layers: for each layer, True if it has experts.
        shared: number of experts that every token visits, which are one network of that many times the width.
    """
    if not any(layers):
        return dense
    mlp = "model.layers.{layer}.mlp."
    weights = [weight for weight in dense.layer if not weight.names[0].startswith("mlp.")]
    weights.append(Weight(("mlp.router.weight",), (f"{mlp}gate.weight",)))
    fields: dict[str, Any] = {**dense.transformer, "moe_ffn_hidden_size": config.moe_intermediate_size}
    if rule.sigmoid:
        fields["moe_router_score_function"] = "sigmoid"
        bias = f"{mlp}gate.e_score_correction_bias"
        weights.append(Weight(("mlp.router.expert_bias",), (bias,), dtype=torch.float32))
    if shared:
        fields["moe_shared_expert_intermediate_size"] = shared * config.moe_intermediate_size
        gate_and_up = f"{mlp}shared_experts.gate_proj.weight", f"{mlp}shared_experts.up_proj.weight"
        down = f"{mlp}shared_experts.down_proj.weight"
        weights.append(Weight(("mlp.shared_experts.linear_fc1.weight",), gate_and_up, FusedRows()))
        weights.append(Weight(("mlp.shared_experts.linear_fc2.weight",), (down,), _COLUMNS))
    mixture = Mixture(rule, layers, weights, _expert(f"{mlp}experts.{{expert}}."))
    return replace(dense, transformer=fields, mixture=mixture)


def _expert(prefix: str) -> list[Weight]:
    """Return the parameters of a gated expert, one module each or one grouped product for all."""
    local, grouped = "mlp.experts.local_experts.{expert}.", "mlp.experts."
    gate_and_up = f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"
    return [
        Weight((f"{local}linear_fc1.weight", f"{grouped}linear_fc1.weight{{expert}}"), gate_and_up, FusedRows()),
        Weight(
            (f"{local}linear_fc2.weight", f"{grouped}linear_fc2.weight{{expert}}"),
            (f"{prefix}down_proj.weight",),
            _COLUMNS,
        ),
    ]


def refuse(config: Any, **expected: Any) -> None:
    """Check that fields of a config have the values that a map assumes.

    Raises:
        ConfigError: a field has another value; the message names the field and both values.
    """
    for name, value in expected.items():
        actual = getattr(config, name, value)
        if actual != value:
            raise ConfigError(
                f"the model's config.json has {name}={actual!r}; the map of {config.model_type!r} for the megatron "
                f"engine supports only {value!r}; use engine=fsdp"
            )


def decoder_map(config: Any, qkv_bias: bool = False, qk_norm: bool = False) -> ModelMap:
    """Return the map of a decoder with transformers' usual names and the fields of a Llama config.

    Args:
        config: transformers config of the model.
        qkv_bias: True if query, key and value projections have biases.
        qk_norm: True if each head of queries and keys goes through an RMS norm.

    Raises:
        ConfigError: the activation is not SiLU.
    """
    refuse(config, hidden_act="silu")
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "init_method_std": getattr(config, "initializer_range", 0.02),
    }
    return ModelMap(
        transformer=transformer,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
        rope=_rope(config),
        layer=_layer(FusedQkv(heads, groups, head_dim), qkv_bias, qk_norm),
    )


def _layer(qkv: FusedQkv, qkv_bias: bool, qk_norm: bool) -> list[Weight]:
    layer, attention = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
    projections = [f"{attention}{which}_proj" for which in "qkv"]
    weights = [
        Weight(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            (f"{layer}input_layernorm.weight",),
        ),
        Weight(("self_attention.linear_qkv.weight",), tuple(f"{name}.weight" for name in projections), qkv),
        Weight(("self_attention.linear_proj.weight",), (f"{attention}o_proj.weight",), _COLUMNS),
        Weight(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            (f"{layer}post_attention_layernorm.weight",),
        ),
        Weight(("mlp.linear_fc1.weight",), (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"), FusedRows()),
        Weight(("mlp.linear_fc2.weight",), (f"{layer}mlp.down_proj.weight",), _COLUMNS),
    ]
    if qkv_bias:
        weights.append(Weight(("self_attention.linear_qkv.bias",), tuple(f"{name}.bias" for name in projections), qkv))
    if qk_norm:
        weights += [
            Weight((f"self_attention.{which}_layernorm.weight",), (f"{attention}{which}_norm.weight",))
            for which in "qk"
        ]
    return weights


def _rope(config: Any) -> dict[str, Any]:
    """Return the rotary parameters: ``rope_parameters`` in transformers 5, ``rope_theta`` and ``rope_scaling`` in 4."""
    rope_options = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope = dict(rope_options)
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    return rope
