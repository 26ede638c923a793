"""Requests to SGLang: sequences with their own seeds, sent in batches, and their answers."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from rollcast.contracts.rollout import RolloutSequence, RolloutSetup, SamplingParams
from rollcast.errors import RolloutError
from rollcast_serving.engines.job import BaseJob
from rollcast_serving.engines.routing import RecordedLayers
from rollcast_sglang.environment import STOP_STRINGS

__all__ = ["Adapter", "Job", "Row", "build_batch", "read_sequence"]

#: SGLang streams a request's tokens whenever it has this many; the end is always sent at once.
_NEVER = 2**30


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of new requests: its name in SGLang, and the version recorded for their tokens."""

    name: str
    version: int


@dataclass(eq=False)
class Job(BaseJob):
    """A request in flight.

    Attributes:
        prompt: checked token ids.
        rows: sequences of the request.
        adapter: adapter that computes them, chosen when they are sent.
        sender: task that waits for SGLang's answer.
    """

    prompt: array[int]
    rows: list[Row] = field(default_factory=list)
    adapter: Adapter | None = None
    sender: asyncio.Task[None] | None = None

    def finish(self, row: Row, sequence: RolloutSequence) -> None:
        """Store one sequence; the last one answers the request."""
        row.sequence, row.is_over = sequence, True
        sequences = [entry.sequence for entry in self.rows if entry.sequence is not None]
        if len(sequences) == len(self.rows):
            self.answer(sequences)

    def finish_empty(self) -> None:
        """Answer with empty sequences."""
        for row in self.rows:
            row.is_over = True
        self.answer_empty()


@dataclass(eq=False)
class Row:
    """One sequence of a request.

    Attributes:
        job: request that it belongs to.
        rid: id in SGLang. All ids have the same length, because SGLang aborts every request whose id begins with the
            given one.
        seed: seed of its sampling.
        sequence: the generated sequence; None until it is complete.
        is_over: True once SGLang is done with it, with or without an answer.
    """

    job: Job
    rid: str
    seed: int
    sequence: RolloutSequence | None = None
    is_over: bool = False


def build_batch(rows: Sequence[Row], setup: RolloutSetup, records_routing: bool = False) -> dict[str, Any]:
    """Return the body of one ``/generate`` call for all the rows.

    Args:
        rows: sequences to generate.
        setup: setup of the rollout, whose stop tokens apply in addition to each request's own.
        records_routing: True to get the choices of a mixture's routers.
    """
    prompts = {row.job: row.job.prompt.tolist() for row in rows}
    body: dict[str, Any] = {
        "rid": [row.rid for row in rows],
        "input_ids": [prompts[row.job] for row in rows],
        "sampling_params": [_sampling_params(row, setup) for row in rows],
        "return_logprob": True,
        "return_routed_experts": records_routing,
    }
    if any(row.job.adapter for row in rows):
        body["lora_path"] = [row.job.adapter.name if row.job.adapter else None for row in rows]
    return body


def _sampling_params(row: Row, setup: RolloutSetup) -> dict[str, Any]:
    sampling = row.job.request.sampling
    stops = {"custom_params": {STOP_STRINGS: list(sampling.stop)}} if sampling.stop else {}
    bias = {"logit_bias": {str(token): value for token, value in sampling.logit_bias}} if sampling.logit_bias else {}
    return {
        **stops,
        **bias,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(setup.stop_ids(sampling)),
        "sampling_seed": row.seed,
        "stream_interval": _NEVER,
    }


def read_sequence(row: Row, event: Mapping[str, Any], layers: RecordedLayers | None = None) -> RolloutSequence | None:
    """Return the sequence of a ``/generate`` event; None while it is incomplete.

    Args:
        row: sequence that was asked for.
        event: SGLang's answer.
        layers: layers whose routers' choices are recorded; None for none.

    Raises:
        RolloutError: SGLang failed, or returned fewer log-probs, versions or choices of routers than tokens.
    """
    meta: Mapping[str, Any] = event["meta_info"]
    finish = meta.get("finish_reason")
    if finish is None:
        return None
    request = row.job.request
    tokens = array("i", event["output_ids"])
    log_probs = array("f", [entry[0] for entry in meta.get("output_token_logprobs") or ()])
    versions = _versions(row.job.adapter, meta, len(tokens))
    reason = finish["type"]
    if reason not in {"stop", "length", "abort"} or not len(tokens) == len(log_probs) == len(versions):
        raise RolloutError(
            f"request {request.request_id!r}: SGLang answered with finish reason {finish}, {len(tokens)} tokens, "
            f"{len(log_probs)} log-probs and {len(versions)} weight versions"
        )
    if reason == "abort" and finish.get("status_code"):
        raise RolloutError(f"request {request.request_id!r}: SGLang aborted it: {finish.get('message')}")
    if _has_one_candidate(request.sampling):
        log_probs = array("f", bytes(4 * len(tokens)))
    routed = None if layers is None or not tokens else _routed_experts(row, meta, len(tokens), layers)
    return RolloutSequence(tokens, log_probs, cast(Literal["stop", "length", "abort"], reason), versions, routed)


def _routed_experts(row: Row, meta: Mapping[str, Any], new: int, layers: RecordedLayers) -> NDArray[np.int16]:
    """Return the choices for prompt and sequence, which SGLang sends as base64 of int32, without the last token's."""
    request_id, count = row.job.request.request_id, len(row.job.prompt) + new
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise RolloutError(f"request {request_id!r}: SGLang returned no experts for its {count} tokens")
    return layers.select(np.frombuffer(base64.b64decode(encoded), np.int32), count, request_id)


def _has_one_candidate(sampling: SamplingParams) -> bool:
    """Return True if only one candidate can be sampled; SGLang then returns the plain softmax's log-probs."""
    return sampling.top_k == 1 and sampling.temperature > 0


def _versions(adapter: Adapter | None, meta: Mapping[str, Any], count: int) -> array[int]:
    if adapter is not None:  # the base weights do not change while an adapter is in use
        return array("q", [adapter.version]) * count
    versions = array("q")
    for span in meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]:
        versions += array("q", [int(span["version"])]) * (span["end"] - span["start"])
    return versions
