"""``generate_sequences``: a batch of prompts through any rollout, built once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from rollcast.contracts.rollout import BaseRollout, RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.errors import RollcastError
from rollcast.protocol import DataProto

__all__ = [
    "GenerationContractError",
    "assemble_sequences",
    "build_requests",
    "generate_sequences",
    "trim_responses",
]

#: Columns that end with the responses' padding.
_PADDED = ("responses", "response_mask", "rollout_log_probs", "input_ids", "attention_mask", "position_ids")


class GenerationContractError(RollcastError, ValueError):
    """A rollout's output is not what its contract promises."""


async def generate_sequences(
    rollout: BaseRollout, prompts: DataProto, sampling: SamplingParams, pad_token_id: int
) -> DataProto:
    """One response for each row.

    Args:
        rollout: what generates; gets all requests at once.
        prompts: ``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[B, P]``, left-padded; may
            have ``seed`` int64 ``[B]``, the requests' own.
        sampling: for every row; ``max_tokens`` is the width ``T`` of the responses.
        pad_token_id: fills the responses up to ``T``.

    Returns:
        ``prompts`` ``[B, P]``, ``responses`` ``[B, T]``, ``input_ids``, ``attention_mask`` and
        ``position_ids`` ``[B, P + T]`` int64, ``response_mask`` int64 ``[B, T]``,
        ``rollout_log_probs`` float32 ``[B, T]`` (zero under a zero mask), ``finished`` bool ``[B]``,
        ``rollout_weight_version`` int64 ``[B]`` (of the last token).

    Raises:
        RollcastError: a request cannot be served, or the rollout did not keep to its contract.
    """
    requests = build_requests(prompts, sampling)
    outputs = await asyncio.gather(*(rollout.generate(request) for request in requests))
    return assemble_sequences(prompts, outputs, sampling.max_tokens, pad_token_id)


def build_requests(prompts: DataProto, sampling: SamplingParams) -> list[RolloutRequest]:
    """A request for each row of left-padded prompts, with the row's number as its id.

    Args:
        prompts, sampling: as in :func:`generate_sequences`.
    """
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    rows, width = ids.tolist(), ids.shape[1]
    lengths = mask.sum(-1).tolist()
    seeds = prompts["seed"].tolist() if "seed" in prompts else [None] * len(rows)
    return [
        RolloutRequest(str(index), row[width - length :], sampling, seed)
        for index, (row, length, seed) in enumerate(zip(rows, lengths, seeds, strict=True))
    ]


def trim_responses(batch: DataProto) -> DataProto:
    """Cut what :func:`generate_sequences` gave to the longest response, at least one column."""
    mask = batch["response_mask"]
    unused = mask.shape[1] - max(int(mask.sum(-1).max()) if len(batch) else 0, 1)
    if not unused:
        return batch
    cut = {name: batch[name][:, :-unused].contiguous() for name in _PADDED}
    return batch.with_columns(cut)


def _check(index: int, sequence: RolloutSequence, width: int) -> None:
    tokens, log_probs = len(sequence.token_ids), len(sequence.log_probs)
    if tokens > width or tokens != log_probs:
        raise GenerationContractError(
            f"the rollout answered request {index} with {tokens} tokens and {log_probs} log-probs; "
            f"it has to give as many of the one as of the other, and at most max_tokens={width}"
        )


def assemble_sequences(
    prompts: DataProto, outputs: Sequence[RolloutOutput], width: int, pad_token_id: int
) -> DataProto:
    """The batch of the prompts and what came for them; see :func:`generate_sequences`.

    Args:
        prompts: the prompts.
        outputs: for each row, of which the first sequence is taken.
        width: of the responses.
        pad_token_id: fills them.

    Raises:
        GenerationContractError: an output is not what the contract promises.
    """
    sequences = [output.sequences[0] for output in outputs]
    for index, sequence in enumerate(sequences):
        _check(index, sequence, width)
    count = len(sequences)
    lengths = torch.tensor([len(sequence.token_ids) for sequence in sequences], dtype=torch.int64)
    response_mask = (torch.arange(width).unsqueeze(0) < lengths.reshape(count, 1)).long()
    responses = torch.full((count, width), pad_token_id, dtype=torch.int64)
    log_probs = torch.zeros(count, width)
    # One flat fill instead of one a row: boolean masks are filled in row order.
    where = response_mask.bool()
    responses[where] = torch.tensor([t for sequence in sequences for t in sequence.token_ids], dtype=torch.int64)
    log_probs[where] = torch.tensor([p for sequence in sequences for p in sequence.log_probs], dtype=torch.float32)
    mask = torch.cat([prompts["attention_mask"], response_mask], 1)
    return DataProto.from_dict(
        {
            "prompts": prompts["input_ids"],
            "responses": responses,
            "input_ids": torch.cat([prompts["input_ids"], responses], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "rollout_log_probs": log_probs,
            "finished": torch.tensor([sequence.finish_reason == "stop" for sequence in sequences], dtype=torch.bool),
            "rollout_weight_version": torch.tensor(
                [sequence.weight_versions[-1] if sequence.weight_versions else -1 for sequence in sequences],
                dtype=torch.int64,
            ),
        }
    )
