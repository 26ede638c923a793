"""Rollouts of several trajectories: one loss, one gradient and one baseline, however their rows are spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import advantages, loss_aggregations
from rollcast.contracts.engine import EngineSetup, ForwardSettings, LossInputs, ModelConfig, OptimConfig
from rollcast.contracts.reward import RewardResult, RewardSample
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms import PpoLoss, ValueLoss, grpo, make_ppo_loss, vanilla
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_rewards.scoring import RolloutRows, Scored
from rollcast_testing.tiny import padded_batch, plain_log_probs, plain_model, tiny_model_folder, trajectory_batch
from rollcast_trainer.batch.mini_batches import draw_mini_batches, plan_update
from rollcast_trainer.batch.rollouts import JoinedRollouts, rollouts_of
from rollcast_trainer.stages.advantage import estimate_advantages, estimate_rollout_advantages
from rollcast_trainer.stages.anchors import find_anchors
from rollcast_trainer.stages.reward import filtered_scores

WIDTH = 40
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def make_batch(rows: int, seed: int) -> DataProto:
    """Trajectories with old log-probs, and with advantages that their rollouts share."""
    batch = trajectory_batch(rows, seed)
    responses = Jagged.of(batch["responses"])
    generator = torch.Generator().manual_seed(seed)
    index = batch["rollout_index"]
    of_rollout = torch.randn(int(index.max()) + 1, generator=generator)
    return batch.with_columns(
        {
            "old_log_probs": responses.with_values(-torch.rand(len(responses.values), generator=generator) - 0.1),
            "advantages": responses.with_values(of_rollout[index][responses.rows]),
        }
    )


def rollouts_in(batch: DataProto) -> list[list[int]]:
    index = batch["rollout_index"].tolist()
    return [[row for row, other in enumerate(index) if other == each] for each in dict.fromkeys(index)]


def aggregate(mode: str, losses: Tensor, mask: Tensor, rollouts: list[list[int]]) -> Tensor:
    """The definitions, over sequences that are whole rollouts."""
    parts = [torch.cat([losses[row][mask[row] != 0] for row in rows]) for rows in rollouts]
    if mode == "token-mean":
        return torch.cat(parts).mean()
    if mode == "token-sum":
        return torch.cat(parts).sum()
    sums = torch.stack([part.sum() for part in parts])
    if mode == "seq-mean-token-sum":
        return sums.mean()
    if mode == "seq-mean-token-sum-norm":
        return sums.mean() / WIDTH
    return torch.stack([part.mean() for part in parts]).mean()


def surrogate(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped losses with the dual clip."""
    ratio = (new - old).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.minimum(clipped, -3.0 * advantages), clipped)


def build_loss(mode: str) -> PpoLoss:
    return make_ppo_loss(vanilla, loss_aggregations.get(mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_the_shares_of_ranks_and_micro_batches_add_up_to_the_formula(mode: str, ranks: int) -> None:
    batch = make_batch(11, seed=1)
    assert any(len(rows) > 1 for rows in rollouts_in(batch))
    shift = torch.zeros(11, dtype=torch.float64, requires_grad=True)
    padded = padded_batch(batch)
    new = padded["old_log_probs"].double() + shift.unsqueeze(-1)
    losses = surrogate(new + 0.1, padded["old_log_probs"].double(), padded["advantages"].double())
    expected = aggregate(mode, losses, padded["response_mask"], rollouts_in(batch))
    (gradient,) = torch.autograd.grad(expected, shift)

    numbered = batch.with_columns({"row": torch.arange(11)})
    arranged, plan = plan_update(numbered, [torch.arange(11)], ranks, WIDTH)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(arranged), 2):
        micro = padded_batch(arranged.slice(start, min(start + 2, len(arranged))))
        columns = {name: micro[name] for name in micro.keys()}  # noqa: SIM118  # a batch iterates over its rows
        columns = {name: each.double() if each.is_floating_point() else each for name, each in columns.items()}
        log_probs = columns["old_log_probs"] + 0.1 + shift[micro["row"]].unsqueeze(-1)
        inputs = LossInputs(log_probs, None, None, micro["response_mask"], columns, plan.denominators[0])
        total = total + build_loss(mode)(inputs).loss
    (found,) = torch.autograd.grad(total, shift)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)


def test_a_rollout_in_two_rows_weighs_as_much_as_in_one() -> None:
    """The critic's loss too: two trajectories of one rollout, and the same tokens in one."""
    loss = ValueLoss(loss_aggregations.get("seq-mean-token-mean"))
    values = torch.arange(1.0, 9.0)

    def total(lengths: list[int], rollouts: list[int]) -> float:
        jagged = Jagged.from_lengths(values, torch.tensor(lengths))
        batch = DataProto.from_dict(
            {
                "response_mask": jagged.like(torch.ones(8, dtype=torch.bool)),
                "values": jagged.column(),
                "returns": jagged.like(values * values),
                "rollout_index": torch.tensor(rollouts),
            }
        )
        arranged, plan = plan_update(batch, [torch.arange(len(lengths))], 1, WIDTH)
        columns = {name: Jagged.of(arranged[name]).pad() for name in ("values", "returns")}
        if "sequence_tokens" in arranged:
            columns["sequence_tokens"] = arranged["sequence_tokens"]
        mask = Jagged.of(arranged["response_mask"]).pad().long()
        return float(loss(LossInputs(None, None, columns["values"], mask, columns, plan.denominators[0])).loss)

    assert total([2, 3, 3], [4, 4, 9]) == pytest.approx(total([5, 3], [0, 1]), rel=1e-6)
    assert total([2, 3, 3], [4, 5, 9]) != pytest.approx(total([5, 3], [0, 1]), rel=1e-2)


