"""Passing a rank's rows through the pipeline: micro-batches, megatron-core's schedule, outputs in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast_engine.loss import loss_share
from rollcast_engine.transfer import prefetched
from rollcast_megatron.heads import HiddenHead, LanguageHead, ValueHead
from rollcast_megatron.inputs import RowLayout, decoder_inputs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from rollcast.contracts.algorithm import Denominators
    from rollcast.contracts.engine import ForwardSettings, LossFunction
    from rollcast_engine.batching import BatchPlan, MicroBatch
    from rollcast_engine.reduce import MetricSums
    from rollcast_engine.routing import RouterTape, RoutingRecord
    from rollcast_engine.transfer import CopyStream
    from rollcast_megatron.build import Plan
    from rollcast_megatron.inputs import DecoderInputs
    from rollcast_megatron.module import Head, Stage

__all__ = ["Pass", "run_pass"]


@dataclass(frozen=True)
class Pass:
    """One pass over a rank's rows.

    Attributes:
        plan: micro-batches of the rows.
        model_plan: distribution of the model.
        denominators: counts of the whole mini-batch.
        loss_function: loss to compute; None to return per-token quantities only.
        settings: settings of the batch.
        head_chunk: maximum number of positions whose logits exist at a time.
        copies: copy stream of the model's device.
        layout: division of a micro-batch's tokens among the ranks that share its rows.
        reference: this stage of the reference model for ``vocabulary_kl``; None without one.
        reference_mode: context manager to run the reference in.
        sums: accumulator of the metrics, on the last stage.
        tape: routers of the stage; None if the model has no experts.
        record: record of their choices; None if it is not requested.
        is_sequence_parallel: True if tensor-parallel ranks share positions.
        micro_batches: number of micro-batches to run, with dummies after the last one.
    """

    plan: BatchPlan
    model_plan: Plan
    denominators: Denominators
    loss_function: LossFunction | None
    settings: ForwardSettings
    head_chunk: int
    copies: CopyStream
    layout: RowLayout
    reference: Stage | None
    reference_mode: AbstractContextManager[None]
    sums: MetricSums
    tape: RouterTape | None
    record: RoutingRecord | None
    is_sequence_parallel: bool
    micro_batches: int

    def prepare(self, index: int) -> _Prepared:
        """Return micro-batch ``index`` in host memory, where nothing waits for its values."""
        micro = self.plan.cut(index)
        return _Prepared(micro, decoder_inputs(micro, self.layout))


@dataclass(frozen=True)
class _Prepared:
    """A micro-batch, beyond the last one a dummy that does not count, and the decoder's inputs."""

    micro: MicroBatch
    inputs: DecoderInputs


class _Micros:
    """The micro-batches of a pass, each prepared once for all chunks that it passes through, and sent ahead.

    Args:
        work: the pass.
        chunks: number of chunks of this rank's stage.
    """

    def __init__(self, work: Pass, chunks: int) -> None:
        self._count, self._chunks = work.micro_batches, chunks
        self._prepared = prefetched(work.prepare, work.micro_batches, work.copies)
        self._ready: dict[int, _Prepared] = {}

    def of(self, chunk: int) -> Iterator[tuple[int, MicroBatch, DecoderInputs]]:
        """Yield index, micro-batch and inputs of each micro-batch, as a chunk of the stage takes them."""
        for index in range(self._count):
            if index not in self._ready:
                self._ready[index] = next(self._prepared)
            is_last = chunk == self._chunks - 1
            ready = self._ready.pop(index) if is_last else self._ready[index]
            yield index, ready.micro, ready.inputs


