"""Requests: checked, queued, and turned into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollcast.contracts.rollout import RolloutCapabilities, RolloutRequest, RolloutSequence, RolloutSetup
from rollcast.errors import DataError, RequestError
from rollcast_data.vision.model_inputs import ImageInputs, images_of
from rollcast_hf.decoding import DecodedRow, DecodeRow
from rollcast_hf.errors import GenerationError
from rollcast_serving.engines.job import BaseJob
from rollcast_serving.requests import ModelLimits, check_request
from rollcast_serving.stops import StopStrings

__all__ = ["Job", "admit", "check_images"]


@dataclass(eq=False)
class Job(BaseJob):
    """A request in the queue or in flight.

    Attributes:
        row: row that each of its sequences starts from.
        is_aborted: True if it was aborted while running.
    """

    row: DecodeRow
    is_aborted: bool = False

    @property
    def rows(self) -> int:
        """Number of sequences that the request asks for."""
        return self.request.sampling.n

    def finish(self, decoded: Sequence[DecodedRow]) -> None:
        """Answer with the sequences; a broken sequence fails only this request."""
        for row in decoded:
            if row.broken is not None:
                self.fail(
                    GenerationError(
                        f"request {self.request.request_id!r}: the model's logits are not finite at new token "
                        f"{row.broken}"
                    )
                )
        self.answer(
            [
                RolloutSequence(row.token_ids, row.log_probs, row.finish_reason, row.versions, row.routed_experts)
                for row in decoded
            ]
        )


def admit(
    request: RolloutRequest,
    limits: ModelLimits,
    setup: RolloutSetup,
    stops: StopStrings,
    capabilities: RolloutCapabilities,
) -> DecodeRow:
    """Check a request and return the row that each of its sequences starts from.

    Raises:
        RequestError: it cannot be served; the message names the request and the problem.
    """
    prompt = check_request(request, limits, capabilities)
    sampling = request.sampling
    stops.check(request.request_id, sampling.stop)
    images = images_of(request.multi_modal_data, f"request {request.request_id!r}")
    return DecodeRow(prompt, sampling, setup.stop_ids(sampling), lambda: stops.matcher(sampling.stop), images)


def check_images(request: RolloutRequest, row: DecodeRow, inputs: ImageInputs) -> None:
    """Check that a row's placeholders match its images, which would otherwise fail its whole batch.

    Raises:
        RequestError: they do not, or an image cannot be read.
    """
    try:
        inputs.spans(row.prompt, row.images, f"request {request.request_id!r}")
    except DataError as error:
        raise RequestError(str(error)) from error