@pytest.mark.parametrize("seed", [None, 3])
def test_rows_of_a_rollout_stay_in_one_mini_batch(seed: int | None) -> None:
    batch = trajectory_batch(17, seed=2)
    rollouts = rollouts_of(batch)
    assert rollouts is not None
    drawn, epochs = draw_mini_batches(17, 3, 2, seed, rollouts)
    for epoch in (drawn[:3], drawn[3:]) if seed is not None else (drawn,):
        assert sorted(torch.cat(list(epoch)).tolist()) == list(range(17))
        places = [set(rollouts[part].tolist()) for part in epoch]
        assert sum(map(len, places)) == len(set(rollouts.tolist()))
    assert epochs == (2 if seed is None else 1)
    _, plan = plan_update(batch, drawn[:3], 2, WIDTH)
    assert sum(counts.sequences for counts in plan.denominators) == len(set(rollouts.tolist()))


def test_a_batch_with_a_rollout_a_row_is_as_before() -> None:
    batch = make_batch(6, seed=0)
    plain, plan = plan_update(batch.drop(["rollout_index"]), [torch.arange(6)], 2, WIDTH)
    marked, same = plan_update(batch.with_columns({"rollout_index": torch.arange(6) * 3}), [torch.arange(6)], 2, WIDTH)
    assert marked.equal(plain)
    assert plan == same


OUTCOME = ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "grpo_passk"]


@pytest.mark.parametrize("name", OUTCOME)
def test_baselines_are_over_rollouts_and_all_rows_get_the_advantage(name: str) -> None:
    batch = trajectory_batch(14, seed=5)
    mask = Jagged.of(batch["response_mask"])
    rewards = mask.with_values(torch.randn(len(mask.values), generator=torch.Generator().manual_seed(1)))
    scored = batch.with_columns({"token_level_rewards": rewards})
    found, _ = estimate_rollout_advantages(advantages.get(name), scored, AlgorithmConfig(), chunk_tokens=60)
    # The same by rollouts that are single rows, with the tokens of their trajectories.
    lengths, values, uid, masks = [], [], [], []
    for rows in rollouts_in(batch):
        tokens = [slice(int(mask.offsets[row]), int(mask.offsets[row + 1])) for row in rows]
        lengths.append(sum(each.stop - each.start for each in tokens))
        values += [rewards.values[each] for each in tokens]
        masks += [mask.values[each] for each in tokens]
        uid.append(int(batch["uid"][rows[0]]))
    whole = Jagged.from_lengths(torch.cat(masks), torch.tensor(lengths))
    columns = {"token_level_rewards": whole.like(torch.cat(values)), "response_mask": whole.column()}
    expected, _ = estimate_advantages(advantages.get(name), columns, torch.tensor(uid), AlgorithmConfig())
    start = 0
    for rows in rollouts_in(batch):
        of_rollout = []
        for row in rows:
            part = slice(int(mask.offsets[row]), int(mask.offsets[row + 1]))
            size = part.stop - part.start
            torch.testing.assert_close(found.values[part], expected.values[start : start + size])
            of_rollout += found.values[part][mask.values[part]].tolist()
            start += size
        assert len({round(value, 5) for value in of_rollout}) == 1


def test_grpo_over_rollouts_worked_out_by_hand() -> None:
    """Two rollouts, one of three rows: scores 4 and 0, not four scores."""
    mask = Jagged.from_lengths(torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.int64))
    batch = DataProto.from_dict(
        {
            "response_mask": mask.column(),
            "token_level_rewards": mask.like(torch.tensor([1.0, 0.0, 0.0, 3.0])),
            "rollout_index": torch.tensor([7, 3, 7, 7]),
            "uid": torch.zeros(4, dtype=torch.int64),
        }
    )
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    found, _ = estimate_rollout_advantages(grpo, batch, config)
    assert found.values.tolist() == [2.0, -2.0, 2.0, 2.0]


