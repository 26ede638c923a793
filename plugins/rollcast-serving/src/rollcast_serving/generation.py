"""``generate_sequences``: generating for a batch of prompts with any rollout."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from rollcast.contracts.rollout import (
    MULTI_MODAL_DATA,
    ROUTED_EXPERTS,
    BaseRollout,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    SamplingParams,
)
from rollcast.errors import RollcastError
from rollcast.protocol import DataProto, Jagged

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "SEQUENCES",
    "GenerationContractError",
    "assemble_sequences",
    "build_requests",
    "generate_sequences",
    "joined_routes",
]


#: Columns of :func:`generate_sequences`.
SEQUENCES: Final = (  # and ROUTED_EXPERTS, if the rollout records it
    *("prompts", "responses", "response_mask", "rollout_log_probs"),
    *("finished", "rollout_weight_version", "rollout_weight_version_min"),
)


class GenerationContractError(RollcastError, ValueError):
    """A rollout's output violates its contract."""


async def generate_sequences(rollout: BaseRollout, prompts: DataProto, sampling: SamplingParams) -> DataProto:
    """Return one response for each row.

    Args:
        rollout: rollout that receives all requests at once.
        prompts: jagged ``prompts``, integers; may have ``seed`` int64 ``[B]``, one per request, and the object column
            ``multi_modal_data``.
        sampling: sampling parameters of every row.

    Returns:
        Jagged ``prompts`` and ``responses`` int32; with the rows of the responses ``response_mask`` bool and
        ``rollout_log_probs`` float32; ``finished`` bool ``[B]``; ``rollout_weight_version`` (of the last token) and
        ``rollout_weight_version_min`` int64 ``[B]``, -1 for an empty response. If the rollout records them,
        ``routed_experts`` too.

    Raises:
        RollcastError: a request cannot be served, or the rollout violated its contract.
    """
    requests = build_requests(prompts, sampling)
    outputs = await asyncio.gather(*(rollout.generate(request) for request in requests))
    return assemble_sequences(prompts, outputs, sampling.max_tokens)


def build_requests(prompts: DataProto, sampling: SamplingParams, prefix: str = "") -> list[RolloutRequest]:
    """Return a request for each row of prompts, with the row's number as its id.

    Args:
        prompts, sampling: as in :func:`generate_sequences`.
        prefix: prefix of the ids.
    """
    flat = Jagged.of(prompts["prompts"], "prompts")
    ids = array("i", flat.values.to("cpu", torch.int32).numpy().tobytes())
    bounds = flat.offsets.tolist()
    seeds = prompts["seed"].tolist() if "seed" in prompts else [None] * len(prompts)
    others = list(prompts[MULTI_MODAL_DATA]) if MULTI_MODAL_DATA in prompts else [None] * len(prompts)
    return [
        RolloutRequest(f"{prefix}{index}", ids[start:stop], sampling, seed, other)
        for index, (start, stop, seed, other) in enumerate(zip(bounds, bounds[1:], seeds, others, strict=False))
    ]


def _check(index: int, sequence: RolloutSequence, max_tokens: int) -> None:
    tokens, log_probs = len(sequence.token_ids), len(sequence.log_probs)
    if tokens > max_tokens or tokens != log_probs:
        raise GenerationContractError(
            f"the rollout answered request {index} with {tokens} tokens and {log_probs} log-probs; "
            f"both counts must be equal, and at most max_tokens={max_tokens}"
        )
    if not bool(np.isfinite(np.asarray(sequence.log_probs, np.float32)).all()):
        raise GenerationContractError(
            f"the rollout answered request {index} with a log-prob that is not finite; its model is broken"
        )


def assemble_sequences(prompts: DataProto, outputs: Sequence[RolloutOutput], max_tokens: int) -> DataProto:
    """Return the batch of the prompts and their outputs; see :func:`generate_sequences`.

    Args:
        prompts: the prompts.
        outputs: output of each row; only its first sequence is used.
        max_tokens: maximum number of tokens of a response.

    Raises:
        GenerationContractError: an output violates the contract.
    """
    sequences = [output.sequences[0] for output in outputs]
    for index, sequence in enumerate(sequences):
        _check(index, sequence, max_tokens)
    versions = [np.asarray(item.weight_versions if len(item.weight_versions) else (-1,)) for item in sequences]
    lengths = torch.tensor([len(sequence.token_ids) for sequence in sequences], dtype=torch.int64)
    responses = Jagged.from_lengths(_joined([item.token_ids for item in sequences], np.int32), lengths)
    prompt_ids = Jagged.of(prompts["prompts"], "prompts")
    routed = joined_routes([item.routed_experts for item in sequences], (prompt_ids.lengths + lengths).tolist())
    return DataProto.from_dict(
        {
            **({} if routed is None else {ROUTED_EXPERTS: routed.column()}),
            "prompts": prompt_ids.like(prompt_ids.values.to(torch.int32)),
            "responses": responses.column(),
            "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
            "rollout_log_probs": responses.like(_joined([item.log_probs for item in sequences], np.float32)),
            "finished": torch.tensor([sequence.finish_reason == "stop" for sequence in sequences], dtype=torch.bool),
            "rollout_weight_version": torch.tensor([int(version[-1]) for version in versions], dtype=torch.int64),
            "rollout_weight_version_min": torch.tensor([int(version.min()) for version in versions], dtype=torch.int64),
        }
    )


def joined_routes(rows: Sequence[NDArray[np.int16] | None], lengths: Sequence[int]) -> Jagged | None:
    """Return the choices of rows of ``lengths`` tokens as a column; None if no row has any.

    Tokens without a choice, such as those of a row that was aborted, have -1.

    Raises:
        GenerationContractError: a row has choices for another number of tokens.
    """
    shape = next((row.shape[1:] for row in rows if row is not None), None)
    if shape is None:
        return None
    filled = []
    for row, length in zip(rows, lengths, strict=True):
        if row is not None and len(row) != length:
            raise GenerationContractError(f"a sequence of {length} tokens has routed experts of {len(row)}")
        filled.append(np.full((length, *shape), -1, np.int16) if row is None else np.asarray(row, np.int16))
    values = torch.from_numpy(np.concatenate([np.empty((0, *shape), np.int16), *filled]))
    return Jagged.from_lengths(values, torch.tensor(lengths, dtype=torch.int64))


def _joined(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> torch.Tensor:
    """Return the numbers of all rows concatenated, without iterating over array elements in Python."""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype) for row in rows)]))
