"""The losses of docs/coming-from-trl.md: each row against TRL's equations, and against TRL where it is installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from page_packages import DOCS, titled_blocks
from torch import Tensor
from trl_restated import HAS_TRL, LONGEST, Rows, restated_loss, trl_loss

from rollcast import build_section, compose
from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import LossInputs
from rollcast_algorithms.entropy_controller import AdaptiveEntropyController
from rollcast_algorithms.losses import PpoLoss
from rollcast_trainer.schemas import PpoActorConfig
from rollcast_trainer.stages.update_actor import build_loss

needs_trl = pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed; nox -s tests_peers has it")
PAGE = (DOCS / "coming-from-trl.md").read_text()
ROWS = re.findall(r"^\| `(\w+=[^`]+)`[^|]*\| `(actor\.[^`]+)` \|$", PAGE.split("### Losses")[1], flags=re.MULTILINE)
SPREADS = (0.02, 0.3, 1.5)
#: Losses that TRL does not make depend on the division into micro-batches and ranks.
DIVISIBLE = {"dapo", "cispo", "vespo"}


def options_of(text: str) -> dict[str, Any]:
    """Return the keyword arguments of GRPOConfig in a cell of the table."""
    call = ast.parse(f"GRPOConfig({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


@cache
def actor_of(keys: str) -> PpoActorConfig:
    """Return the actor's section with the keys of a cell of the table."""
    composed = compose(["trainer=ppo", "data=prompts", "rollout=vllm", *keys.split()], allow_missing=True)
    return build_section(PpoActorConfig, composed.config.actor, "actor")


def our_loss(loss: PpoLoss, rows: Rows, log_probs: Tensor, counts: Denominators, prepared: Mapping[str, Tensor]) -> Any:
    columns = {
        "old_log_probs": rows.old,
        "ref_log_prob": rows.ref,
        "rollout_log_probs": rows.sampled,
        "advantages": rows.advantages.unsqueeze(-1).expand(rows.mask.shape),
        **({"rollout_is_weights": rows.weights} if loss.use_rollout_is_weights else {}),
        **prepared,
    }
    entropy = rows.entropy if loss.entropy_coeff else None
    return loss(LossInputs(log_probs, entropy, None, rows.mask, columns, counts)).loss


def prepared_by(loss: PpoLoss, rows: Rows) -> dict[str, Tensor]:
    """Return the columns of the whole batch, as the trainer prepares them: from all tokens in one row."""
    advantages = rows.advantages.unsqueeze(-1).expand(rows.mask.shape)
    flat = [column.reshape(1, -1) for column in (rows.old, advantages, rows.mask)]
    columns = loss.prepare(*flat, {"entropy": rows.entropy.reshape(1, -1)})
    return {name: column.view(rows.mask.shape) for name, column in columns.items()}


def counts_of(rows: Rows) -> Denominators:
    return Denominators(float(rows.mask.sum()), float(len(rows.mask)), float(LONGEST))