def run_pass(runners: list[nn.Module], work: Pass, names: list[str], forward_only: bool) -> dict[str, Tensor]:
    """Run every micro-batch forward, and backward unless ``forward_only``, through all stages.

    Args:
        runners: chunks of this rank's stage.
        work: the pass.
        names: quantities to return.
        forward_only: True to skip the backward pass.

    Returns:
        The named quantities as outputs of ``work.plan.source``, in host memory, on every stage.
    """
    # On the device until the last micro-batch: a copy to the host would wait for each.
    empty, device = work.plan.source.empty_outputs(names), work.copies.device
    outputs = {name: torch.zeros_like(output, device=device) for name, output in empty.items()}
    theirs = _reference_states(work)

    def finish(_: int, micro: MicroBatch, quantities: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        for name, target in outputs.items():
            if not micro.is_dummy:
                micro.scatter(quantities[name], target)
        nothing = torch.zeros((), dtype=torch.int, device=device)
        if work.loss_function is None:
            return nothing, nothing, None
        return loss_share(quantities, micro, work.denominators, work.loss_function, work.sums), nothing, None

    def head(index: int, inputs: DecoderInputs) -> Head:
        if work.model_plan.is_value_model:
            return ValueHead(inputs.positions)
        reference = None
        if work.reference is not None and index in theirs:
            reference = work.reference.last.head_weight(), theirs.pop(index)
        return LanguageHead(inputs.positions, work.model_plan, work.settings, work.head_chunk, reference)

    _run_schedule(runners, work, head, finish, forward_only, work.tape)
    mesh = work.model_plan.mesh
    if mesh.pipeline_size > 1:
        for name in names:
            dist.broadcast(outputs[name], mesh.stage_rank(mesh.pipeline_size - 1), group=mesh.pipeline_group)
    return {name: output.cpu() for name, output in outputs.items()}


def _reference_states(work: Pass) -> dict[int, Tensor]:
    """Return the reference's states before the response tokens, ``[n, h]``, by micro-batch; empty without a reference.

    The reference's stages run before the policy's, because two models cannot share one run of the pipeline. The states
    are kept in host memory, and only on the last stage.
    """
    states: dict[int, Tensor] = {}
    if work.reference is None:
        return states

    def finish(index: int, _: MicroBatch, quantities: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        hidden = quantities["hidden"]
        # On the computation's own stream, on which they come back, so that the host waits for neither copy.
        states[index] = work.copies.host_buffer(hidden.shape, hidden.dtype).copy_(hidden, non_blocking=True)
        nothing = torch.zeros((), dtype=torch.int, device=work.copies.device)
        return nothing, nothing, None

    with torch.no_grad(), work.reference_mode:
        chunks = list(work.reference.chunks)
        _run_schedule(chunks, work, lambda _, inputs: HiddenHead(inputs.positions), finish, True)
    return states


def _run_schedule(
    runners: list[nn.Module],
    work: Pass,
    head: Callable[[int, DecoderInputs], Head],
    finish: Callable[[int, MicroBatch, dict[str, Tensor]], tuple[Tensor, Tensor, None]],
    forward_only: bool,
    tape: RouterTape | None = None,
) -> None:
    """Run the micro-batches through all stages of a model by megatron-core's schedule.

    Args:
        runners: chunks of this rank's stage.
        work: the pass.
        head: returns the model's head for a micro-batch by its index and inputs.
        finish: receives index, micro-batch and the head's quantities on the last stage; returns the loss.
        forward_only: True to skip the backward pass.
        tape: the stage's routers, if they follow the pass; a reference's choose by themselves.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_attr_wrapped_model

    def forward(micro_batches: Iterator[tuple[int, MicroBatch, DecoderInputs]], model: Any) -> tuple[Any, Any]:
        index, micro, inputs = next(micro_batches)
        has_head = get_attr_wrapped_model(model, "post_process")
        with _routing(tape, work, micro, inputs):
            output = model(
                inputs.input_ids,
                inputs.position_ids,
                None,
                labels=head(index, inputs) if has_head else None,
                packed_seq_params=inputs.packed,
            )
            if tape is not None and work.record is not None:
                tape.record(micro, work.record)
        return output, partial(finish, index, micro)

    chunks, micros = len(runners), _Micros(work, len(runners))
    iterators = [micros.of(chunk) for chunk in range(chunks)]
    stages = work.model_plan.mesh.pipeline_size
    schedule: Any = get_forward_backward_func(pp_size=stages, vp_size=chunks if chunks > 1 else None)
    schedule(
        forward_step_func=forward,
        data_iterator=iterators if chunks > 1 else iterators[0],
        model=runners,
        num_microbatches=work.micro_batches,
        seq_length=1,  # micro-batches exchange their shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _routing(
    tape: RouterTape | None, work: Pass, micro: MicroBatch, inputs: DecoderInputs
) -> AbstractContextManager[None]:
    if tape is None:
        return nullcontext()
    from rollcast_megatron.router import stage_tokens

    tokens = stage_tokens(micro, inputs, work.model_plan.mesh, work.is_sequence_parallel, work.denominators.sequences)
    return tape.forward(tokens, 1.0 if torch.is_grad_enabled() else None)
