"""A request in flight, and its waiting caller."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence
from rollcast.errors import RolloutError

__all__ = ["BaseJob", "derive_seed", "empty_output", "request_failure"]


def derive_seed(seed: int, number: int) -> int:
    """Return a seed below 2**62 for one of several sequences that share a seed."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def empty_output(request: RolloutRequest) -> RolloutOutput:
    """Return the answer to a request that was aborted before its first token."""
    sequences = [RolloutSequence(array("i"), array("f"), "abort", array("q")) for _ in range(request.sampling.n)]
    return RolloutOutput(request.request_id, sequences, request.sampling)


def request_failure(error: Exception, request_id: str) -> RolloutError:
    """Return a separate error for one of several callers that fail for the same cause; each raises its own."""
    if isinstance(error, RolloutError):
        failure: RolloutError = copy.copy(error)
    else:
        failure = RolloutError(f"request {request_id!r}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@dataclass(eq=False)
class BaseJob:
    """A request in flight.

    Attributes:
        request: the caller's request.
        future: answer that the caller awaits.
    """

    request: RolloutRequest
    future: asyncio.Future[RolloutOutput] = field(repr=False)

    def answer(self, sequences: Sequence[RolloutSequence]) -> None:
        """Answer with the sequences, unless the job is already answered or cancelled."""
        if not self.future.done():
            request = self.request
            self.future.set_result(RolloutOutput(request.request_id, list(sequences), request.sampling))

    def answer_empty(self) -> None:
        """Answer with empty sequences."""
        self.answer(empty_output(self.request).sequences)

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller, unless the job is already answered or cancelled."""
        if not self.future.done():
            self.future.set_exception(error)
