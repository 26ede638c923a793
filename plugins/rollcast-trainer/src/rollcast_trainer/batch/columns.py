"""Names of the columns that the stages of this package read and write.

Axes: ``B`` rows, ``P`` prompt positions (left-padded), ``T`` response positions (right-padded).
"""

from __future__ import annotations

from typing import Final

__all__ = ["DATA", "GENERATED", "MODEL", "PROMPT"]

PROMPT: Final = ("input_ids", "attention_mask", "position_ids")
"""Columns of a prompt before generation, int64 ``[B, P]``."""

DATA: Final = (*PROMPT, "raw_prompt", "ground_truth", "data_source", "extra_info")
"""Columns of a batch of prompts as a dataset collates it."""

MODEL: Final = (*PROMPT, "responses", "response_mask")
"""Columns that a model's pass reads: int64 ``[B, P + T]``, and ``[B, T]`` for the last two."""

GENERATED: Final = (
    *("prompts", "uid", "finished", "rollout_log_probs", "rollout_weight_version"),
    *MODEL,
)
"""Columns of a generated batch; rows of one prompt share ``uid`` (int64 ``[B]``)."""
