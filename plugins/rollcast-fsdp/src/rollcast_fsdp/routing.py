"""The routers of a transformers model with experts, attached to the tape of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollcast_engine.keys import EngineKeyError
from rollcast_engine.routing import RouterTape, RoutingRule, routed_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.routing import RoutedTokens
    from rollcast_fsdp.schemas import FsdpConfig
    from rollcast_fsdp.step import ForwardInputs

__all__ = ["attach_tape", "find_routers", "layer_tokens"]

#: Attributes of a router; in transformers 4 the block with the experts has the sizes too, and no weight of its own.
_ATTRIBUTES = ("top_k", "num_experts", "norm_topk_prob", "weight")
#: Buffer of the routers that choose by sigmoids.
_BIAS = "e_score_correction_bias"


def find_routers(module: nn.Module) -> list[Any]:
    """Return the routers of a model in the order of its layers.

    These are modules as in Qwen3-MoE and DeepSeek-V3 of transformers 5, which return logits, weights and experts.
    """
    return [layer for layer in module.modules() if all(hasattr(layer, name) for name in _ATTRIBUTES)]


def attach_tape(module: nn.Module, config: FsdpConfig, group: Any) -> RouterTape | None:
    """Return the tape of a model's routers, after attaching it to them; None if there are none.

    Args:
        module: the model.
        config: keys of the engine.
        group: process group of the ranks that share rows; None if each has whole rows.

    Raises:
        EngineKeyError: ``router_aux_loss_coef`` is set, but there are no routers.
    """
    routers = find_routers(module)
    if not routers:
        if config.router_aux_loss_coef:
            raise EngineKeyError(
                "router_aux_loss_coef",
                f"is {config.router_aux_loss_coef}, but the model has no routers that the engine knows: it needs a "
                "mixture of experts such as Qwen3-MoE, and transformers 5; set it to 0",
            )
        return None
    tape = RouterTape(len(routers), _rule(routers[0]), config.router_aux_loss_coef, group)
    for layer, router in enumerate(routers):
        router.register_forward_hook(_Attached(tape, layer))
    return tape


def _rule(router: Any) -> RoutingRule:
    """Return the rule of a router by its attributes; :class:`_Attached` checks it by the router's own output."""
    return RoutingRule(
        experts=int(router.num_experts),
        top_k=int(router.top_k),
        normalize=bool(router.norm_topk_prob),
        sigmoid=hasattr(router, _BIAS),
        factor=float(getattr(router, "routed_scaling_factor", 1.0)),
    )


class _Attached:
    """Hook that notes the choices of a layer's router on a tape, and replaces them by recorded ones.

    The router's own output stands otherwise, so that a model computes what it does without the engine.
    """

    def __init__(self, tape: RouterTape, layer: int) -> None:
        self._tape = tape
        self._layer = layer
        self._is_checked = False

    # Not traced by torch.compile: the tape changes with each call.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, router: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not self._tape.is_active:
            return None
        logits, weights, chosen = output
        if not self._is_checked:
            self._check(router, logits.detach(), weights.detach(), chosen)
        if self._tape.problem:
            return None
        return (logits, *self._tape.choose(self._layer, logits, own=(weights, chosen)))

    def _check(self, router: nn.Module, logits: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Compare the router's weights with those of the rule, once; routers of another rule are left alone."""
        rule, tolerance = self._tape.rule, 1e-4 if weights.dtype == torch.float32 else 2e-2
        expected = rule.weigh(rule.scores(logits), chosen)
        self._is_checked = True
        if not torch.allclose(weights.float(), expected, rtol=tolerance, atol=tolerance):
            self._tape.refuse(f"{type(router).__name__} weighs experts neither by a softmax nor by sigmoids")


def layer_tokens(inputs: ForwardInputs, sequences: float) -> RoutedTokens:
    """Return the tokens of a micro-batch as a layer of this rank sees them.

    Args:
        inputs: the micro-batch, on the device of the model.
        sequences: rows of the mini-batch with a trained token.
    """
    micro, pack = inputs.micro, inputs.pack
    if pack is not None:
        return routed_tokens(micro, pack.row_numbers, pack.token_numbers, sequences)
    # The last token predicts nothing, and the model does not see it.
    present = (micro.model_inputs["attention_mask"] > 0)[:, :-1]
    places = (present.cumsum(1) - 1).where(present, -1)
    rows = torch.arange(len(present), device=present.device).unsqueeze(1).expand_as(present)
    return routed_tokens(micro, rows.reshape(-1), places.reshape(-1), sequences)
