"""The passes of a mini-batch: each micro-batch forward, and backward if gradients are enabled."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from rollcast.contracts.algorithm import kl_penalties
from rollcast.contracts.engine import ForwardSettings
from rollcast_engine.batching import dummy_micro_batch
from rollcast_engine.loss import loss_share, quantity_names, zero_loss
from rollcast_engine.reduce import MetricSums
from rollcast_engine.transfer import move, prefetched
from rollcast_fsdp.offload import ActivationOffload
from rollcast_fsdp.routing import layer_tokens

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from rollcast.contracts.engine import LossFunction
    from rollcast_engine.batching import BatchPlan
    from rollcast_engine.reduce import AgreedCounts
    from rollcast_engine.routing import RouterTape, RoutingRecord
    from rollcast_engine.transfer import CopyStream
    from rollcast_fsdp.schemas import FsdpConfig
    from rollcast_fsdp.sharding import Sharding
    from rollcast_fsdp.step import ForwardInputs, Score, TokenForward

__all__ = ["Passes"]

_KL_KEY = "actor.kl_loss_type"


class Passes:
    """Runner of micro-batches through one module; ranks that share it run the same number."""

    def __init__(
        self,
        forward: TokenForward,
        config: FsdpConfig,
        sharding: Sharding | None,
        copies: CopyStream,
        tape: RouterTape | None = None,
    ) -> None:
        self.forward = forward
        self.tape = tape
        self._sharding = sharding
        self._device = copies.device
        self._copies = copies
        # On a CPU, activations are in host memory anyway.
        self._offloads = config.enable_activation_offload and copies.is_asynchronous
        self._has_unreduced_gradients = False

    def run(
        self,
        plan: BatchPlan,
        agreed: AgreedCounts,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        reference: Score | None,
        record: RoutingRecord | None = None,
    ) -> tuple[dict[str, Tensor], MetricSums]:
        """Run forward, and backward if gradients are enabled; without gradients return the outputs of ``plan.source``.

        Args:
            plan: micro-batches of this rank.
            agreed: counts over all ranks.
            loss_function: loss to compute; None for none.
            settings: settings of the passes.
            reference: forward of the model that ``settings.vocabulary_kl`` is measured against; None if it is not
                requested.
            record: record of the routers' choices; None if it is not requested.
        """
        training = torch.is_grad_enabled()
        names = [] if training else quantity_names(settings, self.forward.is_value_model)
        # On the device until the last pass: a copy to the host would wait for each.
        empty = plan.source.empty_outputs(names)
        outputs = {name: torch.zeros_like(output, device=self._device) for name, output in empty.items()}
        sums = MetricSums()
        # FSDP2 averages gradients over the ranks, but the shares must be summed.
        scale = 1.0 if self._sharding is None else float(self._sharding.mesh.size())
        penalty = None if settings.vocabulary_kl is None else kl_penalties.get(settings.vocabulary_kl, _KL_KEY)
        finished = False
        try:
            prepared = prefetched(
                lambda index: self.forward.prepare(plan.cut(index)), agreed.micro_batches, self._copies
            )
            for index, inputs in enumerate(prepared):
                micro = inputs.micro
                if training and self._sharding is not None:
                    self._sharding.set_gradient_sync(index == agreed.micro_batches - 1)
                offload = ActivationOffload(self._copies) if self._offloads and training else nullcontext()
                with offload, self._routing(inputs, agreed, scale if training else None):
                    quantities = self.forward.quantities(inputs, settings, reference, penalty)
                if self.tape is not None and record is not None:
                    self.tape.record(micro, record)
                if loss_function is not None:
                    loss = loss_share(quantities, micro, agreed.denominators, loss_function, sums)
                    if training:
                        torch.autograd.backward(loss * scale)
                for name, output in outputs.items():
                    if not micro.is_dummy:
                        micro.scatter(quantities[name], output)
            finished = True
        finally:
            self._after(training, finished)
        return {name: output.cpu() for name, output in outputs.items()}, sums

    def _routing(
        self, inputs: ForwardInputs, agreed: AgreedCounts, scale: float | None
    ) -> AbstractContextManager[None]:
        if self.tape is None:
            return nullcontext()
        return self.tape.forward(layer_tokens(inputs, agreed.denominators.sequences), scale)

    def drop_unreduced_gradients(self) -> None:
        """Clear gradients that an interrupted backward left inside FSDP2; drop the module's gradients afterwards."""
        if self._has_unreduced_gradients:
            # FSDP2 hides gradients that are accumulated but not reduced, so reduce them to make them droppable.
            with torch.enable_grad():
                dummy = move(self.forward.prepare(dummy_micro_batch()), self._device)
                quantities = self.forward.quantities(dummy, ForwardSettings(), None, None)
                torch.autograd.backward(zero_loss(quantities))
            self._has_unreduced_gradients = False

    def _after(self, training: bool, finished: bool) -> None:
        if self._sharding is None:
            return
        if training:
            self._sharding.set_gradient_sync(True)
        if not finished:
            self._sharding.reset()
            self._has_unreduced_gradients = self._has_unreduced_gradients or training
        self._sharding.reshard()
