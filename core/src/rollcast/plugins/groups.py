"""The table of part groups, and of the names that first-party distributions provide.

Both are plain data: reading them imports nothing, so an error message may use them even when no
plugin is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

CORE_DISTRIBUTION = "rollcast"

Kind = Literal["class", "callable", "object", "package"]


@dataclass(frozen=True)
class Group:
    """One group of parts, which is also the name of its entry-point group.

    Attributes:
        name: the group, for example ``rollcast.engines``.
        kind: what an entry point of the group names: a ``class``, a ``callable``, an ``object``
            (which may be a module), or a ``package`` that is read as files and never called.
        description: one line for people.
    """

    name: str
    kind: Kind
    description: str


_ALL = (
    Group("rollcast.runtimes", "class", "what hosts workers: Ray, or this process"),
    Group("rollcast.devices", "object", "kinds of devices: variables, collective backend, torch module"),
    Group("rollcast.dispatch_modes", "class", "how a call is split over ranks and collected"),
    Group("rollcast.execute_modes", "class", "which ranks a call runs on"),
    Group("rollcast.engines", "class", "training engines: model, optimizer and their parallelism"),
    Group("rollcast.megatron_models", "callable", "how models of transformers are stored in megatron-core"),
    Group("rollcast.optimizers", "callable", "optimizers of the training engines"),
    Group("rollcast.rollouts", "class", "generation backends"),
    Group("rollcast.weight_syncs", "class", "how weights travel from the engine to the rollout"),
    Group("rollcast.advantages", "callable", "advantage estimators"),
    Group("rollcast.policy_losses", "callable", "policy losses over per-token quantities"),
    Group("rollcast.loss_aggregations", "callable", "how per-token losses become one number"),
    Group("rollcast.kl_penalties", "callable", "estimators of the KL divergence per token"),
    Group("rollcast.kl_controllers", "class", "how the KL coefficient changes over steps"),
    Group("rollcast.rewards", "callable", "rewards: functions, or classes with state"),
    Group("rollcast.reward_managers", "class", "how rewards of a batch are computed and placed"),
    Group("rollcast.agent_loops", "class", "multi-turn interaction between model and environment"),
    Group("rollcast.tools", "class", "tools that an agent loop may call"),
    Group("rollcast.tool_parsers", "class", "parsers of tool calls in generated text"),
    Group("rollcast.datasets", "class", "datasets of prompts or of supervised samples"),
    Group("rollcast.preprocessors", "class", "commands that turn public data into dataset files"),
    Group("rollcast.trackers", "class", "where metrics are written"),
    Group("rollcast.profilers", "class", "tools that look into workers' processes for some steps"),
    Group("rollcast.trainers", "class", "training loops"),
    Group("rollcast.planners", "class", "search for the placement of roles on devices"),
    Group("rollcast.commands", "object", "sub-commands of the command line"),
    Group("rollcast.configs", "package", "packages of YAML files on the configuration search path"),
    Group("rollcast.hooks", "object", "implementations of the hook specifications"),
)

GROUPS: Mapping[str, Group] = MappingProxyType({group.name: group for group in _ALL})
"""Every group of rollcast by name."""


def _names(distribution: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, distribution)


# Only what a pip hint needs: a name that is missing here merely loses its hint.
FIRST_PARTY: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "rollcast.runtimes": {"ray": "rollcast-ray", "local": CORE_DISTRIBUTION},
        "rollcast.devices": _names(CORE_DISTRIBUTION, "cpu", "cuda", "npu", "xpu"),
        "rollcast.dispatch_modes": {
            **_names(CORE_DISTRIBUTION, "one_to_all", "all_to_all", "rank_zero"),
            **_names(
                "rollcast-dispatch",
                "dp_compute",
                "dp_compute_proto",
                "dp_compute_proto_with_func",
                "dp_compute_metric",
                "nd_mesh",
                "megatron_compute",
                "megatron_compute_proto",
                "megatron_pp_as_dp",
                "megatron_pp_as_dp_proto",
                "megatron_pp_only",
                "direct_rollout_method",
                "token_balanced",
            ),
        },
        "rollcast.execute_modes": _names(CORE_DISTRIBUTION, "all", "rank_zero"),
        "rollcast.engines": {"fsdp": "rollcast-fsdp", "megatron": "rollcast-megatron"},
        "rollcast.optimizers": _names("rollcast-engine", "adamw", "sgd"),
        "rollcast.megatron_models": _names("rollcast-megatron", "llama", "qwen2", "qwen3"),
        "rollcast.rollouts": {
            "hf": "rollcast-hf",
            "vllm": "rollcast-vllm",
            "sglang": "rollcast-sglang",
        },
        "rollcast.weight_syncs": {
            "in_process": "rollcast-hf",
            **_names("rollcast-serving", "shared_memory", "collective", "disk"),
        },
        "rollcast.advantages": _names(
            "rollcast-algorithms",
            "gae",
            "grpo",
            "grpo_passk",
            "gdpo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "rloo",
            "opo",
            "gpg",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
        ),
        "rollcast.policy_losses": _names(
            "rollcast-algorithms",
            "vanilla",
            "gspo",
            "sapo",
            "gpg",
            "clip_cov",
            "kl_cov",
            "geo_mean",
            "cispo",
            "dro",
            "dppo_tv",
            "dppo_kl",
            "topr",
        ),
        "rollcast.loss_aggregations": _names(
            "rollcast-algorithms",
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "seq-mean-token-mean",
        ),
        "rollcast.kl_penalties": _names(
            "rollcast-algorithms", "k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "full"
        ),
        "rollcast.kl_controllers": _names("rollcast-algorithms", "fixed", "adaptive"),
        "rollcast.rewards": _names(
            "rollcast-rewards",
            "code",
            "exact_match",
            "format",
            "function",
            "gsm8k",
            "http",
            "math",
            "multiple_choice",
            "weighted_sum",
        ),
        "rollcast.reward_managers": _names("rollcast-rewards", "batch", "dapo", "naive", "prime", "remote"),
        "rollcast.datasets": _names("rollcast-data", "prompts", "supervised"),
        "rollcast.preprocessors": _names("rollcast-data", "gsm8k"),
        "rollcast.trackers": {
            **_names("rollcast-report", "console", "jsonl", "report"),
            **_names("rollcast-trackers", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml"),
        },
        "rollcast.profilers": _names("rollcast-trainer", "nsys", "torch", "torch_memory"),
        "rollcast.trainers": _names("rollcast-trainer", "ppo", "sft"),
    }
)
"""Group → part name → the first-party distribution that provides it."""


def find_provider(group: str, name: str) -> str | None:
    """The first-party distribution that provides a part, or None if none is known."""
    return FIRST_PARTY.get(group, {}).get(name)
