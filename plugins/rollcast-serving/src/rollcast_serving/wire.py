"""Requests and outputs as JSON: what replicas and their callers say to each other."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rollcast import errors
from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, RolloutError

__all__ = [
    "decode_error",
    "decode_output",
    "decode_report",
    "decode_request",
    "encode_error",
    "encode_output",
    "encode_report",
    "encode_request",
]

_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def _pack(code: str, values: Sequence[Any]) -> str:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _unpack(code: str, text: str) -> array[Any]:
    packed = array(code)
    packed.frombytes(base64.b64decode(text))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def encode_request(request: RolloutRequest) -> dict[str, Any]:
    """Return a request as JSON. Ids that are no integers travel as they are; the replica refuses them.

    Raises:
        CapabilityError: the request carries multi-modal data, which has no JSON form.
    """
    if request.multi_modal_data:
        raise errors.CapabilityError(
            f"request {request.request_id!r} carries multi_modal_data ({', '.join(sorted(request.multi_modal_data))}), "
            "which replicas do not take; generate in the trainer's process (rollout.weight_sync=in_process)"
        )
    sampling = asdict(request.sampling)
    seed = {} if request.seed is None else {"seed": request.seed}
    return {"id": request.request_id, "prompt_ids": list(request.prompt_ids), "sampling": sampling, **seed}


def decode_request(data: Mapping[str, Any]) -> RolloutRequest:
    """The request.

    Raises:
        RequestError: a part is missing or unknown.
    """
    try:
        sampling = dict(data["sampling"])
        unknown = sorted(set(sampling) - set(_SAMPLING))
        if unknown:
            raise errors.RequestError(
                f"unknown sampling parameters {', '.join(unknown)}; known: {', '.join(_SAMPLING)}"
            )
        for name in ("stop_token_ids", "stop"):
            sampling[name] = tuple(sampling.get(name, ()))
        return RolloutRequest(str(data["id"]), data["prompt_ids"], SamplingParams(**sampling), data.get("seed"))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RollcastError):
            raise
        raise errors.RequestError(f"this is no request: {error!r}") from error


def encode_output(output: RolloutOutput) -> dict[str, Any]:
    """JSON of an output; numbers as little-endian arrays in base64, log-probs in float32."""
    sequences = []
    for sequence in output.sequences:
        versions = set(sequence.weight_versions)
        sequences.append(
            {
                "ids": _pack("i", sequence.token_ids),
                "log_probs": _pack("f", sequence.log_probs),
                "reason": sequence.finish_reason,
                # Nearly always one for all.
                "versions": versions.pop() if len(versions) == 1 else list(sequence.weight_versions),
            }
        )
    return {"id": output.request_id, "sequences": sequences}


def decode_output(data: Mapping[str, Any], sampling: SamplingParams) -> RolloutOutput:
    """The output.

    Args:
        data: what :func:`encode_output` gave.
        sampling: of the request.

    Raises:
        RolloutError: a part is missing or malformed.
    """
    sequences = []
    try:
        for entry in data["sequences"]:
            ids = _unpack("i", entry["ids"])
            versions = entry["versions"]
            sequences.append(
                RolloutSequence(
                    ids,
                    _unpack("f", entry["log_probs"]),
                    entry["reason"],
                    [versions] * len(ids) if isinstance(versions, int) else versions,
                )
            )
        return RolloutOutput(data["id"], sequences, sampling)
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"a replica's answer is malformed: {error!r}") from error


def encode_report(report: WeightReport) -> dict[str, Any]:
    """JSON of a report."""
    return asdict(report)


def decode_report(data: Mapping[str, Any]) -> WeightReport:
    """The report."""
    return WeightReport(**data)


def encode_error(error: BaseException) -> dict[str, Any]:
    """JSON of an error: its class, if it is one of rollcast's, its text, and the tensor that it names."""
    kinds = [cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls]
    message = str(error) if kinds else f"{type(error).__name__}: {error}"
    return {"kind": next(iter(kinds), "RolloutError"), "message": message, "tensor": getattr(error, "tensor", "")}


def decode_error(data: Mapping[str, Any], where: str) -> RollcastError:
    """The error, of the nearest class that is known here, saying where it comes from."""
    found = getattr(errors, str(data.get("kind")), None)
    kind = found if isinstance(found, type) and issubclass(found, RollcastError) else RolloutError
    message = f"{where}: {data.get('message')}"
    if issubclass(kind, errors.WeightSyncError):
        return kind(message, tensor=str(data.get("tensor", "")))
    return kind(message)
