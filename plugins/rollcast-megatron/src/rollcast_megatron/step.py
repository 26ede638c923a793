"""Passing a rank's rows through the pipeline: micro-batches, megatron-core's schedule, outputs in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast_engine.batching import dummy_micro_batch
from rollcast_engine.loss import loss_share
from rollcast_megatron.heads import LanguageHead, ValueHead
from rollcast_megatron.inputs import decoder_inputs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from rollcast.contracts.algorithm import Denominators
    from rollcast.contracts.engine import ForwardSettings, LossFunction
    from rollcast_engine.batching import BatchPlan, MicroBatch
    from rollcast_engine.reduce import MetricSums
    from rollcast_engine.routing import RouterTape, RoutingRecord
    from rollcast_megatron.build import Plan
    from rollcast_megatron.inputs import DecoderInputs

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
        device: device of the model.
        reference: stage of the reference model for ``vocabulary_kl``; None without one.
        sums: accumulator of the metrics, on the last stage.
        tape: routers of the stage; None if the model has no experts.
        record: record of their choices; None if it is not requested.
        is_sequence_parallel: True if tensor-parallel ranks share positions.
        micro_batches: number of micro-batches to run.
    """

    plan: BatchPlan
    model_plan: Plan
    denominators: Denominators
    loss_function: LossFunction | None
    settings: ForwardSettings
    head_chunk: int
    device: torch.device
    reference: nn.Module | None
    sums: MetricSums
    tape: RouterTape | None
    record: RoutingRecord | None
    is_sequence_parallel: bool
    micro_batches: int

    def micro_batch(self, index: int) -> MicroBatch:
        """Return micro-batch ``index``; beyond the last one, a dummy that does not count."""
        if index < len(self.plan):
            return self.plan.micro_batch(index, self.device)
        return dummy_micro_batch(self.device)


def run_pass(runner: nn.Module, work: Pass, names: list[str], forward_only: bool) -> dict[str, Tensor]:
    """Run every micro-batch forward, and backward unless ``forward_only``, through all stages.

    Returns:
        The named quantities as outputs of ``work.plan.source``, in host memory, on every stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    outputs = work.plan.source.empty_outputs(names)
    # A rank without rows still takes part in the gradient reduction of its data-parallel group.
    count = max(work.micro_batches, 1)
    schedule: Any = get_forward_backward_func()
    schedule(
        forward_step_func=lambda micros, model: _forward(micros, model, work, outputs),
        data_iterator=(work.micro_batch(index) for index in range(count)),
        model=[runner],
        num_microbatches=count,
        seq_length=1,  # micro-batches exchange their shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
    mesh = work.model_plan.mesh
    if mesh.pipeline_size > 1:
        for name in names:
            output = outputs[name].to(work.device)
            dist.broadcast(output, mesh.stage_rank(mesh.pipeline_size - 1), group=mesh.pipeline_group)
            outputs[name] = output.cpu()
    return outputs


def _forward(micros: Iterator[MicroBatch], model: Any, work: Pass, outputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """Run one stage's forward of the next micro-batch; return its output and the function that computes the loss."""
    micro = next(micros)
    inputs = decoder_inputs(micro, _width_multiple(work))
    head: LanguageHead | ValueHead
    if work.model_plan.is_value_model:
        head = ValueHead(inputs.positions)
    else:
        head = LanguageHead(inputs, work.model_plan, work.settings, work.head_chunk, work.reference)
    with _routing(work, micro, inputs):
        output = model(inputs.input_ids, inputs.position_ids, None, labels=head)
        if work.tape is not None and work.record is not None:
            work.tape.record(micro, work.record)

    def finish(given: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        for name, target in outputs.items():
            if not micro.is_dummy:
                micro.scatter(given[name], target)
        nothing = torch.zeros((), dtype=torch.int)
        if work.loss_function is None:
            return nothing, nothing, None
        return loss_share(given, micro, work.denominators, work.loss_function, work.sums), nothing, None

    return output, finish


def _routing(work: Pass, micro: MicroBatch, inputs: DecoderInputs) -> AbstractContextManager[None]:
    if work.tape is None:
        return nullcontext()
    from rollcast_megatron.router import stage_tokens

    shared, sequences = work.is_sequence_parallel, work.denominators.sequences
    tokens = stage_tokens(micro, inputs.input_ids, work.model_plan, shared, sequences)
    return work.tape.forward(tokens, 1.0 if torch.is_grad_enabled() else None)


def _width_multiple(work: Pass) -> int:
    """Return the multiple for row widths: under sequence parallelism, tensor-parallel ranks share positions evenly."""
    return work.model_plan.mesh.tensor_size
