"""The extension point for metering: a plugin replaces the trainer's meter to count the cost of worker calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["Meter"]


class Meter:
    """A meter that counts nothing; a hook may set another as ``trainer.run.meter`` in ``on_fit_start``."""

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens of this step, prompts included."""

    def count_pass(
        self,
        role: str,
        host_role: str,
        method: str,
        lengths: Sequence[int],
        head_tokens: int,
        kind: Literal["forward", "train"] = "forward",
    ) -> None:
        """Count a call that sends rows through the model of ``role``; the call may still be running.

        Args:
            role: role whose model runs.
            host_role: role whose workers run the model.
            method: name of the workers' method.
            lengths: tokens of each row, repeated for each pass of the row.
            head_tokens: response tokens of those rows, which go through the output head.
            kind: type of the passes.
        """

    def metrics(self, step_seconds: float) -> dict[str, float]:
        """Return the metrics of the step that ends now, and start the next."""
        return {}
