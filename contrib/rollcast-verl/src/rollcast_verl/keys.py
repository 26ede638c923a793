"""The table of verl's configuration keys: the key of rollcast for each, or the reason why there is none.

A key of verl is looked up by its whole name, then by the longest prefix that ends with ``.*``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["RULES", "Outcome", "Rule", "find_rule"]

Outcome = Literal["same", "translated", "none"]
#: A function of the value and of all keys of verl that returns overrides of rollcast: key → value.
Translate = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Rule:
    """Translation of a key of verl.

    Attributes:
        theirs: verl's key; ``.*`` at its end stands for all keys below.
        ours: rollcast's key or option; empty if there is none.
        note: the difference, or the reason why there is no counterpart.
        translate: function that makes the overrides; None to copy the value.
        leaves_out: value of verl that needs no override, such as null for "not set".
    """

    theirs: str
    ours: str = ""
    note: str = ""
    translate: Translate | None = None
    leaves_out: tuple[Any, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """``same`` if the last part of the name and the value stay, ``translated``, or ``none``."""
        if not self.ours:
            return "none"
        leaf = self.theirs.rpartition(".")[2] == self.ours.rpartition(".")[2]
        return "same" if leaf and self.translate is None else "translated"


def _copied(prefix: str, ours: str, *names: str, leaves_out: tuple[Any, ...] = ()) -> list[Rule]:
    return [Rule(f"{prefix}.{name}", f"{ours}.{name}", leaves_out=leaves_out) for name in names]


def _none(note: str, *keys: str) -> list[Rule]:
    return [Rule(key, note=note) for key in keys]


def _choose(group: str, names: Mapping[str, str]) -> Translate:
    """Return a function that chooses an option of a group."""

    def translate(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {group: names.get(str(value), str(value))}

    return translate


def _rename(key: str, names: Mapping[Any, Any]) -> Translate:
    """Return a function that sets ``key`` to a renamed value; values that are not in ``names`` stay."""

    def translate(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
        known = isinstance(value, str | int | float | bool | type(None)) and value in names
        return {key: names[value] if known else value}

    return translate


def _list(key: str) -> Translate:
    """Return a function that sets ``key`` to a list of paths."""

    def translate(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: [value] if isinstance(value, str) else list(value)}

    return translate


def _estimator(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    # The vectorized forms compute the same; rollcast has one form.
    name = str(value).removesuffix("_vectorized")
    known = (
        *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "reinforce_plus_plus"),
        *("reinforce_plus_plus_baseline", "remax", "rloo", "tir_optimal_token_baseline"),
    )
    return {"algorithm": name} if name in known else {"algorithm.adv_estimator": f"verl_{value}"}


#: Options of each policy loss, which verl has beside each other.
_LOSS_OPTIONS = {
    "clip_cov_ratio": "clip_cov",
    "clip_cov_lb": "clip_cov",
    "clip_cov_ub": "clip_cov",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "dro_beta": "dro",
    "tau_pos": "sapo",
    "tau_neg": "sapo",
}


def _loss(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    known = (
        *("cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo", "vanilla"),
    )
    if value == "bypass_mode":
        return {"algorithm.rollout_correction.bypass_mode": True}
    return {"actor.policy_loss": value if value in known else f"verl_{value}"}


def _loss_option(name: str) -> Translate:
    def translate(value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen = keys.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
        return {f"actor.policy_loss_kwargs.{name}": value} if _LOSS_OPTIONS[name] == chosen else {}

    return translate


def _clip(value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = {}
    for side in ("low", "high"):
        if f"actor_rollout_ref.actor.clip_ratio_{side}" not in keys:
            fields[f"actor.clip_ratio_{side}"] = value
    return fields


def _trackers(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    wanted = [value] if isinstance(value, str) else list(value or ())
    known = ("console", "wandb", "tensorboard", "mlflow", "swanlab", "trackio", "clearml")
    renamed = {"file": "jsonl"}
    return {"trackers": [renamed.get(name, name) for name in wanted if name in known or name in renamed]}


def _reward_function(value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    prefix = next(p for p in ("reward.custom_reward_function", "custom_reward_function") if keys.get(f"{p}.path"))
    name = keys.get(f"{prefix}.name") or "compute_score"
    return {"reward": "function", "reward.reward_kwargs.path": f"{value}:{name}"}


def _no_function(_value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _reward_manager(value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    if value in ("naive", "batch"):
        return {}  # the reward's own, which for a user's function is prime
    known = ("dapo", "prime", "remote")
    chosen = {"reward.reward_manager": value if value in known else f"verl_loop_{value}"}
    is_users = any(keys.get(f"{prefix}custom_reward_function.path") for prefix in ("", "reward."))
    return {**chosen, "reward.reward_manager_kwargs.inner": "prime"} if value == "dapo" and is_users else chosen


def _overlong(name: str) -> Translate:
    def translate(value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        if keys.get("reward.reward_manager.name", keys.get("reward_model.reward_manager")) != "dapo":
            return {}
        prefix = "reward.reward_kwargs.overlong_buffer_cfg"
        enabled = keys.get(f"{prefix}.enable", keys.get("reward_model.overlong_buffer.enable"))
        return {f"reward.reward_manager_kwargs.overlong_buffer.{name}": value} if enabled else {}

    return translate


def _if_multi_turn(name: str) -> Translate:
    def translate(value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"agent.{name}": value} if keys.get("actor_rollout_ref.rollout.multi_turn.enable") else {}

    return translate


_PENALTIES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_ENGINES = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
_A, _R, _M, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

_OPTIM = (
    *("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "min_lr_ratio", "total_training_steps"),
    *("betas", "weight_decay"),
)
_FSDP = (
    *("param_offload", "optimizer_offload", "reshard_after_forward", "fsdp_size", "forward_prefetch", "model_dtype"),
    *("ulysses_sequence_parallel_size", "use_torch_compile", "offload_policy"),
)
_PADDING = "rollcast pads only where arithmetic needs it; batches are jagged, so there is nothing to choose"
_ENTROPY = (
    "the entropy is computed in chunks without a key; `use_fused_kernels` of the engine computes it from hidden states"
)
_PER_RANK = "verl marks this key as deprecated; use the one that ends in _per_gpu"
_MODEL_BY_ENGINE = {
    "enable_gradient_checkpointing": "a key of the engine here",
    "enable_activation_offload": "a key of the engine here",
    "use_remove_padding": "a key of the engine here",
    "use_fused_kernels": "a key of the engine here",
}


def _actor() -> list[Rule]:
    same = (
        *("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
        *("ppo_epochs", "shuffle", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode"),
        *("entropy_coeff", "use_kl_loss", "kl_loss_coef"),
    )
    return [
        *_copied(_A, "actor", *same),
        Rule(f"{_A}.strategy", "engine", "option of the group; FSDP is FSDP2", _choose("engine", _ENGINES)),
        Rule(f"{_A}.clip_ratio", "actor.clip_ratio_low", "also `clip_ratio_high`, where verl's own is not set", _clip),
        Rule(
            f"{_A}.kl_loss_type",
            "actor.kl_loss_type",
            "kl → k1, mse → k2, low_var_kl → k3",
            _rename("actor.kl_loss_type", _PENALTIES),
        ),
        Rule(f"{_A}.policy_loss.loss_mode", "actor.policy_loss", "a loss of your own: `verl_<name>`", _loss),
        *(
            Rule(
                f"{_A}.{'' if name.startswith('tau') else 'policy_loss.'}{name}",
                f"actor.policy_loss_kwargs.{name}",
                f"only with the loss {loss}",
                _loss_option(name),
                (None,),
            )
            for name, loss in _LOSS_OPTIONS.items()
        ),
        Rule(f"{_A}.grad_clip", "actor.optim.clip_grad", "one key for all engines"),
        Rule(f"{_A}.optim.clip_grad", note="verl reads `actor.grad_clip`, which is translated"),
        *_copied(f"{_A}.optim", "actor.optim", *_OPTIM),
        Rule(
            f"{_A}.optim.optimizer",
            "actor.optim.optimizer",
            "name in lower case",
            lambda v, _: {"actor.optim.optimizer": str(v).lower()},
        ),
        Rule(f"{_A}.checkpoint.async_save", "trainer.async_save", "of the whole run"),
        *_copied(f"{_A}.fsdp_config", "actor.engine", *_FSDP),
        Rule(
            f"{_A}.ulysses_sequence_parallel_size",
            "actor.engine.ulysses_sequence_parallel_size",
            "a key of the engine here",
        ),
        *_none("rollcast counts rows by itself", f"{_A}.rollout_n"),
        *_none(_PER_RANK, f"{_A}.ppo_micro_batch_size"),
        *_none(
            "`seq-mean-token-sum-norm` divides by `data.max_response_length`; another constant is a plugin",
            f"{_A}.loss_scale_factor",
        ),
        *_none("compiling is a key of the engine (`actor.engine.use_torch_compile`)", f"{_A}.use_torch_compile"),
        *_none(
            "metrics of the entropy and columns such as `sum_pi_squared` are computed if something reads them",
            f"{_A}.calculate_entropy",
            f"{_A}.calculate_sum_pi_squared",
        ),
        *_none(
            "`actor.engine.share_prompts` of the engine does this; it is off unless you set it",
            f"{_A}.use_prefix_grouper",
        ),
        *_none(
            "all random numbers follow `trainer.seed`",
            f"{_A}.data_loader_seed",
            f"{_A}.fsdp_config.seed",
            f"{_A}.fsdp_config.full_determinism",
        ),
        *_none("checkpoints hold everything; `trainer.export` also writes a Hugging Face folder", f"{_A}.checkpoint.*"),
        *_none(
            _ENTROPY,
            f"{_A}.entropy_from_logits_with_chunking",
            f"{_A}.entropy_from_logits_chunk_size",
            f"{_A}.entropy_checkpointing",
        ),
        *_none("follows the model's key, as in verl", f"{_A}.use_fused_kernels", f"{_A}.use_remove_padding"),
        *_none(_PADDING, f"{_A}.pad_to_length"),
        *_none("training with quantized weights is not there", f"{_A}.qat.*", f"{_A}.fsdp_config.qat.*"),
        *_none("the whole model is trained, with its vision tower", f"{_A}.freeze_vision_tower"),
        *_copied(f"{_A}.router_replay", "actor.router_replay", "mode"),
        *_none("choices are columns of the batch, not files", f"{_A}.router_replay.*"),
        *_none("the engine decides", f"{_A}.fsdp_config.*"),
        *_none("not a key of rollcast's optimizers; options go into `actor.optim.optimizer_kwargs`", f"{_A}.optim.*"),
        *_none("profiling has one section for all roles, `profiler`", f"{_A}.profiler.*"),
        *_none(
            "Megatron's keys are in `actor.engine` with engine=megatron; see docs/engine-megatron.md",
            f"{_A}.megatron.*",
        ),
    ]


def _rollout() -> list[Rule]:
    same = (
        *(
            "n",
            "temperature",
            "top_k",
            "top_p",
            "ignore_eos",
            "enable_rollout_routing_replay",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "data_parallel_size",
            "expert_parallel_size",
            "gpu_memory_utilization",
        ),
        *("enforce_eager", "free_cache_engine", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("enable_prefix_caching", "dtype", "load_format", "repetition_penalty", "quantization"),
    )
    same_file = "same file format; "
    turns = {
        **dict.fromkeys(("max_assistant_turns", "max_tool_response_length", "max_parallel_calls", "format"), ""),
        **dict.fromkeys(("tool_config_path", "interaction_config_path"), same_file),
    }
    engines = {"vllm": "vllm", "sglang": "sglang", "hf": "hf", "trtllm": "trtllm"}
    return [
        Rule(f"{_R}.name", "rollout", "option of the group", _choose("rollout", engines)),
        Rule(
            f"{_R}.mode",
            note="every rollout is asynchronous; `rollout.mode` says where it runs (hybrid, colocated, standalone)",
        ),
        *_copied(_R, "rollout", *same, leaves_out=(None,)),
        *_copied(f"{_R}.val_kwargs", "rollout.val_kwargs", "n", "temperature", "top_k", "top_p"),
        *_none("temperature 0 is greedy", f"{_R}.do_sample", f"{_R}.val_kwargs.do_sample"),
        Rule(
            f"{_R}.log_prob_micro_batch_size_per_gpu",
            "actor.log_prob_micro_batch_size_per_gpu",
            "a key of the actor here",
        ),
        Rule(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", "rollout.update_weights_bucket_megabytes"),
        *(
            Rule(
                f"{_R}.multi_turn.{name}",
                f"agent.{name}",
                f"{note}with multi_turn.enable",
                _if_multi_turn(name),
                (None,),
            )
            for name, note in turns.items()
        ),
        Rule(f"{_R}.multi_turn.enable", "agent.loop", "true → tool", lambda v, _: {"agent.loop": "tool"} if v else {}),
        *_none(
            "verl's lengths repeat `data.max_prompt_length` and `data.max_response_length`",
            f"{_R}.prompt_length",
            f"{_R}.response_length",
        ),
        *_none(_PER_RANK, f"{_R}.log_prob_micro_batch_size"),
        *_none(
            "log-probs are computed with the actor's dynamic batch keys",
            f"{_R}.log_prob_use_dynamic_bsz",
            f"{_R}.log_prob_max_token_len_per_gpu",
        ),
        *_none("all random numbers follow `trainer.seed`", f"{_R}.seed", f"{_R}.full_determinism"),
        *_none(
            "rollouts always return the log-probs that they sampled with",
            f"{_R}.calculate_log_probs",
            f"{_R}.logprobs_mode",
        ),
        *_none(
            "standalone rollouts get a pool: placement.pools and placement.mapping",
            f"{_R}.nnodes",
            f"{_R}.n_gpus_per_node",
        ),
        *_none(
            "another option of the engine: `rollout.engine_kwargs.<name>`",
            f"{_R}.enable_chunked_prefill",
            f"{_R}.cudagraph_capture_sizes",
            f"{_R}.scheduling_policy",
            f"{_R}.disable_log_stats",
            f"{_R}.quantization_config_file",
            f"{_R}.engine_kwargs.*",
            f"{_R}.limit_images",
        ),
        *_none(
            "weights are sent in buckets, each attested; there is nothing to choose",
            f"{_R}.layered_summon",
            f"{_R}.multi_stage_wake_up",
            f"{_R}.checkpoint_engine.*",
            f"{_R}.skip_tokenizer_init",
        ),
        *_none("slow samples: rollout.stragglers.share and grace_s", f"{_R}.over_sample_rate"),
        *_none("turns and tools are keys of `agent`; this one has no counterpart", f"{_R}.multi_turn.*"),
        *_none("agent loops are plugins, chosen with `agent.loop`; see docs/agents.md", f"{_R}.agent.*"),
        *_none("trackers and `agent.save_trajectories` record rollouts", f"{_R}.trace.*", f"{_R}.prometheus.*"),
        *_none(
            "not there",
            f"{_R}.moe_load_balance_metrics_interval",
            f"{_R}.mtp",
            f"{_R}.mtp.*",
            f"{_R}.qat",
            f"{_R}.qat.*",
            f"{_R}.disaggregation.*",
            f"{_R}.router_config_path",
        ),
        *_none("profiling has one section for all roles, `profiler`", f"{_R}.profiler.*"),
    ]


def _model(theirs: str, ours: str, engine: str) -> list[Rule]:
    names = (
        ("path",)
        if ours != "model"
        else (
            "path",
            "trust_remote_code",
            "lora_rank",
            "lora_alpha",
            "target_modules",
            "lora_adapter_path",
            "use_liger",
            "use_shm",
        )
    )
    here = "" if ours == "model" else "the critic takes it from `model`"
    return [
        *_copied(theirs, ours, *names, leaves_out=(None,)),
        *(Rule(f"{theirs}.{name}", f"{engine}.{name}", note) for name, note in _MODEL_BY_ENGINE.items()),
        *(
            _none(
                here,
                f"{theirs}.trust_remote_code",
                f"{theirs}.lora_rank",
                f"{theirs}.lora_alpha",
                f"{theirs}.target_modules",
                f"{theirs}.lora_adapter_path",
                f"{theirs}.use_liger",
                f"{theirs}.use_shm",
            )
            if here
            else ()
        ),
        *_none(
            "the folder of `path` holds config, tokenizer and template",
            f"{theirs}.hf_config_path",
            f"{theirs}.tokenizer_path",
            f"{theirs}.custom_chat_template",
        ),
        *(
            _none(
                "`model.override_config` is for the critic too, unless it has a folder of its own",
                f"{theirs}.override_config",
                f"{theirs}.override_config.*",
            )
            if here
            else (
                Rule(f"{theirs}.override_config.attn_implementation", "model.attn_implementation"),
                *_none("the engine's own keys", f"{theirs}.override_config.moe_config.*"),
                Rule(f"{theirs}.override_config.model_config.*", "model.override_config.*"),
                Rule(f"{theirs}.override_config", "model.override_config", leaves_out=(None, {})),
                Rule(f"{theirs}.override_config.*", "model.override_config.*"),
            )
        ),
        *_none("plugins register by entry points", f"{theirs}.external_lib"),
        *_none("the keys `lora_*` of the model", f"{theirs}.lora.*", f"{theirs}.exclude_modules"),
        *_none("not there", f"{theirs}.tiled_mlp.*", f"{theirs}.mtp.*", f"{theirs}.fused_kernel_options.*"),
    ]


def _reference() -> list[Rule]:
    return [
        *_copied(f"{_REF}.fsdp_config", "ref.engine", "param_offload"),
        *_none(
            "the reference has the actor's engine; override single keys in `ref.engine`",
            f"{_REF}.fsdp_config.*",
            f"{_REF}.strategy",
            f"{_REF}.use_torch_compile",
            f"{_REF}.ulysses_sequence_parallel_size",
            f"{_REF}.megatron.*",
        ),
        *_none(
            "log-probs of the reference use the actor's micro-batch keys",
            f"{_REF}.log_prob_micro_batch_size_per_gpu",
            f"{_REF}.log_prob_micro_batch_size",
            f"{_REF}.log_prob_use_dynamic_bsz",
            f"{_REF}.log_prob_max_token_len_per_gpu",
            f"{_REF}.rollout_n",
        ),
        *_none(
            _ENTROPY,
            f"{_REF}.entropy_from_logits_with_chunking",
            f"{_REF}.entropy_from_logits_chunk_size",
            f"{_REF}.entropy_checkpointing",
        ),
        *_none(_PADDING, f"{_REF}.pad_to_length"),
        *_none("profiling has one section for all roles, `profiler`", f"{_REF}.profiler.*"),
        *_none("the reference routes freely", f"{_REF}.router_replay.*"),
        *_none("`runtime.call_timeout_s` limits calls", "actor_rollout_ref.nccl_timeout"),
        *_none("`rollout.mode=hybrid` is the default", "actor_rollout_ref.hybrid_engine"),
    ]


def _critic() -> list[Rule]:
    same = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs", "cliprange_value", "loss_agg_mode")
    return [
        *_copied("critic", "critic", *same, leaves_out=(None,)),
        *_copied("critic.optim", "critic.optim", *_OPTIM),
        Rule(
            "critic.optim.optimizer",
            "critic.optim.optimizer",
            "name in lower case",
            lambda v, _: {"critic.optim.optimizer": str(v).lower()},
        ),
        Rule("critic.grad_clip", "critic.optim.clip_grad", "one key for all engines"),
        Rule("critic.optim.clip_grad", note="verl reads `critic.grad_clip`, which is translated"),
        *_copied("critic.fsdp", "critic.engine", "param_offload", "optimizer_offload", "offload_policy"),
        *_none(
            "the critic has the actor's engine; override single keys in `critic.engine`",
            "critic.strategy",
            "critic.fsdp.*",
            "critic.ulysses_sequence_parallel_size",
            "critic.megatron.*",
        ),
        *_none("a critic is there if the estimator reads values", "critic.enable"),
        *_none("rollcast counts rows by itself", "critic.rollout_n"),
        *_none(_PER_RANK, "critic.ppo_micro_batch_size", "critic.forward_micro_batch_size"),
        *_none(
            "values are computed with `ppo_micro_batch_size_per_gpu`",
            "critic.forward_micro_batch_size_per_gpu",
            "critic.forward_max_token_len_per_gpu",
        ),
        *_none(
            "dynamic batches are a key of the actor, used for the critic too",
            "critic.use_dynamic_bsz",
            "critic.ppo_max_token_len_per_gpu",
        ),
        *_none("the actor's key, used for the critic too", "critic.shuffle"),
        *_none("all random numbers follow `trainer.seed`", "critic.data_loader_seed"),
        *_none("a loss aggregation that takes a constant is a plugin here", "critic.loss_scale_factor"),
        *_none("checkpoints hold everything", "critic.checkpoint.*"),
        *_none("not a key of rollcast's optimizers; options go into `critic.optim.optimizer_kwargs`", "critic.optim.*"),
        *_none("profiling has one section for all roles, `profiler`", "critic.profiler.*"),
    ]


def _data() -> list[Rule]:
    same = (
        *("prompt_key", "image_key", "max_prompt_length", "max_response_length", "train_batch_size"),
        *("val_batch_size", "val_max_samples", "shuffle", "filter_overlong_prompts", "truncation"),
    )
    return [
        Rule("data.train_files", "data.train_files", "always a list", _list("data.train_files"), (None,)),
        Rule("data.val_files", "data.val_files", "always a list", _list("data.val_files"), (None,)),
        *_copied("data", "data", *same, leaves_out=(None,)),
        Rule("data.reward_fn_key", "data.data_source_key", "column that names the source of a row"),
        Rule("data.dataloader_num_workers", "data.num_workers"),
        Rule(
            "data.gen_batch_size",
            note="a step samples what it trains on; `algorithm.filter_groups` samples more by itself",
        ),
        Rule("data.train_max_samples", note="use a shorter file; `data.val_max_samples` is there"),
        *_none("all random numbers follow `trainer.seed`", "data.seed"),
        *_none(
            "a dataset of your own is a plugin (`data.dataset`)",
            "data.custom_cls.*",
            "data.sampler.*",
            "data.datagen.*",
        ),
        Rule("data.tool_config_path", "agent.tool_config_path", leaves_out=(None,)),
        *_none("tools are keys of `agent`: `agent.tools`", "data.function_tool_path"),
        *_none("rows keep all columns", "data.return_raw_input_ids", "data.return_raw_chat", "data.return_full_prompt"),
        *_none("the tokenizer is the model folder's", "data.tokenizer", "data.trust_remote_code"),
        *_none("data files are read from where they are; `model.use_shm` is there", "data.use_shm"),
        *_none("validation keeps the order of the file", "data.validation_shuffle"),
        *_none("prompts are filtered while they are read", "data.filter_overlong_prompts_workers"),
        *_none(
            "images are the only other modality, with the folder's processor",
            "data.video_key",
            "data.audio_key",
            "data.image_patch_size",
            "data.return_multi_modal_inputs",
            "data.mm_processor_kwargs",
            "data.mm_processor_kwargs.*",
        ),
        Rule("data.apply_chat_template_kwargs", "data.apply_chat_template_kwargs", leaves_out=(None, {})),
        Rule("data.apply_chat_template_kwargs.*", "data.apply_chat_template_kwargs.*"),
    ]


def _algorithm() -> list[Rule]:
    correction = (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
        "bypass_mode",
    )
    metrics = {"reward": "score", "seq_reward": "score", "seq_final_reward": "shaped_score", "acc": "accuracy"}
    return [
        Rule(
            "algorithm.adv_estimator",
            "algorithm",
            "option of the group; an estimator of your own: algorithm.adv_estimator=verl_<name>",
            _estimator,
        ),
        *_copied("algorithm", "algorithm", "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward"),
        Rule(
            "algorithm.kl_penalty",
            "algorithm.kl_penalty",
            "kl → k1, mse → k2, low_var_kl → k3",
            _rename("algorithm.kl_penalty", _PENALTIES),
        ),
        Rule("algorithm.kl_ctrl.type", "algorithm.kl_controller"),
        *(Rule(f"algorithm.kl_ctrl.{name}", f"algorithm.{name}") for name in ("kl_coef", "horizon", "target_kl")),
        *_copied("algorithm.rollout_correction", "algorithm.rollout_correction", *correction),
        Rule("algorithm.rollout_correction.loss_type", note="the loss of bypass mode is `actor.policy_loss`"),
        *_copied("algorithm.filter_groups", "algorithm.filter_groups", "enable"),
        Rule(
            "algorithm.filter_groups.metric",
            "algorithm.filter_groups.metric",
            "reward → score, acc → accuracy",
            _rename("algorithm.filter_groups.metric", metrics),
            (None,),
        ),
        Rule(
            "algorithm.filter_groups.max_num_gen_batches",
            "algorithm.filter_groups.max_num_gen_batches",
            "rollcast always has a limit; verl's 0 (none) leaves its default",
            leaves_out=(0,),
        ),
        Rule(
            "algorithm.filter_groups.max_inflight_gen_batches", note="batches in flight follow `trainer.max_staleness`"
        ),
        *_none("not there", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*"),
        *(
            Rule(f"algorithm.{name}", f"algorithm.adv_kwargs.{name}", leaves_out=(None,))
            for name in ("gdpo_reward_keys", "gdpo_reward_weights")
        ),
    ]


def _reward() -> list[Rule]:
    both = [
        ("reward.custom_reward_function", "reward.reward_manager.name"),
        ("custom_reward_function", "reward_model.reward_manager"),
    ]
    lines = []
    for function, manager in both:
        lines += [
            Rule(
                f"{function}.path",
                "reward.reward_kwargs.path",
                "reward=function, `path:name`; without a path: reward.name=verl",
                _reward_function,
                (None,),
            ),
            Rule(f"{function}.name", "reward.reward_kwargs.path", "part of the path", _no_function, (None,)),
            Rule(f"{function}.reward_kwargs.*", "reward.reward_kwargs.*", leaves_out=(None,)),
            Rule(
                manager,
                "reward.reward_manager",
                "`naive` and `batch` are left out: your function runs in processes, by `prime`, also below `dapo`; "
                "a manager of verl's reward loop that rollcast lacks: `verl_loop_<name>`",
                _reward_manager,
                (None,),
            ),
        ]
    for prefix in ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        lines += [
            Rule(
                f"{prefix}.{name}",
                f"reward.reward_manager_kwargs.overlong_buffer.{name}",
                "only with the manager dapo, if enabled",
                _overlong(name),
            )
            for name in ("len", "penalty_factor")
        ]
        lines += _none("its presence enables it, and it is always a metric", f"{prefix}.enable", f"{prefix}.log")
    return [
        *lines,
        Rule("reward.reward_model.enable", "reward_model.enable", "a sequence classifier of one label"),
        Rule("reward_model.enable", "reward_model.enable", "a sequence classifier of one label", leaves_out=(None,)),
        Rule("reward.reward_model.model_path", "reward_model.model.path", leaves_out=(None,)),
        Rule("reward_model.model.path", "reward_model.model.path", leaves_out=(None,)),
        *_none(
            "placement.pools and placement.mapping say where a role runs",
            *(
                f"{p}.{n}"
                for p in ("reward.reward_model", "reward_model")
                for n in ("enable_resource_pool", "n_gpus_per_node", "nnodes")
            ),
        ),
        *_none(
            "a generative reward model is the run's judge (section `judge`)",
            "reward.reward_model.rollout.*",
            "reward_model.rollout.*",
            "reward_model.model.*",
            "reward.reward_model.model_config.*",
        ),
        *_none(
            "managers score concurrently by themselves",
            "reward.num_workers",
            "reward_model.num_workers",
            "reward_model.launch_reward_fn_async",
        ),
        *_none(
            "a manager of your own is a plugin; rollcast_verl.rewards.manager_class adapts verl's",
            "reward.reward_manager.source",
            "reward.reward_manager.module.*",
            "reward_model.reward_loop_source",
            "reward_model.reward_loop_module_path",
            "reward_model.reward_loop_class_name",
        ),
        *_none(
            "the reward `code` has a sandbox; verl's: reward.name=verl reward.reward_kwargs.sandbox_fusion_url",
            "reward.sandbox_fusion.*",
            "sandbox_fusion.*",
        ),
        *_none("options of the manager go into `reward.reward_manager_kwargs`", "reward.reward_kwargs.*"),
    ]


def _trainer() -> list[Rule]:
    return [
        *_copied(
            "trainer",
            "trainer",
            "total_epochs",
            "save_freq",
            "test_freq",
            "val_before_train",
            "critic_warmup",
            "balance_batch",
            "log_val_generations",
        ),
        Rule("trainer.total_training_steps", "trainer.total_steps", leaves_out=(None,)),
        Rule("trainer.nnodes", "placement.nnodes"),
        Rule("trainer.n_gpus_per_node", "placement.n_gpus_per_node"),
        Rule("trainer.device", "placement.device"),
        Rule("trainer.default_local_dir", "run_dir", "folder of the whole run, not only of its checkpoints"),
        Rule(
            "trainer.max_actor_ckpt_to_keep",
            "trainer.max_ckpt_to_keep",
            "null → -1",
            _rename("trainer.max_ckpt_to_keep", {None: -1}),
        ),
        Rule("trainer.max_critic_ckpt_to_keep", note="one checkpoint holds both"),
        Rule("trainer.logger", "trackers", "trackers that rollcast has; `file` → jsonl", _trackers),
        Rule(
            "trainer.resume_mode",
            "trainer.resume_mode",
            "resume_path → a new run with trainer.warm_start",
            _rename("trainer.resume_mode", {"resume_path": "auto"}),
        ),
        Rule("trainer.resume_from_path", "trainer.warm_start", leaves_out=(None, False)),
        *_none(
            "the run directory is the name; project and run of a tracker: `tracker_kwargs.<tracker>`",
            "trainer.project_name",
            "trainer.experiment_name",
        ),
        *_none(
            "`runtime.record_trajectories` and `RUN_DIR/samples` hold them",
            "trainer.rollout_data_dir",
            "trainer.validation_data_dir",
        ),
        *_none("`rollcast eval` evaluates a folder", "trainer.val_only"),
        Rule("trainer.default_hdfs_dir", "trainer.default_hdfs_dir", "any URL of fsspec", leaves_out=(None,)),
        *_none("a listener of the hook on_checkpoint_saved does this", "trainer.checkpoint_callback_class"),
        *_none("checkpoints are never deleted after loading", "trainer.del_local_ckpt_after_load"),
        *_none("`runtime.launch_timeout_s` limits the start", "trainer.ray_wait_register_center_timeout"),
        *_none(
            "there is one trainer; `trainer.max_staleness` makes it asynchronous",
            "trainer.use_v1",
            "trainer.v1.*",
            "trainer.esi_redundant_time",
        ),
        *_none(
            "profiling has a section of its own, `profiler`",
            "trainer.profile_steps",
            "trainer.profile_continuous_steps",
            "trainer.worker_nsight_options.*",
            "trainer.controller_nsight_options.*",
        ),
    ]


def _rest() -> list[Rule]:
    return [
        Rule("ray_kwargs.ray_init.num_cpus", "runtime.num_cpus", leaves_out=(None,)),
        Rule("ray_kwargs.ray_init.runtime_env.*", "runtime.runtime_env.*", leaves_out=(None,)),
        *_none("use `ray timeline`", "ray_kwargs.timeline_json_file", "ray_kwargs.*"),
        *_none("profiling: `profiler.tool`, `profiler.steps`, `profiler.ranks`", "global_profiler.*"),
        *_none("distillation is not there", "distillation.*"),
        *_none("the data plane needs no service of its own", "transfer_queue.*"),
        *_none("`trainer.replay` trains again on the recorded trajectories of a run", "skip.*"),
        *_none("Hydra's own", "hydra.*", "defaults", "_target_"),
    ]


RULES: tuple[Rule, ...] = (
    *_actor(),
    *_rollout(),
    *_model(_M, "model", "actor.engine"),
    *_reference(),
    *_critic(),
    *_model("critic.model", "critic.model", "critic.engine"),
    *_data(),
    *_algorithm(),
    *_reward(),
    *_trainer(),
    *_rest(),
)
_EXACT = {rule.theirs: rule for rule in RULES if not rule.theirs.endswith(".*")}
_BELOW = {rule.theirs[:-2]: rule for rule in RULES if rule.theirs.endswith(".*")}


def find_rule(key: str) -> Rule | None:
    """Return the rule of a key of verl; None for a key that the table does not know."""
    if key in _EXACT:
        return _EXACT[key]
    place = key
    while "." in place:
        place = place.rpartition(".")[0]
        if place in _BELOW:
            return _BELOW[place]
    return None
