"""What an update computes: the same gradient however it is split, and the one that the formulas say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import (
    SmallTask,
    global_norm,
    launch,
    read_metrics,
    roll_out,
    run_stage,
    set_up,
    without_times,
    worker_of,
)

from rollcast.config import compose
from rollcast.contracts.engine import ForwardSettings, LossInputs, LossOutput, engines
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms import k3, kl_cov, make_ppo_loss, token_mean, vanilla
from rollcast_fsdp.engine import FsdpEngine
from rollcast_testing.tiny import padded_batch, plain_log_probs, plain_model
from rollcast_trainer.batch.mini_batches import UpdatePlan, plan_update
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.settings import check_run
from rollcast_trainer.stages.log_probs import compute_log_prob
from rollcast_trainer.stages.update_actor import needs_advantage

pytestmark = pytest.mark.long

WIDTH = 6
Gradients = dict[str, torch.Tensor]


class Fixed:
    """A batch after one step of training, with advantages and a reference that differs from the policy."""

    def __init__(self, trainer: PpoTrainer) -> None:
        self.trainer = trainer
        self.engine = worker_of(trainer).actor.engine
        run_stage(trainer, "update_actor", roll_out(trainer)[0])
        self.batch = roll_out(trainer)[0]
        self.everything = torch.arange(len(self.batch))
        # Other log-probs than the policy's present ones, so that ratios and clipping matter.
        old, mask = Jagged.of(self.batch["old_log_probs"]), Jagged.of(self.batch["response_mask"])
        noise = torch.randn(old.values.shape, generator=torch.Generator().manual_seed(0))
        changed = old.with_values((old.values + 0.3 * noise) * mask.values)
        self.batch = self.batch.with_columns({"old_log_probs": changed})
        self.settings = ForwardSettings(calculate_entropy=True, max_response_length=WIDTH)

    def run(
        self, loss: Any, data: DataProto, plan: UpdatePlan, settings: ForwardSettings | None = None
    ) -> tuple[Gradients, dict[str, float]]:
        """Gradients and metrics of a plan's only mini-batch; the weights stay."""
        settings = replace(settings or self.settings, denominators=plan.denominators[0])
        self.engine.optimizer_zero_grad()
        with self.engine.train_mode():
            _, metrics = self.engine.forward_backward_batch(data, loss, settings)
            found = {
                name: parameter.grad.clone()
                for name, parameter in self.engine.module.named_parameters()
                if parameter.grad is not None
            }
        self.engine.optimizer_zero_grad()
        return found, metrics

    def whole(self, loss: Any, settings: ForwardSettings | None = None) -> tuple[Gradients, dict[str, float]]:
        return self.run(loss, *plan_update(self.batch, [self.everything], 1, WIDTH), settings)


@pytest.fixture(scope="module")
def fixed(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixed]:
    changes = ["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true", "algorithm.kl_coef=0.2"]
    with set_up(small_task.ppo(tmp_path_factory.mktemp("updates"), *changes)) as trainer:
        yield Fixed(trainer)


LOSSES = {
    "policy": make_ppo_loss(vanilla, token_mean),
    "policy, entropy and KL": make_ppo_loss(vanilla, token_mean, entropy_coeff=0.1, kl_penalty=k3, kl_loss_coef=0.5),
}


def assert_same(left: Gradients, right: Gradients) -> None:
    norm = global_norm(list(left.values()))
    assert norm > 1e-3
    assert left.keys() == right.keys()
    assert global_norm([left[name] - right[name] for name in left]) <= 1e-5 * norm


def same_metrics(metrics: dict[str, float]) -> dict[str, Any]:
    return {key: pytest.approx(value, rel=1e-4, abs=1e-7) for key, value in metrics.items()}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    "split",
    [{"micro_batch_size_per_gpu": 1}, {"micro_batch_size_per_gpu": 5}, {"max_token_len_per_gpu": 40}],
    ids=str,
)
def test_micro_batches_do_not_change_gradient_or_metrics(fixed: Fixed, loss: Any, split: dict[str, int]) -> None:
    gradients, metrics = fixed.whole(loss)
    split_gradients, split_metrics = fixed.whole(loss, replace(fixed.settings, **split))
    assert_same(gradients, split_gradients)
    assert split_metrics == same_metrics(metrics)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dp_size", [2, 3, 40])
