"""Numbers that are not finite reach no metric, controller or reward that a later step depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.entropy_controller import AdaptiveEntropyController
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.stages.reward import KlInReward, model_metrics

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("broken", ["old_log_probs", "ref_log_prob"])
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_penalty_that_is_not_finite_leaves_its_weight(
    broken: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    config = AlgorithmConfig(use_kl_in_reward=True, kl_controller="adaptive", kl_coef=0.5, target_kl=0.1, horizon=10)
    metrics: dict[str, float] = {}
    run: Any = SimpleNamespace(section=lambda name, schema: config, step=3, record=metrics.update)
    stage = KlInReward(run)
    mask = Jagged.from_lengths(torch.ones(4, dtype=torch.bool), torch.tensor([2, 2]))
    columns = {name: mask.with_values(torch.full((4,), -1.0)) for name in ("old_log_probs", "ref_log_prob")}
    good = DataProto.from_dict({"response_mask": mask, "token_level_scores": columns["ref_log_prob"], **columns})
    bad = good.with_columns({broken: mask.with_values(torch.tensor([-1.0, value, -1.0, -1.0]))})
    stage(bad)
    assert stage.state_dict() == {"value": 0.5}
    assert "step 3: the mean KL penalty is" in caplog.text
    stage(good)
    assert stage.state_dict()["value"] == pytest.approx(0.5 * (1 - 0.2 * 2 / 10))


def test_an_entropy_that_is_not_finite_leaves_its_weight() -> None:
    controller = AdaptiveEntropyController(0.1, 1.0, 0.01, 0.0, 1.0)
    controller.update(0.5)
    before = controller.state_dict()
    for entropy in (NAN, INF, -INF):
        controller.update(entropy)
        assert controller.state_dict() == before


def test_the_mean_of_a_reward_model_has_no_bad_samples() -> None:
    assert model_metrics(torch.tensor([1.0, NAN, INF, 1e38, 3.0])) == {"reward/model_mean": 2.0}
    assert model_metrics(torch.tensor([NAN])) == {}
