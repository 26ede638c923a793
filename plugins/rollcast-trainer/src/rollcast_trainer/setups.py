"""Setups of the roles that are not the actor, from the actor's."""

from __future__ import annotations

from dataclasses import replace

from rollcast_trainer.workers import WorkerSetup

__all__ = ["value_setup"]


def value_setup(actor: WorkerSetup, path: str | None, rows: int | None) -> WorkerSetup:
    """Of a frozen model that gives values, without the policy's adapter.

    Args:
        actor: the actor's setup.
        path: of the model; None for the policy's own.
        rows: rows a pass; None for as many as in the actor's log-probs.
    """
    plain = replace(actor.infer, calculate_entropy=False, calculate_sum_pi_squared=False)
    settings = replace(plain, micro_batch_size_per_gpu=rows or plain.micro_batch_size_per_gpu)
    random_init = actor.model.random_init and path is None
    return replace(
        actor,
        model=replace(actor.model.without_adapter(), path=path or actor.model.path, random_init=random_init),
        optim=None,
        rollout=None,
        loss_function=None,
        has_reference=False,
        forward=settings,
        infer=settings,
    )
