"""Decoding one batch of rows with a transformers causal LM and a KV cache, token by token.

Axes: ``B`` rows, ``U`` distinct prompts, ``P`` prompt positions (left-padded), ``T`` new tokens, ``V`` vocabulary,
``S`` stop ids of a row.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rollcast.contracts.rollout import SamplingParams
from rollcast_data.vision.model_inputs import ImageInputs
from rollcast_hf.routing import RoutingRecorder
from rollcast_hf.sampling import TokenSampler
from rollcast_serving.stops import StopMatcher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DecodeRow", "DecodedRow", "Decoding"]

Reason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence to generate: the prompt (int32 ids), its sampling parameters, its stops, and its images, encoded."""

    prompt: array[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    matcher: Callable[[], StopMatcher | None] = lambda: None
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodedRow:
    """One generated sequence; the three arrays have the same length.

    Attributes:
        token_ids, log_probs, versions: int32, float32 and int64.
        finish_reason: as in :class:`~rollcast.contracts.rollout.RolloutSequence`.
        broken: index of the first token with non-finite logits; None if all are finite.
        routed_experts: choices of the routers; None if they are not recorded.
    """

    token_ids: array[int]
    log_probs: array[float]
    versions: array[int]
    finish_reason: Reason
    broken: int | None = None
    routed_experts: NDArray[np.int16] | None = None


class Decoding:
    """The state of a batch between two steps.

    Each :meth:`step` is one forward pass and adds one token to every unfinished row, so that a caller can do other
    work, or end rows, between steps. Run it without gradients.

    Args:
        rows: at least one row.
        device: device of the module.
        vocab_size: ``V`` of the module's logits.
        streams: random streams of the rows, int64 ``[B]`` on ``device``.
        records_routing: True to record the choices of the module's routers.
        images: image processor of a vision-language model; None for a model of text.
    """

    def __init__(
        self,
        rows: Sequence[DecodeRow],
        device: torch.device,
        vocab_size: int,
        streams: Tensor,
        records_routing: bool = False,
        images: ImageInputs | None = None,
    ) -> None:
        self._device = device
        self._routing = RoutingRecorder([len(row.prompt) for row in rows]) if records_routing else None
        prompts = _pad_prompts(rows, device)
        ids, mask, source = prompts.ids, prompts.mask, prompts.source
        self._images = images if any(prompts.images) else None
        self._placeholders = images
        self._seen = prompts.images
        #: Number by which the positions of new tokens differ from the number of tokens before them, int64 ``[U]``.
        self._shifts = torch.zeros(len(ids), dtype=torch.int64, device=device)
        self._source = source
        self._next_ids = ids
        self._prompt_width = ids.shape[1]
        limits = [row.sampling.max_tokens for row in rows]
        limit, count = max(limits), len(rows)
        # Without padding the model derives the same mask and positions itself, and faster.
        padded = self._images is not None or not bool(mask.all())
        self._mask = torch.cat([mask, mask.new_ones(len(mask), limit)], dim=1) if padded else None
        self._lengths = mask.sum(-1)
        self._sampler = TokenSampler([row.sampling for row in rows], vocab_size, streams, [row.prompt for row in rows])
        self._cache: Any = None
        self._takes: dict[str, bool] = {}
        self._step = 0
        self._versions = array("q")
        #: Stop-string matchers by row; rows without stop strings have none.
        self._matchers = {i: matcher for i, row in enumerate(rows) if (matcher := row.matcher()) is not None}
        self._stopped = torch.zeros(count, dtype=torch.bool, device=device)
        self._all_stops = _pad_stops(rows, device)
        self._tokens = torch.zeros(limit, count, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(limit, count, device=device)
        self._all_ends = torch.zeros(count, dtype=torch.int64, device=device)
        self._aborted = torch.zeros(count, dtype=torch.bool, device=device)
        # The active rows; limit, stops, length so far and done flag of each.
        self._active = torch.arange(count, device=device)
        self._limits = torch.tensor(limits, device=device)
        self._stops = self._all_stops
        self._ends = self._all_ends.clone()
        self._done = torch.zeros(count, dtype=torch.bool, device=device)
        self._remaining = count

    @property
    def done(self) -> bool:
        """True if no row needs another token."""
        return self._remaining == 0

    def step(self, module: nn.Module, version: int) -> None:
        """Add one token to every unfinished row.

        Args:
            module: a causal LM in eval mode, the same in every step.
            version: version of its current weights.
        """
        logits = self._forward(module) if self._step else self._prefill(module)
        tokens, log_probs = self._sampler(logits)
        self._versions.append(version)
        if len(self._active) == self._tokens.shape[1]:
            self._tokens[self._step] = tokens
            self._log_probs[self._step] = log_probs
        else:
            self._tokens[self._step, self._active] = tokens
            self._log_probs[self._step, self._active] = log_probs
        self._step += 1
        self._next_ids = tokens[:, None]
        self._end((self._next_ids == self._stops).any(1) | (self._limits <= self._step))
        if self._matchers:
            self._match(tokens)
        if 0 < self._remaining * 2 <= len(self._active):
            self._drop_done()

    def _match(self, tokens: Tensor) -> None:
        """End the rows whose new token completes a stop string."""
        new = zip(self._active.tolist(), tokens.tolist(), strict=True)
        stopped = [row in self._matchers and self._matchers[row].add(token) for row, token in new]
        ended = torch.tensor(stopped, dtype=torch.bool, device=self._device)
        # Rows that finished earlier must not be marked; a row that reaches its length limit with this token counts as
        # stopped.
        self._stopped[self._active[ended & (self._ends.eq(self._step) | self._done.logical_not())]] = True
        self._end(ended)

    def abort(self, rows: Iterable[int]) -> None:
        """End these rows (numbers in the batch) with their tokens so far; finished rows are unchanged."""
        chosen = torch.isin(self._active, torch.tensor(list(rows), dtype=torch.int64, device=self._device))
        self._aborted[self._active[chosen & ~self._done]] = True
        self._end(chosen)

    def results(self) -> list[DecodedRow]:
        """Return every row's sequence, in the given order; call it once, after the last step."""
        self._all_ends[self._active] = self._ends
        log_probs = self._log_probs[: self._step].T
        used = torch.arange(self._step, device=self._device) < self._all_ends[:, None]
        finite = log_probs.isfinite() | used.logical_not()
        broken = torch.where(finite.all(1), -1, finite.int().argmin(1) if self._step else -1).tolist()
        tokens_by_row = self._tokens[: self._step].T.to("cpu", torch.int32).contiguous().numpy()
        log_probs_by_row = log_probs.to("cpu", torch.float32).contiguous().numpy()
        ends = self._all_ends.tolist()
        routes = [None] * len(ends) if self._routing is None else self._routing.results(ends)
        finished = zip(ends, self._find_reasons(), broken, routes, strict=True)
        return [
            DecodedRow(
                array("i", tokens_by_row[row, :end].tobytes()),
                array("f", log_probs_by_row[row, :end].tobytes()),
                self._versions[:end],
                reason,
                None if place < 0 else place,
                routed,
            )
            for row, (end, reason, place, routed) in enumerate(finished)
        ]

    def _find_reasons(self) -> list[Reason]:
        last = self._tokens.gather(0, (self._all_ends - 1).clamp(min=0)[None])[0]
        codes = ((last[:, None] == self._all_stops).any(1) | self._stopped).int()
        codes[self._aborted] = 2
        names: tuple[Reason, ...] = ("length", "stop", "abort")
        return [names[code] for code in codes.tolist()]

    def _end(self, ended: Tensor) -> None:
        self._ends = torch.where(ended & ~self._done, self._step, self._ends)
        self._done |= ended
        self._remaining = len(self._active) - int(self._done.sum())

    def _prefill(self, module: nn.Module) -> Tensor:
        """Return logits ``[B, V]`` after the prompts, each distinct prompt computed once."""
        # Not every transformers model supports positions and the cut to the last logits.
        accepted = inspect.signature(module.forward).parameters
        self._takes = {name: name in accepted for name in ("position_ids", "logits_to_keep")}
        positions = None if self._mask is None else self._mask[:, : self._prompt_width].cumsum(-1).sub_(1).clamp_(min=0)
        logits = self._call(module, positions) if self._images is None else self._see(module, self._images)
        if self._routing is not None:
            self._routing.keep_prompts(self._source)
        if len(self._source) != len(logits):
            self._cache.reorder_cache(self._source)
            self._keep_context(self._source)
            logits = logits[self._source]
        return logits

    def _see(self, module: nn.Module, images: ImageInputs) -> Tensor:
        """Return the logits after prompts of which some have images."""
        mask = self._mask[:, : self._prompt_width].cpu() if self._mask is not None else None
        if mask is None:
            raise TypeError("prompts with images need a mask")
        positions = images.positions(self._next_ids.cpu(), mask, self._seen)
        self._shifts = (positions.amax((0, 2)) + 1 - mask.sum(-1)).to(self._device)
        pixels, grids = images.pixels(image for row in self._seen for image in row)
        inputs = {"pixel_values": pixels.to(self._device), "image_grid_thw": grids.to(self._device)}
        return self._call(module, positions.to(self._device), inputs)

    def _forward(self, module: nn.Module) -> Tensor:
        """Return logits ``[b, V]`` after the newest token of the active rows."""
        positions = None
        if self._mask is not None:
            # A finished row stays in the batch for a while: its position must not exceed the model's limit.
            new = torch.minimum(self._limits, self._limits.new_tensor(self._step))
            positions = (self._lengths + self._shifts + new - 1)[:, None]
        if self._placeholders is not None:
            # A sampled placeholder has no image; the engine reads it in the same way.
            self._next_ids = self._placeholders.neutralize(self._next_ids)
        logits = self._call(module, positions)
        if self._routing is not None:
            self._routing.keep_step(self._active, self._tokens.shape[1])
        return logits

    def _call(self, module: nn.Module, positions: Tensor | None, seen: Mapping[str, Tensor] | None = None) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": self._next_ids, "past_key_values": self._cache, "use_cache": True}
        inputs.update(seen or {})
        if self._mask is not None:
            inputs["attention_mask"] = self._mask[:, : self._prompt_width + self._step]
            if self._takes["position_ids"]:
                inputs["position_ids"] = positions
        if self._takes["logits_to_keep"]:
            inputs["logits_to_keep"] = 1
        with nullcontext() if self._routing is None else self._routing.listening(module):
            output = module(**inputs)
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits

    def _drop_done(self) -> None:
        """Continue with unfinished rows only: attention's cost is proportional to the number of rows."""
        keep = (~self._done).nonzero()[:, 0]
        self._all_ends[self._active] = self._ends
        self._cache.reorder_cache(keep)
        self._keep_context(keep)
        self._sampler.keep(keep)
        self._next_ids = self._next_ids[keep]
        self._active, self._limits, self._stops = self._active[keep], self._limits[keep], self._stops[keep]
        self._ends, self._done = self._ends[keep], self._done[keep]

    def _keep_context(self, rows: Tensor) -> None:
        self._lengths, self._shifts = self._lengths[rows], self._shifts[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Distinct prompts and their mask, int64 ``[U, P]`` left-padded, their images, and each row's prompt, ``[B]``."""

    ids: Tensor
    mask: Tensor
    source: Tensor
    images: list[tuple[bytes, ...]]


def _pad_prompts(rows: Sequence[DecodeRow], device: torch.device) -> _Prompts:
    numbers: dict[tuple[bytes, ...], int] = {}
    images: list[tuple[bytes, ...]] = []
    known: dict[int, int] = {}
    distinct: list[array[int]] = []
    source: list[int] = []
    for row in rows:
        number = known.get(id(row))
        if number is None:
            number = known[id(row)] = numbers.setdefault((row.prompt.tobytes(), *row.images), len(numbers))
            if number == len(distinct):
                distinct.append(row.prompt)
                images.append(row.images)
        source.append(number)
    flat: array[int] = array("i")
    for prompt in distinct:
        flat.extend(prompt)
    lengths = torch.tensor([len(prompt) for prompt in distinct])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)  # ids under a zero mask are never read
    ids[mask] = torch.frombuffer(flat, dtype=torch.int32).long()
    return _Prompts(ids.to(device), mask.long().to(device), torch.tensor(source, device=device), images)


def _pad_stops(rows: Sequence[DecodeRow], device: torch.device) -> Tensor:
    """Return stop ids int64 ``[B, S]``, padded with -1, which is not a token."""
    width = max(len(row.stop_ids) for row in rows)
    filled = [(*row.stop_ids, *([-1] * (width - len(row.stop_ids)))) for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device).view(len(rows), width)
