"""Names of the columns that the stages of this package read and write.

Token columns are jagged; ids are int32 and ``response_mask`` is bool. A column with one value per response token has
the same jagged rows as ``responses``. Axes: ``B`` rows.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from rollcast.contracts.rollout import MULTI_MODAL_DATA
from rollcast.errors import CapabilityError

__all__ = [
    "DATA",
    "GENERATED",
    "MODEL",
    "POLICY_GAP",
    "PROMPT",
    "model_columns",
    "prompt_columns",
    "refuse_images",
]


PROMPT: Final = ("prompts",)
"""Columns of a prompt before generation."""

DATA: Final = (*PROMPT, "raw_prompt", "ground_truth", "data_source", "extra_info")
"""Columns of a batch of prompts as a dataset collates it."""

MODEL: Final = ("prompts", "responses", "response_mask")
"""Columns that a forward pass of the model reads."""

POLICY_GAP: Final = ("entropy_sum", "log_prob_gap_sum", "log_prob_gap_max")
"""Columns of a policy pass, float32 ``[B]``, reduced over the masked tokens: the sum of the entropy, and the sum and
the maximum of the absolute difference between the log-probs of rollout and policy.
"""


GENERATED: Final = (
    *("uid", "finished", "rollout_log_probs", "rollout_weight_version", "rollout_weight_version_min"),
    *MODEL,
)
"""Columns of a generated batch; the rows of one prompt share a ``uid`` (int64 ``[B]``)."""


def prompt_columns(batch: Container[str]) -> tuple[str, ...]:
    """Return the names of the columns of a batch that generation reads."""
    return (*PROMPT, MULTI_MODAL_DATA) if MULTI_MODAL_DATA in batch else PROMPT


def model_columns(batch: Container[str]) -> tuple[str, ...]:
    """Return the names of the columns of a batch that a forward pass of the policy reads."""
    return (*MODEL, MULTI_MODAL_DATA) if MULTI_MODAL_DATA in batch else MODEL


def refuse_images(batch: Container[str], reader: str) -> None:
    """Check that a batch has no images, which ``reader`` would not see.

    Raises:
        CapabilityError: it has.
    """
    if MULTI_MODAL_DATA in batch:
        raise CapabilityError(
            f"the prompts have images (column {MULTI_MODAL_DATA}), which {reader} does not see; use an estimator "
            "without a critic, such as grpo, and a reward function"
        )
