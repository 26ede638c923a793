"""The forward of one micro-batch: from its tokens to per-token quantities.

Axes: ``b`` rows, ``t`` response positions, ``V`` vocabulary, ``M`` scored positions, which are all ``b * t`` or only
those under the mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

from rollcast_engine.hf import ValueModel
from rollcast_fsdp.fused import CHUNK_SIZE, linear_stats
from rollcast_fsdp.head import VocabularyHead
from rollcast_fsdp.logprobs import (
    at_temperature,
    keep_logits,
    response_logits,
    response_states,
    response_values,
    sum_pi_squared,
    token_entropy,
    token_log_probs,
)
from rollcast_fsdp.packing import Pack, pack_rows
from rollcast_fsdp.ulysses import sum_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from rollcast.contracts.algorithm import KlPenalty
    from rollcast.contracts.engine import ForwardSettings
    from rollcast_engine.batching import MicroBatch
    from rollcast_fsdp.attention import PackedRows
    from rollcast_fsdp.schemas import FsdpConfig
    from rollcast_fsdp.sharding import Sharding
    from rollcast_fsdp.varlen import VarlenKernel

__all__ = ["ForwardInputs", "Score", "Scored", "TokenForward"]


@dataclass(frozen=True)
class Scored:
    """Outputs of a forward at the scored positions.

    Attributes:
        tokens: int64 ``[M]``, the token after each position.
        targets: int64 ``[M]``, positions of these tokens in the responses ``[b * t]``; None if they are all of them in
            order.
        logits: float32 ``[M, V]``, divided by the temperature; None if ``head`` is set.
        states: input of the vocabulary head, ``[M, H]``; None if ``logits`` is set.
        head: vocabulary head to compute logits with; None if ``logits`` is set.
        chunk_size: positions whose logits ``head`` computes at a time.
    """

    tokens: Tensor
    targets: Tensor | None
    logits: Tensor | None
    states: Tensor | None = None
    head: VocabularyHead | None = None
    chunk_size: int = CHUNK_SIZE


@dataclass(frozen=True)
class ForwardInputs:
    """A micro-batch, and its rows as one sequence if the model takes them so."""

    micro: MicroBatch
    pack: Pack | None = None


#: Function that runs a language model's forward at a temperature, such as :meth:`TokenForward.score`.
Score: TypeAlias = "Callable[[ForwardInputs, float], Scored]"


class TokenForward:
    """Forward of one module from micro-batches to per-token quantities, configured by the engine's keys.

    Args:
        module: the model.
        config: keys of the engine.
        sharding: sharding of the model; None on a single rank.
        kernel: kernel of attention within packs; None for SDPA.
        shares_prompts: False if prompts cannot be shared whatever the keys.

    Raises:
        ConfigError: the module does not support a key's value.
    """

    def __init__(
        self,
        module: nn.Module,
        config: FsdpConfig,
        sharding: Sharding | None,
        kernel: VarlenKernel | None = None,
        shares_prompts: bool = True,
    ) -> None:
        self.module = module
        self._kernel = kernel
        self.packs = config.use_remove_padding
        self.is_value_model = isinstance(module, ValueModel)
        self._group = None if sharding is None else sharding.sequence_group
        self._share_prompts = config.share_prompts and shares_prompts and sharding is None
        fused = config.use_fused_kernels and not self.is_value_model
        self._head = VocabularyHead(module) if fused else None
        self._chunk_size = config.log_probs_chunk_size

    def layout(self) -> tuple[bool, bool, int]:
        """Return the properties that two forwards must share to be compared position by position."""
        parts = 1 if self._group is None else torch.distributed.get_world_size(self._group)
        return self.packs, self._head is not None, parts

    def prepare(self, micro: MicroBatch) -> ForwardInputs:
        """Return the inputs of a pass in host memory, where packing waits for nothing."""
        return ForwardInputs(micro, pack_rows(micro, self._group) if self.packs else None)

    def quantities(
        self, inputs: ForwardInputs, settings: ForwardSettings, reference: Score | None, penalty: KlPenalty | None
    ) -> dict[str, Tensor]:
        """Return ``values``, or ``log_probs`` and the other requested quantities: float32 ``[b, t]``, zero outside the
        mask.

        Args:
            inputs: result of :meth:`prepare`, on the model's device.
            settings: settings of the pass.
            reference: forward of the model that ``vocabulary_kl`` is measured against; its layout equals this one's.
            penalty: KL penalty that measures ``vocabulary_kl``.
        """
        micro = inputs.micro
        if self.is_value_model:
            return {"values": self._values(inputs)}
        scored = self.score(inputs, settings.temperature)
        outputs = _statistics(scored, settings)
        if reference is not None and penalty is not None:
            other = reference(inputs, settings.temperature)
            outputs["vocabulary_kl"] = _compare(scored, other, settings.temperature, penalty)
        return {name: self._place(values, scored.targets, micro) for name, values in outputs.items()}

    def score(self, inputs: ForwardInputs, temperature: float) -> Scored:
        """Run one forward of a language model."""
        if inputs.pack is not None:
            return self._score_pack(inputs.pack, temperature)
        micro = inputs.micro
        length = micro.responses.size(1)
        if self._head is None:
            logits = response_logits(self.module, micro.model_inputs, length, temperature, self._share_prompts)
            # A row with a blank image may follow the micro-batch's own.
            return Scored(micro.responses.flatten(), None, logits[: len(micro.responses)].flatten(0, 1))
        with self._head.held_back():
            states = self._head.states(response_states(self.module, micro.model_inputs, length))
        hidden = states[: len(micro.responses), -length:].flatten(0, 1)[micro.trained]
        return Scored(
            micro.responses.flatten()[micro.trained], micro.trained, None, hidden, self._head, self._chunk_size
        )

    def _score_pack(self, pack: Pack, temperature: float) -> Scored:
        inputs: dict[str, Any] = {
            "input_ids": pack.input_ids,
            "position_ids": pack.position_ids,
            "attention_mask": None,
            "packed_rows": self._rows(pack),
            "use_cache": False,
        }
        if self._head is not None:
            with self._head.held_back():
                states = self._head.states(self.module(**inputs).logits)
            kept_states = states[0, pack.places]
            return Scored(pack.tokens, pack.targets, None, kept_states, self._head, self._chunk_size)
        arguments = keep_logits(self.module, pack.places)
        logits: Tensor = self.module(**inputs, **arguments).logits[0]
        logits = at_temperature(logits if arguments else logits[pack.places], temperature)
        return Scored(pack.tokens, pack.targets, logits)

    def _rows(self, pack: Pack) -> PackedRows:
        # Not in prepare: a reference computes on the same pack, with a kernel of its own.
        return replace(pack.rows, kernel=self._kernel)

    def _values(self, inputs: ForwardInputs) -> Tensor:
        micro, pack = inputs.micro, inputs.pack
        if pack is None:
            values = response_values(self.module, micro.model_inputs, micro.responses.size(1))
            return values.where(micro.response_mask > 0, 0.0)
        whole: Tensor = self.module(
            input_ids=pack.input_ids,
            attention_mask=None,
            position_ids=pack.position_ids,
            packed_rows=self._rows(pack),
        )
        return self._place(whole[0, pack.places, 0].float(), pack.targets, micro)

    def _place(self, values: Tensor, targets: Tensor | None, micro: MicroBatch) -> Tensor:
        """Return values ``[M]`` at their positions in ``[b, t]``, summed over the ranks that share the rows."""
        chosen = micro.response_mask > 0
        if targets is None:
            return values.view(chosen.shape).where(chosen, 0.0)
        placed = values.new_zeros(chosen.numel()).index_copy(0, targets, values).view(chosen.shape)
        return placed if self._group is None else sum_over(placed, self._group)


def _statistics(scored: Scored, settings: ForwardSettings) -> dict[str, Tensor]:
    """Return log-probs, and entropy and Σp² if requested, ``[M]``."""
    if scored.head is not None and scored.states is not None:
        stats = linear_stats(
            scored.states,
            scored.head.weight,
            scored.head.bias,
            scored.tokens,
            settings.temperature,
            settings.calculate_entropy,
            settings.calculate_sum_pi_squared,
            scored.chunk_size,
        )
        quantities = {"log_probs": stats.log_probs}
        if settings.calculate_entropy:
            quantities["entropy"] = stats.entropy
        if settings.calculate_sum_pi_squared:
            quantities["sum_pi_squared"] = stats.sum_pi_squared
        return quantities
    logits = _required(scored.logits)
    if torch.is_grad_enabled():
        return _of_logits(logits, scored.tokens, settings)
    # Without a gradient nothing is kept, so the memory beside the logits is that of a chunk.
    chunks = zip(logits.split(scored.chunk_size), scored.tokens.split(scored.chunk_size), strict=True)  # type: ignore[no-untyped-call]
    parts = [_of_logits(*chunk, settings) for chunk in chunks]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of_logits(logits: Tensor, tokens: Tensor, settings: ForwardSettings) -> dict[str, Tensor]:
    quantities = {"log_probs": token_log_probs(logits, tokens)}
    if settings.calculate_entropy:
        quantities["entropy"] = token_entropy(logits)
    if settings.calculate_sum_pi_squared:
        quantities["sum_pi_squared"] = sum_pi_squared(logits)
    return quantities


def _compare(scored: Scored, other: Scored, temperature: float, penalty: KlPenalty) -> Tensor:
    """Return the penalty between two models' distributions, ``[M]``."""
    head, other_head = scored.head, other.head
    if head is None or other_head is None:
        return _penalty(penalty, _required(scored.logits), _required(other.logits))
    states, others = _required(scored.states), _required(other.states)

    def compare(ours: Tensor, theirs: Tensor) -> Tensor:
        both = (
            torch.nn.functional.linear(names, layer.weight, layer.bias).float() / temperature
            for names, layer in ((ours, head), (theirs, other_head))
        )
        return _penalty(penalty, *both)

    size = scored.chunk_size
    parts: list[Tensor] = [
        checkpoint(compare, ours, theirs, use_reentrant=False, preserve_rng_state=False)
        for ours, theirs in zip(torch.split(states, size), torch.split(others, size), strict=True)
    ]
    return torch.cat(parts)


def _penalty(penalty: KlPenalty, ours: Tensor, theirs: Tensor) -> Tensor:
    return penalty(ours.unsqueeze(0), theirs.unsqueeze(0)).squeeze(0)


def _required(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("cannot compare two models if one returns logits and the other hidden states")
    return tensor