def test_the_shards_of_any_number_of_ranks_add_up(fixed: Fixed, loss: Any, dp_size: int) -> None:
    """40 ranks have fewer rows than there are ranks: some hold nothing but filler."""
    gradients, metrics = fixed.whole(loss)
    data, plan = plan_update(fixed.batch, [fixed.everything], dp_size, WIDTH)
    parts = [fixed.run(loss, shard, plan) for shard in data.chunk(dp_size)]
    assert_same(gradients, {name: torch.stack([part[name] for part, _ in parts]).sum(0) for name in gradients})
    assert {key: sum(part[key] for _, part in parts) for key in metrics} == same_metrics(metrics)


def test_the_gradient_is_that_of_the_formulas(fixed: Fixed, small_task: SmallTask) -> None:
    loss = make_ppo_loss(
        vanilla,
        token_mean,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        entropy_coeff=0.1,
        kl_penalty=k3,
        kl_loss_coef=0.5,
    )
    gradients, metrics = fixed.whole(loss)
    model = plain_model(small_task.model)
    with torch.no_grad():
        for name, tensor in fixed.engine.get_per_tensor_param():
            model.get_parameter(name).copy_(tensor)
    batch = padded_batch(fixed.batch)
    mask = batch["response_mask"]
    new, entropy = plain_log_probs(model, batch)
    count = mask.sum()
    ratio = (new - batch["old_log_probs"]).exp()
    advantages = batch["advantages"]
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.3))
    surrogate = torch.where(advantages < 0, torch.minimum(clipped, -3.0 * advantages), clipped)
    gap = batch["ref_log_prob"] - new
    kl = gap.exp() - 1 - gap
    assert kl.max() > 1e-4
    total = ((surrogate - 0.1 * entropy + 0.5 * kl) * mask).sum() / count
    total.backward()
    surrogate, kl, entropy, new = (each.detach() for each in (surrogate, kl, entropy, new))
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, gradients)
    assert metrics["actor/pg_loss"] == pytest.approx(float((surrogate * mask).sum() / count), rel=1e-4)
    assert metrics["actor/kl_loss"] == pytest.approx(float((kl * mask).sum() / count), rel=1e-4)
    assert metrics["actor/entropy_loss"] == pytest.approx(float((entropy * mask).sum() / count), rel=1e-4)
    assert metrics["actor/kl"] == pytest.approx(float(((batch["old_log_probs"] - new) * mask).sum() / count), abs=1e-5)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_leaving_rows_without_advantage_out_changes_no_gradient(fixed: Fixed, mode: str) -> None:
    from rollcast.contracts.algorithm import loss_aggregations

    loss = make_ppo_loss(vanilla, loss_aggregations.get(mode))
    skip = torch.zeros(len(fixed.batch), dtype=torch.bool)
    skip[1::3] = True
    advantages = Jagged.of(fixed.batch["advantages"])
    kept = advantages.with_values(advantages.values * ~skip[advantages.rows])
    batch = fixed.batch.with_columns({"advantages": kept})
    gradients, metrics = fixed.run(loss, *plan_update(batch, [fixed.everything], 1, WIDTH))
    data, plan = plan_update(batch, [fixed.everything], 1, WIDTH, skip_rows=skip)
    assert len(data) == int((~skip).sum())
    skipped_gradients, skipped_metrics = fixed.run(loss, data, plan)
    assert_same(gradients, skipped_gradients)
    assert skipped_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-4)
    # Rows without advantage are never clipped, so the share of clipped tokens is of the others.
    counts = plan.denominators[0]
    assert counts.present_tokens is not None
    of_all = skipped_metrics["actor/clip_fraction"] * counts.present_tokens / counts.tokens
    assert of_all == pytest.approx(metrics["actor/clip_fraction"], rel=1e-6)
    assert of_all > 0


