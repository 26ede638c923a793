"""Requests on their way: checked, queued, and turned into outputs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollcast.contracts.rollout import RolloutCapabilities, RolloutOutput, RolloutRequest, RolloutSequence, RolloutSetup
from rollcast_hf.decoding import DecodedRow, DecodeRow
from rollcast_hf.errors import GenerationError
from rollcast_serving.requests import ModelLimits, check_request
from rollcast_serving.stops import StopStrings

__all__ = ["Job", "admit"]


@dataclass(eq=False)
class Job:
    """A request in the queue or under way, and the future that its caller waits for."""

    request: RolloutRequest
    row: DecodeRow
    future: asyncio.Future[RolloutOutput] = field(repr=False)
    is_aborted: bool = False

    @property
    def rows(self) -> int:
        """How many sequences it asks for."""
        return self.request.sampling.n

    def finish(self, decoded: Sequence[DecodedRow]) -> None:
        """Hand the sequences over, unless the caller has gone; a broken one fails this request and no other."""
        for row in decoded:
            if row.broken is not None:
                self.fail(
                    GenerationError(
                        f"request {self.request.request_id!r}: the model's logits are not finite at new token "
                        f"{row.broken}"
                    )
                )
        sequences = [RolloutSequence(row.token_ids, row.log_probs, row.finish_reason, row.versions) for row in decoded]
        if not self.future.done():
            self.future.set_result(RolloutOutput(self.request.request_id, sequences, self.request.sampling))

    def fail(self, error: Exception) -> None:
        """Hand an error over, unless the caller has gone."""
        if not self.future.done():
            self.future.set_exception(error)

    def abort(self) -> None:
        """Hand over that nothing was generated."""
        self.finish([DecodedRow(array("i"), array("f"), array("q"), "abort")] * self.rows)


def admit(
    request: RolloutRequest,
    limits: ModelLimits,
    setup: RolloutSetup,
    stops: StopStrings,
    capabilities: RolloutCapabilities,
) -> DecodeRow:
    """Check a request and return the row that each of its sequences starts from.

    Raises:
        RequestError: it cannot be served; says which request, and what is wrong.
    """
    prompt = check_request(request, limits, capabilities)
    sampling = request.sampling
    stops.check(request.request_id, sampling.stop)
    return DecodeRow(prompt, sampling, setup.stop_ids(sampling), lambda: stops.matcher(sampling.stop))
