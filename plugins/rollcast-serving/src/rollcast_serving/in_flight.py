"""Requests in flight when new weights arrive (``rollout.update_in_flight``): finished first, or interrupted."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rollcast.contracts.rollout import BaseRollout, EngineLoad, RolloutOutput, RolloutRequest, RolloutSequence
from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast_serving.requests import as_tokens

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InFlightRollout", "hold_requests"]

T = TypeVar("T")


def hold_requests(rollout: BaseRollout, policy: str) -> BaseRollout:
    """Return the rollout that a replica serves under a policy of ``rollout.update_in_flight``."""
    if policy == "continue" and rollout.capabilities.update_in_flight:
        return rollout
    return InFlightRollout(rollout, interrupts=policy == "interrupt")


class InFlightRollout(BaseRollout):
    """A rollout whose engine has no request in flight during a weight update; requests that arrive then wait.

    An interrupted request continues as a new request whose prompt ends with its own tokens. The new seed is derived
    from the first one and the number of tokens, so that no random numbers repeat. An engine finds stop texts in new
    tokens only, so the last tokens, which may begin a stop text, are sampled again.

    Args:
        inner: the engine's rollout; needs ``capabilities.abort`` to be interrupted.
        interrupts: True to abort requests in flight and continue them after the update; False to wait for their end.
    """

    def __init__(self, inner: BaseRollout, interrupts: bool) -> None:
        super().__init__(inner.setup)
        self.capabilities = inner.capabilities  # type: ignore[misc]  # the wrapped rollout's capabilities
        self._inner, self._interrupts = inner, interrupts
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._numbers = itertools.count()
        #: The callers' ids of requests in flight, by the ids that the engine knows.
        self._in_flight: dict[str, str] = {}
        #: The callers' ids of all requests, and of those that a caller has aborted.
        self._known: set[str] = set()
        self._ended: set[str] = set()

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt, across any number of updates; see the contract for errors."""
        self._known.add(request.request_id)
        try:
            output, was_cut = await self._generate(request)
            if not was_cut:
                return output
            rows = enumerate(output.sequences)
            sequences = await asyncio.gather(*(self._go_on(request, place, sequence) for place, sequence in rows))
            return replace(output, sequences=sequences)
        finally:
            self._known.discard(request.request_id)
            self._ended.discard(request.request_id)

    async def _generate(self, request: RolloutRequest) -> tuple[RolloutOutput, bool]:
        """Return the engine's output, and True if an update may have cut it."""
        await self._open.wait()
        if request.request_id in self._ended:
            empty = RolloutSequence(array("i"), array("f"), "abort", array("q"))
            return RolloutOutput(request.request_id, [empty] * max(request.sampling.n, 1), request.sampling), False
        name = f"{request.request_id}/{next(self._numbers)}"
        self._in_flight[name] = request.request_id
        self._idle.clear()
        try:
            output = await self._inner.generate(replace(request, request_id=name))
        finally:
            del self._in_flight[name]
            if not self._in_flight:
                self._idle.set()
        return replace(output, request_id=request.request_id), self._interrupts and not self._open.is_set()

    async def _go_on(self, request: RolloutRequest, place: int, sequence: RolloutSequence) -> RolloutSequence:
        """Return a sequence of a request, completed after updates cut it."""
        was_cut = True
        while was_cut and sequence.finish_reason == "abort" and request.request_id not in self._ended:
            length = max(len(sequence.token_ids) - _overlap(request), 0)
            head = _first(sequence, length)
            sampling = replace(request.sampling, n=1, max_tokens=request.sampling.max_tokens - length)
            tokens = array("i", as_tokens(request.prompt_ids).tobytes()) + array(
                "i", as_tokens(head.token_ids).tobytes()
            )
            seed = None if request.seed is None else _derived(request.seed, place, length)
            output, was_cut = await self._generate(replace(request, prompt_ids=tokens, sampling=sampling, seed=seed))
            sequence = _joined(head, output.sequences[0])
        return sequence

    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load a whole model while no request is in flight; see the contract for errors."""
        return await self._alone(lambda: self._inner.update_weights(buckets, version))

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load an adapter while no request is in flight; see the contract for errors."""
        return await self._alone(lambda: self._inner.update_adapter(adapter, version))

    async def _alone(self, update: Callable[[], Awaitable[T]]) -> T:
        self._open.clear()
        try:
            if self._interrupts and self._in_flight:
                await self._inner.abort(list(self._in_flight))
            await self._idle.wait()
            return await update()
        finally:
            self._open.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests with their tokens so far; none of them is continued."""
        wanted = self._known if request_ids is None else self._known & set(request_ids)
        self._ended |= wanted
        await self._inner.abort([name for name, own in self._in_flight.items() if own in wanted])

    async def check_health(self) -> None:
        """Check the engine's health."""
        await self._inner.check_health()

    async def report_load(self) -> EngineLoad:
        """Return the engine's load."""
        return await self._inner.report_load()

    async def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Release the engine's memory with these tags."""
        await self._inner.release(tags)

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the engine's memory with these tags again."""
        await self._inner.resume(tags)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the engine's rollout."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of the engine's rollout."""
        self._inner.load_state_dict(state)

    def close(self) -> None:
        """Stop the engine."""
        self._inner.close()


def _overlap(request: RolloutRequest) -> int:
    """Return the maximum number of final tokens that can be the beginning of a stop text."""
    return max((len(text) - 1 for text in request.sampling.stop), default=0)


def _first(sequence: RolloutSequence, count: int) -> RolloutSequence:
    routed, left_out = sequence.routed_experts, len(sequence.token_ids) - count
    return replace(
        sequence,
        routed_experts=None if routed is None else routed[: len(routed) - max(left_out, 0)],
        token_ids=sequence.token_ids[:count],
        log_probs=sequence.log_probs[:count],
        weight_versions=sequence.weight_versions[:count],
    )


def _joined(head: RolloutSequence, tail: RolloutSequence) -> RolloutSequence:
    return RolloutSequence(
        array("i", [*head.token_ids, *tail.token_ids]),
        array("f", [*head.log_probs, *tail.log_probs]),
        tail.finish_reason,
        array("q", [*head.weight_versions, *tail.weight_versions]),
        _joined_routes(head, tail),
    )


def _joined_routes(head: RolloutSequence, tail: RolloutSequence) -> Any:
    """Return the choices with which the tokens were sampled; the tail's prompt contains the head."""
    if head.routed_experts is None or tail.routed_experts is None:
        return tail.routed_experts
    read = max(len(head.routed_experts) - 1, 0)
    return np.concatenate([head.routed_experts[:read], tail.routed_experts[read:]])


def _derived(seed: int, place: int, tokens: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{place}/{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
