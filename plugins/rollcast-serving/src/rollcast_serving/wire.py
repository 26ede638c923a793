"""Messages between replicas and their callers: msgpack, with token ids and log-probs as packed arrays.

An answer is a sequence of frames, each a length and a msgpack map, so that messages have no size limit. Requests and
outputs are messages of a WebSocket. Numbers are little-endian arrays: token ids int32, log-probs float32. Weight
versions are run-length encoded, and a prompt that several requests share is sent once.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from typing import Any

import msgpack
import numpy as np

from rollcast import errors
from rollcast.contracts.rollout import (
    EngineLoad,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    SamplingParams,
)
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.requests import as_tokens

__all__ = [
    "LENGTH",
    "decode_error",
    "decode_load",
    "decode_output",
    "decode_report",
    "decode_requests",
    "encode_error",
    "encode_load",
    "encode_output",
    "encode_report",
    "encode_requests",
    "pack_frame",
    "unpack",
]

#: Length of a frame's message, sent before the message.
LENGTH = struct.Struct(">Q")
_SAMPLING = {field.name: field.default for field in fields(SamplingParams)}


def pack_frame(message: Mapping[str, Any]) -> bytes:
    """Return a message prefixed with its length."""
    data: bytes = msgpack.packb(message)
    return LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    """Return the message of a frame.

    Raises:
        ValueError: the bytes are not msgpack.
    """
    try:
        return msgpack.unpackb(data, max_bin_len=len(data), max_array_len=len(data), max_map_len=len(data))
    except msgpack.UnpackException as error:
        raise ValueError(f"not msgpack: {error!r}") from error


def _to_bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _from_bytes(code: str, data: bytes) -> array[Any]:
    values: array[Any] = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


# -- requests ---------------------------------------------------------------------------------


def encode_requests(requests: Mapping[str, RolloutRequest]) -> tuple[bytes, dict[str, RollcastError]]:
    """Return the message that submits requests, by their ids on the wire, and the errors of those that cannot be sent.

    Equal prompts with equal images and sampling parameters are sent once, with the ids and seeds of their requests. So
    are sampling parameters, of which only non-default values are sent.
    """
    samplings: dict[SamplingParams, int] = {}
    groups: dict[tuple[bytes, int, tuple[bytes, ...]], list[list[Any]]] = {}
    refused: dict[str, RollcastError] = {}
    for name, request in requests.items():
        try:
            prompt, images = _to_bytes(_prompt(request)), _images(request)
        except RollcastError as error:
            refused[name] = error
            continue
        number = samplings.setdefault(request.sampling, len(samplings))
        groups.setdefault((prompt, number, images), []).append([name, request.seed])
    shared = [_changed(sampling) for sampling in samplings]
    entries = [
        [prompt, number, members, *([list(images)] if images else [])]
        for (prompt, number, images), members in groups.items()
    ]
    body: bytes = msgpack.packb({"samplings": shared, "groups": entries})
    return body, refused


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    values = ((name, getattr(sampling, name), default) for name, default in _SAMPLING.items())
    return {name: value for name, value, default in values if value != default}


def _prompt(request: RolloutRequest) -> array[int]:
    """Return a request's prompt.

    Raises:
        RequestError: the prompt is not made of token ids.
    """
    try:
        return as_tokens(request.prompt_ids)
    except (TypeError, OverflowError) as error:
        raise errors.RequestError(f"request {request.request_id!r}: prompt_ids are not token ids: {error}") from error


def _images(request: RolloutRequest) -> tuple[bytes, ...]:
    """Return a request's images.

    Raises:
        CapabilityError: the request has data of another modality, which is not sent to replicas.
    """
    others = sorted(name for name in request.multi_modal_data or () if name != "image")
    if others:
        raise errors.CapabilityError(
            f"request {request.request_id!r} carries multi_modal_data ({', '.join(others)}), and only image is sent to "
            "replicas"
        )
    return tuple((request.multi_modal_data or {}).get("image", ()))


def decode_requests(data: bytes) -> list[RolloutRequest]:
    """Return the requests of a message; those of a group share their prompt.

    Raises:
        RequestError: the message is malformed.
    """
    try:
        message = unpack(data)
        samplings = [_sampling(sampling) for sampling in message["samplings"]]
        return [
            RolloutRequest(str(name), ids, samplings[number], seed, {"image": tuple(images[0])} if images else None)
            for prompt, number, members, *images in message["groups"]
            for ids in [_from_bytes("i", prompt)]
            for name, seed in members
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, RollcastError):
            raise
        raise errors.RequestError(f"not a valid request: {error!r}") from error


def _sampling(data: Mapping[str, Any]) -> SamplingParams:
    unknown = sorted(set(data) - set(_SAMPLING))
    if unknown:
        raise errors.RequestError(f"unknown sampling parameters {', '.join(unknown)}; known: {', '.join(_SAMPLING)}")
    lists = {name: tuple(data.get(name, ())) for name in ("stop_token_ids", "stop")}
    bias = tuple((int(token), float(value)) for token, value in data.get("logit_bias", ()))
    return SamplingParams(**{**data, **lists, "logit_bias": bias})


# -- outputs ----------------------------------------------------------------------------------


def encode_output(output: RolloutOutput) -> list[Any]:
    """Return the sequences of an output for a frame."""
    return [
        [
            _to_bytes(as_tokens(sequence.token_ids)),
            _to_bytes(_floats(sequence.log_probs)),
            sequence.finish_reason,
            _runs(sequence.weight_versions),
            _routes(sequence),
        ]
        for sequence in output.sequences
    ]


def _routes(sequence: RolloutSequence) -> list[Any] | None:
    routed = sequence.routed_experts
    return None if routed is None else [np.ascontiguousarray(routed, "<i2").tobytes(), list(routed.shape)]


def _routes_from(data: Any) -> Any:
    return None if data is None else np.frombuffer(data[0], "<i2").astype(np.int16).reshape(data[1])


def _floats(values: Sequence[float]) -> array[float]:
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


def _runs(versions: Sequence[int]) -> list[list[int]]:
    """Return runs of equal versions as pairs of version and count."""
    values = np.asarray(versions, np.int64)
    if not len(values):
        return []
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    counts = np.diff(starts, append=len(values))
    return [[int(values[start]), int(count)] for start, count in zip(starts, counts, strict=True)]


def _versions(runs: Iterable[Sequence[int]]) -> array[int]:
    versions = array("q")
    for version, count in runs:
        versions += array("q", [version]) * count
    return versions


def decode_output(data: Any, request: RolloutRequest) -> RolloutOutput:
    """Return the output that a frame contains.

    Args:
        data: result of :func:`encode_output`.
        request: request that the output answers.

    Raises:
        RolloutError: a part is missing or malformed.
    """
    try:
        sequences = [
            RolloutSequence(
                _from_bytes("i", ids), _from_bytes("f", log_probs), reason, _versions(runs), _routes_from(routes)
            )
            for ids, log_probs, reason, runs, routes in data
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise RolloutError(f"a replica's answer is malformed: {error!r}") from error
    return RolloutOutput(request.request_id, sequences, request.sampling)


# -- loads, reports and errors ----------------------------------------------------------------


def encode_load(load: EngineLoad) -> list[float]:
    """Return a load as plain data."""
    return list(astuple(load))


def decode_load(data: Any) -> EngineLoad:
    """Return a load from plain data.

    Raises:
        RolloutError: a figure is missing.
    """
    try:
        limit, running, waiting, usage, preemptions = data
        return EngineLoad(int(limit), int(running), int(waiting), float(usage), int(preemptions))
    except (TypeError, ValueError) as error:
        raise RolloutError(f"a replica's load is malformed: {error!r}") from error


def encode_report(report: WeightReport) -> dict[str, Any]:
    """Return a report as plain data."""
    return asdict(report)


def decode_report(data: Mapping[str, Any]) -> WeightReport:
    """Return a report from plain data."""
    return WeightReport(**data)


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: its nearest class in rollcast, its text, and the tensor that it names."""
    kinds = [cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls]
    message = str(error) if kinds else f"{type(error).__name__}: {error}"
    return {"kind": next(iter(kinds), "RolloutError"), "message": message, "tensor": getattr(error, "tensor", "")}


def decode_error(data: Mapping[str, Any], where: str) -> RollcastError:
    """Return an error from plain data, of the nearest class known here and prefixed with its origin."""
    error_class = getattr(errors, str(data.get("kind")), None)
    kind = error_class if isinstance(error_class, type) and issubclass(error_class, RollcastError) else RolloutError
    message = f"{where}: {data.get('message')}"
    if issubclass(kind, errors.WeightSyncError):
        return kind(message, tensor=str(data.get("tensor", "")))
    return kind(message)
