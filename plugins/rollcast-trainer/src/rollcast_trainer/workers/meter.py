"""The seam for metering: a plugin replaces the trainer's meter to count what worker calls cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["Meter"]


class Meter:
    """A meter that counts nothing; ``on_fit_start`` of a hook may set another as ``trainer.run.meter``."""

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens of this step, prompts included."""

    def count_pass(
        self,
        role: str,
        played_as: str,
        method: str,
        lengths: Sequence[int],
        head_tokens: int,
        kind: Literal["forward", "train"] = "forward",
    ) -> None:
        """Count a call, which may not have ended, that sends rows through the model of ``role``.

        Args:
            role: role whose model runs.
            played_as: role whose workers run the model.
            method: name of the workers' method.
            lengths: tokens of each row, once for each pass of the row.
            head_tokens: response tokens of those rows, which go through the head.
            kind: passes of each row.
        """

    def metrics(self, step_seconds: float) -> dict[str, float]:
        """Return the metrics of the step that ends now, and start the next."""
        return {}
