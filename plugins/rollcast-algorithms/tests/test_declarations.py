"""What estimators and losses declare about themselves is true."""

from __future__ import annotations

import pytest
import torch

from rollcast.contracts.algorithm import PolicyLossInputs, advantages, needs_of, policy_losses, prepare_policy_loss

MINE = [name for name in policy_losses.names() if policy_losses.find(name).distribution == "rollcast-algorithms"]
OPTIONS = {"dro": {"dro_beta": 0.5}}


@pytest.mark.parametrize("name", MINE)
def test_a_loss_scales_with_the_advantage_if_it_says_so(name: str) -> None:
    """A token without an advantage has a gradient in exactly the losses that do not declare the opposite."""
    loss, generator = policy_losses.get(name), torch.Generator().manual_seed(0)
    old = torch.rand((4, 16), generator=generator).log()
    new = (old + torch.randn((4, 16), generator=generator)).requires_grad_()
    flat = PolicyLossInputs(
        *(tensor.detach().view(1, -1) for tensor in (old, old, torch.zeros(4, 16), torch.ones(4, 16))),
        options=OPTIONS.get(name, {}),
    )
    prepared = {key: column.view(4, 16) for key, column in prepare_policy_loss(loss, flat).items()}
    inputs = PolicyLossInputs(
        new, old, torch.zeros(4, 16), torch.ones(4, 16), options=OPTIONS.get(name, {}), prepared=prepared
    )
    (gradient,) = torch.autograd.grad(loss(inputs).losses.sum(), new, allow_unused=True)
    has_gradient = gradient is not None and bool(gradient.any())
    assert needs_of(loss).scales_with_advantage is not has_gradient


def test_every_function_declares_its_options() -> None:
    for registry in (advantages, policy_losses):
        for name in registry.names():
            if registry.find(name).distribution == "rollcast-algorithms":
                assert needs_of(registry.get(name)).options is not None, name  # type: ignore[arg-type]