def test_a_mini_batch_without_any_advantage_has_no_gradient(fixed: Fixed) -> None:
    advantages = Jagged.of(fixed.batch["advantages"])
    batch = fixed.batch.with_columns({"advantages": advantages.with_values(torch.zeros_like(advantages.values))})
    skip = torch.ones(len(batch), dtype=torch.bool)
    gradients, metrics = fixed.run(LOSSES["policy"], *plan_update(batch, [fixed.everything], 1, WIDTH, skip_rows=skip))
    assert global_norm(list(gradients.values())) == 0
    assert metrics["actor/pg_loss"] == metrics["actor/kl"] == 0


def test_which_losses_allow_rows_to_be_left_out() -> None:
    assert needs_advantage(make_ppo_loss(vanilla, token_mean))
    assert not needs_advantage(make_ppo_loss(kl_cov, token_mean))
    assert not needs_advantage(make_ppo_loss(vanilla, token_mean, entropy_coeff=0.1))
    assert not needs_advantage(make_ppo_loss(vanilla, token_mean, kl_penalty=k3))


def test_a_loss_that_does_not_say_so_may_have_a_gradient_without_an_advantage() -> None:
    assert not needs_advantage(make_ppo_loss(lambda inputs: vanilla(inputs), token_mean))


def test_kl_in_the_reward(fixed: Fixed) -> None:
    """Scores less 0.2 times the difference of the log-probs, at each token."""
    jagged, metrics = roll_out(fixed.trainer)
    batch = padded_batch(jagged)
    mask = batch["response_mask"]
    penalty = (batch["old_log_probs"] - batch["ref_log_prob"]) * mask
    assert penalty.abs().max() > 1e-3
    expected = batch["token_level_scores"] - 0.2 * penalty
    torch.testing.assert_close(batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(float(penalty.sum() / mask.sum()), rel=1e-4)


def test_advantages_compare_the_samples_of_a_prompt(fixed: Fixed) -> None:
    batch = padded_batch(roll_out(fixed.trainer)[0])
    assert batch["uid"].tolist() == [uid for uid in range(4) for _ in range(4)]
    scores = batch["token_level_rewards"].sum(-1).reshape(4, 4)
    expected = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    spread = expected.reshape(-1, 1) * batch["response_mask"]
    torch.testing.assert_close(batch["advantages"], spread, rtol=1e-4, atol=1e-5)


def test_old_log_probs_and_the_rollouts_own_agree(small_task: SmallTask, tmp_path: Path) -> None:
    with set_up(small_task.ppo(tmp_path, "actor.log_prob_check_rows=-1")) as trainer:
        jagged, metrics = roll_out(trainer)
    batch = padded_batch(jagged)
    assert 0 < metrics["rollout/logprob_gap_max"] <= 1e-4
    assert metrics["rollout/logprob_gap_mean"] <= metrics["rollout/logprob_gap_max"]
    gap = (batch["old_log_probs"] - batch["rollout_log_probs"]).abs() * batch["response_mask"]
    assert metrics["rollout/logprob_gap_max"] == float(gap.max())


def test_where_the_rollouts_log_probs_are_the_policys_own_they_serve(small_task: SmallTask, tmp_path: Path) -> None:
    with set_up(small_task.ppo(tmp_path, "actor.log_prob_check_rows=3")) as trainer:
        assert [place.name for place in trainer.run.settings.places].count("old_log_prob") == 0
        batch, _ = roll_out(trainer)
        computed = compute_log_prob(trainer.run, batch, ["old_log_probs", "entropy"])
        own = padded_batch(batch.joined(computed, overwrite=True))
        metrics = run_stage(trainer, "log_prob_check", batch)
    batch = padded_batch(batch)
    assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])
    rows = [0, 5, 10]
    gap = (own["old_log_probs"] - batch["rollout_log_probs"])[rows].abs() * batch["response_mask"][rows]
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(float(gap.max()), abs=1e-6)
    entropy = (own["entropy"] * batch["response_mask"])[rows].sum() / batch["response_mask"][rows].sum()
    assert metrics["actor/entropy"] == pytest.approx(float(entropy), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.temperature=0", "algorithm.rollout_correction.rollout_is=token"],
)
def test_log_probs_of_another_distribution_do_not_serve(small_task: SmallTask, tmp_path: Path, change: str) -> None:
    config = compose(small_task.ppo(tmp_path, change)).config
    names = [place.name for place in check_run(config, PpoTrainer).places]
    assert "old_log_prob" in names
    assert "log_prob_check" not in names