def test_rows_of_a_rollout_stand_in_the_order_of_their_turns() -> None:
    """GAE looks from a trajectory's last token to the first of the next one; columns of rows are the last one's."""
    mask = Jagged.from_lengths(torch.tensor([True, False, True, True]), torch.tensor([2, 1, 1]))
    joined = JoinedRollouts.of(
        torch.tensor([0, 1, 0]), mask, mask.with_values(torch.tensor([4, 5, 0, 2], dtype=torch.int32)), None
    )
    assert joined.order.tolist() == [2, 0, 1]
    assert joined.positions.tolist() == [3, 0, 1, 2]
    assert joined.offsets.tolist() == [0, 3, 4]
    assert joined.join(torch.tensor([10, 20, 30])).tolist() == [10, 20]
    marked = JoinedRollouts.of(torch.tensor([0, 1, 0]), mask, None, torch.tensor([True, True, False]))
    assert marked.order.tolist() == [0, 2, 1]
    assert marked.final.tolist() == [0, 1]


def test_anchors_are_the_observations_that_turns_answer() -> None:
    prompts = Jagged.from_lengths(torch.tensor([1, 2, 1, 2, 3], dtype=torch.int32), torch.tensor([2, 2, 1]))
    mask = [[1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 1], [1, 0, 0]]
    ids = [[50, 8, 9, 51, 8, 52], [53, 54, 8, 9, 55], [1, 8, 9]]
    turns = [[0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1], [0, 1, 1]]
    lengths = torch.tensor([6, 5, 3])

    def jagged(rows: list[list[int]], dtype: torch.dtype) -> Jagged:
        return Jagged.from_lengths(torch.tensor([each for row in rows for each in row], dtype=dtype), lengths)

    responses, chosen = jagged(ids, torch.int32), jagged(mask, torch.bool)
    found = find_anchors(prompts, responses, chosen, jagged(turns, torch.int32)).values[chosen.values].tolist()
    start, second, third, again, _, seen, other = found
    assert start == again  # the same prompt
    assert second == seen  # 8 9
    assert len({start, second, third, other}) == 4
    nothing = responses.with_values(torch.zeros_like(chosen.values))
    assert not find_anchors(prompts, responses, nothing, jagged(turns, torch.int32)).values.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("rollouts") / "model", hidden=32)


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({}, {}),
        ({}, {"micro_batch_size_per_gpu": 2}),
        ({"use_remove_padding": True}, {"max_token_len_per_gpu": 64}),
    ],
    ids=["whole", "micro-batches", "packed by tokens"],
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_an_engine_trains_trajectories_as_plain_torch(
    folder: Path, mode: str, keys: dict[str, Any], settings: dict[str, Any]
) -> None:
    module, batch = plain_model(folder), make_batch(9, seed=3)
    padded = padded_batch(batch)
    new, _ = plain_log_probs(module, padded)
    # Log-probs near the policy's, so that some ratios are clipped and others are not.
    old = Jagged.from_padded(new.detach(), padded["attention_mask"][:, -new.size(1) :])
    noise = Jagged.of(batch["old_log_probs"]).values + 0.6
    batch = batch.with_columns({"old_log_probs": Jagged.of(batch["responses"]).with_values(old.values + noise)})
    padded = padded_batch(batch)
    losses = surrogate(new, padded["old_log_probs"], padded["advantages"])
    expected = aggregate(mode, losses, padded["response_mask"], rollouts_in(batch))
    expected.backward()

    config = FsdpConfig(**keys)
    model = ModelConfig(path=str(folder))
    engine = FsdpEngine(EngineSetup("language_model", model, config, OptimConfig(), WorkerContext()))
    engine.initialize()
    columns = batch.select(["prompts", "responses", "response_mask", "rollout_index", "old_log_probs", "advantages"])
    arranged, plan = plan_update(columns, [torch.arange(9)], 2, WIDTH)
    total = 0.0
    engine.optimizer_zero_grad()
    with engine.train_mode():
        for shard in arranged.chunk(2):
            chosen = replace(ForwardSettings(**settings), denominators=plan.denominators[0])
            _, metrics = engine.forward_backward_batch(shard, build_loss(mode), chosen)
            total += metrics["actor/pg_loss"]
        found = {name: parameter.grad.clone() for name, parameter in engine.module.named_parameters()}
    assert total == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
    norm = torch.cat([parameter.grad.flatten() for parameter in module.parameters()]).norm()
    for name, each in found.items():
        gradient = module.get_parameter(name).grad
        assert float((each - gradient).norm()) <= 1e-6 * max(float(norm), 1.0), name


@pytest.mark.parametrize("metric", ["score", "shaped_score", "accuracy", "length"])
def test_groups_are_filtered_by_one_number_a_rollout(metric: str) -> None:
    """A row without the answer has no numbers of its own, which would make every group look different."""
    answer = RewardResult(2.0, correct=True, extra={"length": 7.0, "overlong_penalty": -0.5})
    results = [RewardResult(0.0), answer, RewardResult(0.0), answer]
    rows = RolloutRows(torch.tensor([0, 0, 1, 1]), torch.tensor([False, True, False, True]))
    numbers = filtered_scores(Scored([RewardSample("", "")] * 4, results, 1.0, rows), metric)
    expected = {"score": 2.5, "shaped_score": 2.0, "accuracy": 1.0, "length": 7.0}[metric]
    assert numbers.tolist() == [expected] * 4
