"""One pass over each distinct prompt, for batches with several responses per prompt.

Axes: ``B`` rows, ``U`` distinct prompts, ``P`` prompt and ``T`` response positions, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rollcast_engine.keys import EngineKeyError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["shared_prompt_logits"]


def shared_prompt_logits(
    module: nn.Module, model_inputs: dict[str, Tensor], response_length: int, extra: dict[str, Any]
) -> Tensor | None:
    """Return the logits that predict the response tokens, ``[B, T, V]``; None if every row has its own prompt.

    The responses continue from the keys and values of their prompt. The gradient flows back through them and equals
    that of a pass over whole rows, up to rounding.

    Args:
        module: a causal LM of transformers with a KV cache, which gradient checkpointing disables.
        model_inputs: ``input_ids``, ``attention_mask`` and ``position_ids``, int64 ``[B, P + T]``.
        response_length: ``T``.
        extra: ``logits_to_keep=1``, if the module supports it.

    Raises:
        EngineKeyError: the model returns no cache.
    """
    width = model_inputs["input_ids"].size(1) - response_length
    prompts = torch.cat([column[:, :width] for column in model_inputs.values()], 1)
    distinct, source = torch.unique(prompts, dim=0, return_inverse=True)
    if len(distinct) == len(prompts):
        return None
    unique_inputs = dict(zip(model_inputs, distinct.split(width, 1), strict=True))
    output: Any = module(**unique_inputs, use_cache=True, **extra)
    first: Tensor = output.logits[:, -1:][source]
    if response_length == 1:
        return first
    cache = output.past_key_values
    if cache is None:
        problem = f"is true, but {type(module).__name__} returns no KV cache; set it to false"
        raise EngineKeyError("share_prompts", problem)
    cache.reorder_cache(source)
    # The last token predicts nothing.
    rest: Any = module(
        input_ids=model_inputs["input_ids"][:, width:-1],
        attention_mask=model_inputs["attention_mask"][:, :-1],
        position_ids=model_inputs["position_ids"][:, width:-1],
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first, rest.logits], 1)