def test_one_schedule_step_a_training_step(small_task: SmallTask, tmp_path: Path) -> None:
    """Two mini-batches and two epochs: four optimizer steps, at one learning rate."""
    changes = ["actor.optim.lr_scheduler_type=linear", "actor.optim.lr_warmup_steps=2", "actor.ppo_epochs=2"]
    with set_up(small_task.ppo(tmp_path, *changes)) as trainer:
        engine = worker_of(trainer).actor.engine
        taken = []
        for _ in range(4):
            taken.append(run_stage(trainer, "update_actor", roll_out(trainer)[0])["actor/lr"])
        steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    # Up over two of four training steps, and down over the other two.
    assert taken == pytest.approx([0.5e-2, 1e-2, 1e-2, 0.5e-2])
    assert steps == {16}


def dense_kl(policy: Any, reference: Any, batch: DataProto, temperature: float) -> torch.Tensor:
    """KL(policy || reference) at each response token ``[B, T]``, from all logits of two plain models."""
    width = batch["responses"].shape[1]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = [model(**inputs).logits[:, -width - 1 : -1].double() / temperature for model in (policy, reference)]
    ours, theirs = logits[0].log_softmax(-1), logits[1].detach().log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def test_the_exact_kl_over_the_vocabulary(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["actor.use_kl_loss=true", "actor.kl_loss_type=full", "actor.kl_loss_coef=0.5"]
    changes += ["rollout.temperature=0.8", "actor.ppo_micro_batch_size_per_gpu=5", "ref.engine.param_offload=true"]
    with set_up(small_task.ppo(tmp_path, *changes)) as trainer:
        run_stage(trainer, "update_actor", roll_out(trainer)[0])
        batch, _ = roll_out(trainer)
        assert "ref_log_prob" not in batch
        worker = worker_of(trainer)
        policy, reference = plain_model(small_task.model), plain_model(small_task.model)
        with torch.no_grad():
            for name, tensor in worker.actor.engine.get_per_tensor_param():
                policy.get_parameter(name).copy_(tensor)
        data, plan = plan_update(batch, [torch.arange(len(batch))], 1, WIDTH)
        settings = replace(worker.setup.forward, denominators=plan.denominators[0])
        engine = worker.actor.engine
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, metrics = engine.forward_backward_batch(data, worker.setup.loss_function, settings)
            gradients = {name: parameter.grad.clone() for name, parameter in engine.module.named_parameters()}
    batch = padded_batch(batch)
    mask = batch["response_mask"]
    kl = (dense_kl(policy, reference, batch, 0.8) * mask).sum() / mask.sum()
    new, _ = plain_log_probs(policy, batch, 0.8)
    # The first update since the rollout: a ratio of 1, whose gradient is the log-prob's.
    surrogate = -(batch["advantages"] * (new - new.detach()).exp() * mask).sum() / mask.sum()
    (surrogate + 0.5 * kl).backward()
    assert_same({name: parameter.grad for name, parameter in policy.named_parameters()}, gradients)
    assert float(kl.detach()) > 1e-4
    assert metrics["actor/kl_loss"] == pytest.approx(float(kl.detach()), rel=1e-4)


def test_the_exact_kl_goes_through_a_run(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["actor.use_kl_loss=true", "actor.kl_loss_type=full", "actor.ppo_mini_batch_size=4"]
    launch(small_task.ppo(tmp_path / "run", *changes, "trainer.total_steps=2"))
    rows = read_metrics(tmp_path / "run")
    assert rows[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["actor/kl_loss"] > 1e-5
    assert "time/ref_log_prob_s" not in rows[1]


class WithoutLogits(FsdpEngine):
    """An engine that can do less."""

    capabilities = replace(FsdpEngine.capabilities, vocabulary_kl=False, offload=False)


class WithoutOffload(FsdpEngine):
    """An engine with the exact KL, whose weights stay on the device."""

    capabilities = replace(FsdpEngine.capabilities, offload=False)


@pytest.fixture
def lesser_engine() -> Iterator[None]:
    engines.register("lesser", WithoutLogits)
    yield
    engines.unregister("lesser")


@pytest.mark.usefixtures("lesser_engine")
def test_what_an_engine_cannot_do_is_refused(small_task: SmallTask, tmp_path: Path) -> None:
    kl = ["actor.use_kl_loss=true", "actor.kl_loss_type=full"]
    with pytest.raises(CapabilityError, match=r"kl_loss_type=full .*actor\.engine\.name=lesser .*k3"):
        launch(small_task.ppo(tmp_path, *kl, "actor.engine.name=lesser"))
    with pytest.raises(CapabilityError, match=r"ref\.engine\.param_offload .*engine lesser"):
        offload = ["actor.use_kl_loss=true", "ref.engine.param_offload=true"]
        launch(small_task.ppo(tmp_path, *offload, "actor.engine.name=lesser"))
    with engines.temporarily("heavy", WithoutOffload):
        offload = [*kl, "ref.engine.param_offload=true", "actor.engine.name=heavy"]
        config = compose(small_task.ppo(tmp_path, *offload)).config
        with pytest.raises(CapabilityError, match=r"ref\.engine\.param_offload .*engine heavy"):
            check_run(config, PpoTrainer)  # before anything starts
    apart = ["placement.pools={side: [1]}", "placement.mapping={ref: side}"]
    with pytest.raises(ConfigError, match=r"kl_loss_type=full .*placement\.mapping\.ref is 'side'"):
        launch(small_task.ppo(tmp_path, *kl, *apart))
    assert not (tmp_path / "config.yaml").exists()


def test_an_offloaded_reference_comes_back_for_each_pass(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[str] = []
    to = FsdpEngine.to

    def moved(engine: FsdpEngine, device: str, **parts: bool) -> None:
        assert parts == {"optimizer": False, "grad": False}
        moves.append(device)
        to(engine, device, **parts)

    changes = ["actor.use_kl_loss=true", "trainer.total_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    launch(small_task.ppo(tmp_path / "held", *changes))
    monkeypatch.setattr(FsdpEngine, "to", moved)
    launch(small_task.ppo(tmp_path / "offloaded", *changes, "ref.engine.param_offload=true"))
    assert moves == ["cpu", *["accelerator", "cpu"] * 2]
    held, offloaded = (without_times(read_metrics(tmp_path / name)) for name in ("held", "offloaded"))
    assert offloaded == held
    moves.clear()
    launch(small_task.ppo(tmp_path / "full", *changes, "ref.engine.param_offload=true", "actor.kl_loss_type=full"))
    assert moves == ["cpu", *["accelerator", "cpu"] * 2]


def test_steps_with_a_gradient_that_is_not_finite_are_skipped_and_counted(
    fixed: Fixed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, calls = worker_of(fixed.trainer).actor, []

    def sometimes_broken(inputs: LossInputs) -> LossOutput:
        assert inputs.log_probs is not None
        calls.append(len(calls))
        return LossOutput(inputs.log_probs.sum() * (float("nan") if len(calls) == 2 else 1e-3))

    halves = list(fixed.everything.chunk(2))
    data, plan = plan_update(fixed.batch, halves, 1, WIDTH, epochs=2)
    fixed.engine.save_checkpoint(tmp_path / "before")
    try:
        (metrics,) = worker.train_mini_batches(data, plan, sometimes_broken, fixed.settings)
    finally:
        fixed.engine.load_checkpoint(tmp_path / "before")
    assert len(calls) == 4
    assert metrics["actor/skipped_steps"] == 0.25
    assert "actor: the gradient's norm is nan, so an optimizer step is skipped" in caplog.text
    assert "not finite: none, so the model's own outputs are not" in caplog.text
    assert all(bool(weight.isfinite().all()) for weight in fixed.engine.module.parameters())
