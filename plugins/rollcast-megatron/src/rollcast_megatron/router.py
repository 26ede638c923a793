"""The router of a layer with experts: megatron-core's, with the choices, the balance and the metrics of all engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from rollcast_engine.routing import RouterTape, routed_tokens

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

    from rollcast_engine.batching import MicroBatch
    from rollcast_engine.routing import RoutedTokens
    from rollcast_megatron.inputs import DecoderInputs
    from rollcast_megatron.layout import Mesh
    from rollcast_megatron.maps import Mixture

__all__ = ["TapeRouter", "attach_tape", "stage_tokens"]


class TapeRouter(TopKRouter):  # type: ignore[misc]
    """A router that chooses experts by a :class:`~rollcast_engine.routing.RouterTape`.

    Attributes:
        tape: tape of the engine; set by :func:`attach_tape`.
        layer: number of this layer among those with experts.
        expert_bias: bias of the experts' scores for the choice alone, float32 ``[experts]``, which is not trained; None
            for routers with a softmax.
    """

    tape: RouterTape
    layer: int
    expert_bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        del self.expert_bias
        bias = torch.zeros(self.num_experts) if config.moe_router_score_function == "sigmoid" else None
        self.expert_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: A002
        """Return weights and choice of each expert, ``[s * b, experts]``, for hidden states ``[s, b, h]``."""
        # Not megatron-core's product, which fails without Transformer Engine.
        if self.expert_bias is None:
            logits = nn.functional.linear(input, self.weight).view(-1, self.num_experts)
        else:
            logits = nn.functional.linear(input.float(), self.weight.float()).view(-1, self.num_experts)
        weights, chosen = self.tape.choose(self.layer, logits, self.expert_bias)
        spread = torch.zeros_like(logits).scatter(1, chosen, weights)
        return spread, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def attach_tape(
    stage: nn.Module, mixture: Mixture, mesh: Mesh, coefficient: float, is_sequence_parallel: bool
) -> RouterTape:
    """Return the tape of a stage's routers, after attaching it to them.

    Args:
        stage: the stage.
        mixture: experts of the whole model.
        mesh: this rank's place.
        coefficient: coefficient of the balance loss.
        is_sequence_parallel: True if tensor-parallel ranks share positions.
    """
    numbers = [layer for layer, has_experts in enumerate(mixture.layers) if has_experts]
    tape = RouterTape(
        layers=len(numbers),
        rule=mixture.rule,
        coefficient=coefficient,
        group=_shared_group(mesh, is_sequence_parallel),
        keeps=mesh.pipeline_size > 1,
    )
    for module in stage.modules():
        if isinstance(module, TapeRouter):
            number: Any = module.layer_number
            module.tape, module.layer = tape, numbers.index(number - 1)
    return tape


def _shared_group(mesh: Mesh, is_sequence_parallel: bool) -> Any:
    """Return the process group of the ranks that have other positions of the same rows; None if there are none."""
    if mesh.context_size == 1:
        return mesh.tensor_group if is_sequence_parallel else None
    if not is_sequence_parallel:
        return mesh.context_group
    from megatron.core import parallel_state

    return parallel_state.get_tensor_and_context_parallel_group()


def stage_tokens(
    micro: MicroBatch, inputs: DecoderInputs, mesh: Mesh, is_sequence_parallel: bool, sequences: float
) -> RoutedTokens:
    """Return the tokens of a micro-batch as a layer of this rank sees them: ``[s, b]``, a part of ``s`` if shared.

    Args:
        micro: the micro-batch.
        inputs: the decoder's inputs.
        mesh: this rank's place.
        is_sequence_parallel: True if tensor-parallel ranks share positions.
        sequences: rows of the mini-batch with a trained token.
    """
    rows, places = inputs.rows.t(), inputs.position_ids.t()
    present = (micro.model_inputs["attention_mask"] > 0).sum(1)
    places = places.where((rows >= 0) & (places < present[rows]), -1)
    if is_sequence_parallel:
        size, rank = len(rows) // mesh.tensor_size, mesh.tensor_rank
        rows, places = (column[rank * size : (rank + 1) * size] for column in (rows, places))
    return routed_tokens(micro, rows.clamp(min=0).reshape(-1), places.reshape(-1), sequences)
