"""Names of the columns that the stages of this package read and write.

Columns of tokens are jagged, ids int32; ``response_mask`` is bool, and like all columns of quantities of response
tokens it has the rows of ``responses``. Axes: ``B`` rows.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DATA", "GENERATED", "MODEL", "POLICY_GAP", "PROMPT"]

PROMPT: Final = ("prompts",)
"""Column of a prompt before generation."""

DATA: Final = (*PROMPT, "raw_prompt", "ground_truth", "data_source", "extra_info")
"""Columns of a batch of prompts as a dataset collates it."""

MODEL: Final = ("prompts", "responses", "response_mask")
"""Columns that a model's pass reads."""

POLICY_GAP: Final = ("entropy_sum", "log_prob_gap_sum", "log_prob_gap_max")
"""Columns of a pass of the policy, float32 ``[B]``: over the tokens under the mask the sum of the entropy, and the sum
and the largest of the differences between the rollout's log-probs and the policy's."""

GENERATED: Final = (
    *("uid", "finished", "rollout_log_probs", "rollout_weight_version", "rollout_weight_version_min"),
    *MODEL,
)
"""Columns of a generated batch; rows of one prompt share ``uid`` (int64 ``[B]``)."""
