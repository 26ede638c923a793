"""A request in flight, and its waiting caller."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence
from rollcast.errors import CheckpointError, RolloutError

__all__ = ["BaseJob", "SequenceSeeds", "derive_seed", "empty_output", "request_failure"]


def derive_seed(seed: int, number: int) -> int:
    """Return a seed below 2**62 for one of several sequences that share a seed."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class SequenceSeeds:
    """The seed of each sequence: from its request's seed, or from the rollout's seed and a counter.

    Args:
        engine: name of the engine, for messages.
        seed: seed of the rollout.
    """

    def __init__(self, engine: str, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self._unseeded = 0  # sequences so far whose request had no seed

    def choose(self, request: RolloutRequest, number: int) -> int:
        """Return the seed of a request's sequence ``number``; count the sequence if the request has no seed."""
        if request.seed is not None:
            return derive_seed(request.seed, number)
        self._unseeded += 1
        return derive_seed(self._seed, self._unseeded)

    def state_dict(self) -> dict[str, Any]:
        """Return ``sequences``: the number of sequences without a request seed, from which the next ones' seeds are
        derived.
        """
        return {"sequences": self._unseeded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            CheckpointError: the state is not one of :meth:`state_dict`.
        """
        try:
            self._unseeded = int(state["sequences"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"this is not a state of the {self._engine} rollout: {error!r}") from error


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
