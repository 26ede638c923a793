"""A mini-batch's passes: each micro-batch forward, and backward if gradients are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollcast_engine.batching import MicroBatch, dummy_micro_batch
from rollcast_engine.reduce import MetricSums
from rollcast_fsdp.step import dummy_loss, quantity_names, run_micro_batch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import ForwardSettings, LossFunction
    from rollcast_engine.batching import BatchPlan
    from rollcast_engine.reduce import AgreedCounts
    from rollcast_fsdp.reference import Reference
    from rollcast_fsdp.schemas import FsdpConfig
    from rollcast_fsdp.sharding import Sharding

__all__ = ["Passes"]


class Passes:
    """Runs micro-batches through one module; ranks that share it run the same number."""

    def __init__(self, module: nn.Module, config: FsdpConfig, sharding: Sharding | None, device: torch.device) -> None:
        self._module = module
        self._sharding = sharding
        self._device = device
        self._share_prompts = config.share_prompts and sharding is None
        self._has_unreduced_gradients = False

    def run(
        self,
        plan: BatchPlan,
        agreed: AgreedCounts,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        reference: Reference | None,
    ) -> tuple[dict[str, Tensor], MetricSums]:
        """Forward, and backward if gradients are on; gives float32 ``[B, T]`` outputs if they are off.

        Args:
            reference: what ``settings.vocabulary_kl`` is measured against, in place; None if it is not asked for.
        """
        training = torch.is_grad_enabled()
        shape = (len(plan.starts), plan.response_width)
        names = [] if training else quantity_names(self._module, settings)
        outputs = {name: torch.zeros(shape, dtype=torch.float32) for name in names}
        sums = MetricSums()
        # FSDP2 averages gradients over the ranks; the shares have to be added up.
        scale = 1.0 if self._sharding is None else float(self._sharding.mesh.size())
        compare = None
        if reference is not None and settings.vocabulary_kl is not None:
            compare = reference.compare_by(settings.vocabulary_kl, settings)
        finished = False
        try:
            for index in range(agreed.micro_batches):
                micro = self._micro_batch(plan, index)
                if training and self._sharding is not None:
                    self._sharding.set_gradient_sync(index == agreed.micro_batches - 1)
                given, loss = run_micro_batch(
                    self._module,
                    micro,
                    agreed.denominators,
                    loss_function,
                    settings,
                    sums,
                    self._share_prompts,
                    compare,
                )
                if training and loss is not None:
                    torch.autograd.backward(loss * scale)
                for name, output in outputs.items():
                    if not micro.is_dummy:
                        micro.scatter(given[name], output)
            finished = True
        finally:
            self._after(training, finished)
        return outputs, sums

    def drop_unreduced_gradients(self) -> None:
        """Get rid of what an interrupted backward left in FSDP2; gradients are to be dropped after this."""
        if self._has_unreduced_gradients:
            # FSDP2 keeps what was accumulated but not reduced out of reach: reduce it, then drop it.
            with torch.enable_grad():
                torch.autograd.backward(dummy_loss(self._module, self._device))
            self._has_unreduced_gradients = False

    def _micro_batch(self, plan: BatchPlan, index: int) -> MicroBatch:
        if index < len(plan):
            return plan.micro_batch(index, self._device)
        return dummy_micro_batch(self._device)

    def _after(self, training: bool, finished: bool) -> None:
        if self._sharding is None:
            return
        if training:
            self._sharding.set_gradient_sync(True)
        if not finished:
            self._sharding.reset()
            self._has_unreduced_gradients = self._has_unreduced_gradients or training
        self._sharding.reshard()