def differentiated(function: Callable[[Tensor], Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    leaf = rows.log_probs.clone().requires_grad_()
    total = function(leaf)
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient * rows.mask


def require_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare loss and gradient to a relative 1e-6, of the largest value for the gradient."""
    torch.testing.assert_close(found[0], expected[0].to(found[0]), rtol=1e-6, atol=1e-12)
    largest = float(expected[1].abs().max())
    assert largest > 0
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9 * largest)


def test_the_table_has_every_loss() -> None:
    kinds = {options_of(theirs).get("loss_type", "dapo") for theirs, _ in ROWS}
    assert kinds == {"dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"}
    assert len(ROWS) == PAGE.split("### Losses")[1].split("- TRL has no dual clip")[0].count("\n| `")


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_a_row_is_the_loss_of_trl_restated(theirs: str, ours: str, spread: float) -> None:
    options, loss = options_of(theirs), build_loss(actor_of(ours), False)
    for seed in range(2):
        rows = Rows.draw(seed, spread)
        found = differentiated(lambda leaf, r=rows: our_loss(loss, r, leaf, counts_of(r), prepared_by(loss, r)), rows)
        require_equal(found, differentiated(partial(restated_loss, options, rows), rows))


@needs_trl
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_a_row_is_the_loss_of_trl(theirs: str, ours: str, spread: float) -> None:
    options, loss = options_of(theirs), build_loss(actor_of(ours), False)
    for seed in range(20):
        rows = Rows.draw(seed, spread)
        counts = counts_of(rows)
        found = differentiated(lambda leaf, r=rows, c=counts: our_loss(loss, r, leaf, c, prepared_by(loss, r)), rows)
        require_equal(found, differentiated(lambda leaf, r=rows, c=counts: trl_loss(options, r, leaf, c.tokens), rows))


@needs_trl
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_micro_batches_and_ranks_of_trl(theirs: str, ours: str) -> None:
    """Two ranks, whose gradients are averaged, with two micro-batches each."""
    options, loss = options_of(theirs), build_loss(actor_of(ours), False)
    if options.get("loss_type", "dapo") == "bnpo" or {"entropy_coef", "top_entropy_quantile"} & set(options):
        pytest.skip("TRL averages over micro-batches here, as the page says")
    is_even = options.get("loss_type", "dapo") not in DIVISIBLE
    for seed in range(5):
        rows = Rows.draw(seed, 0.3)
        cuts = torch.arange(8).split([2, 2, 2, 2] if is_even else [1, 3, 3, 1])
        tokens = float(rows.mask.sum())

        def divided(leaf: Tensor, r: Rows = rows, c: Any = cuts, n: float = tokens) -> Tensor:
            return torch.stack([trl_loss(options, r.part(cut), leaf[cut], n, 2, 2) for cut in c]).sum() / 2

        found = differentiated(
            lambda leaf, r=rows: our_loss(loss, r, leaf, counts_of(r), prepared_by(loss, r)),
            rows,
        )
        require_equal(found, differentiated(divided, rows))


@needs_trl
@pytest.mark.parametrize("spread", SPREADS)
def test_vespo_with_the_weights_of_a_rollout_correction(spread: float) -> None:
    loss = build_loss(actor_of("actor.policy_loss=vespo"), True)
    options = {"loss_type": "vespo", "vllm": True}
    for seed in range(20):
        rows = Rows.draw(seed, spread, width=6)
        counts = counts_of(rows)
        found = differentiated(lambda leaf, r=rows, c=counts: our_loss(loss, r, leaf, c, {}), rows)
        require_equal(found, differentiated(lambda leaf, r=rows, c=counts: trl_loss(options, r, leaf, c.tokens), rows))


@needs_trl
def test_the_restatement_has_trls_defaults() -> None:
    from dataclasses import fields

    from trl import GRPOConfig
    from trl_restated import DEFAULTS

    theirs = {each.name: each.default for each in fields(GRPOConfig)}
    assert {name: theirs[name] for name in DEFAULTS} == dict(DEFAULTS)
    assert (theirs["scale_rewards"], theirs["num_generations"]) == ("group", 8)
    assert (theirs["max_completion_length"], theirs["learning_rate"]) == (512, 1e-6)


def test_trls_defaults_compose() -> None:
    keys = titled_blocks("coming-from-trl.md")["trl_defaults.txt"].split()
    composed = compose(["trainer=ppo", "data=prompts", "rollout=vllm", *keys], allow_missing=True).config
    assert composed.actor.policy_loss == "vanilla"
    assert composed.actor.clip_ratio_c == float("inf")
    assert composed.algorithm.norm_adv_by_std_in_grpo is True
    assert composed.actor.entropy_coeff == 0


def test_the_adaptive_entropy_weight() -> None:
    """The sequence of coefficients and applied weights of TRL's controller, written out."""
    controller = AdaptiveEntropyController(0.01, target=0.5, delta=0.004, minimum=0.0, maximum=0.02)
    assert controller.weight == 0.0
    applied = []
    for entropy in (0.4, 0.3, 0.2, 0.6, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9):
        controller.update(entropy)
        applied.append((round(controller.coefficient, 6), round(controller.weight, 6)))
    assert applied[:6] == [(0.014, 0.014), (0.018, 0.018), (0.02, 0.02), (0.016, 0.0), (0.02, 0.02), (0.016, 0.0)]
    assert applied[-1] == (0.0, 0.0)
    other = AdaptiveEntropyController(1.0, target=0.5, delta=0.004, minimum=0.0, maximum=0.02)
    other.load_state_dict(controller.state_dict())
    assert other == controller
