"""HybridFlow's placements: which of them the planner and the analytical cost model find again.

Settings of the paper (EuroSys 2025, section 8): A100-80GB, 8 a node, PPO with 1,024 prompts, prompts and responses of
1,024 tokens, 8 optimizer steps. `docs/mapping.md` lists the cases that differ.
"""

from __future__ import annotations

import pytest

from rollcast.contracts.mapping import Cluster, Constraints, Lengths, ModelFacts, Node, Problem, RoleSpec, StageSpec
from rollcast_automap.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.clusters import DEVICE_KINDS
from rollcast_automap.planners import HybridFlow

#: Sizes of Llama models.
MODELS = {
    "13b": ModelFacts(40, 5120, 40, 40, 13824, 32000, 13_015_864_320, 128),
    "34b": ModelFacts(48, 8192, 64, 8, 22016, 32000, 33_743_970_304, 128),
}
MODELS_OF = ("actor", "critic", "ref", "reward_model")


def ppo(model: str, devices: int) -> Problem:
    facts = MODELS[model]
    roles = (
        RoleSpec("rollout", "generates", facts, "vllm"),
        RoleSpec("actor", "trains", facts, "megatron"),
        RoleSpec("critic", "trains", facts, "megatron", value_head=True),
        RoleSpec("ref", "forwards", facts, "megatron"),
        RoleSpec("reward_model", "forwards", facts, "megatron", value_head=True),
    )
    prepared = tuple(f"{name}_forward" for name in MODELS_OF)
    stages = (
        StageSpec("rollout", "rollout", "generate"),
        *(StageSpec(f"{name}_forward", name, "forward", ("rollout",)) for name in MODELS_OF),
        *(StageSpec(f"{name}_update", name, "update", ("rollout", *prepared)) for name in ("critic", "actor")),
    )
    cluster = Cluster((Node(DEVICE_KINDS["a100"], 8, 300e9),) * (devices // 8), 200e9 / 8)
    lengths = Lengths(1024, 1024)
    return Problem(
        roles, stages, 1024, 1, 8, 1, lengths, lengths, cluster, Constraints(together=(("rollout", "actor"),))
    )


@pytest.mark.parametrize(
    ("model", "devices", "is_split"), [("13b", 16, False), ("13b", 32, False), ("13b", 64, False), ("34b", 96, True)]
)
def test_colocation_wins_on_few_devices_and_a_split_on_many(model: str, devices: int, is_split: bool) -> None:
    (best,) = HybridFlow().plan(ppo(model, devices), AnalyticalCosts(AnalyticalConfig()))
    assert (len(best.mapping.pools) > 1) is is_split
    assert sum(pool.devices for pool in best.mapping.pools) == devices
