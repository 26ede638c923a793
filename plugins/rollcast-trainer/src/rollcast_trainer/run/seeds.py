"""Seeds of the rows that are generated: the same on any number of ranks, and after a restart."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["RowSeeds"]


class RowSeeds:
    """A seed for each row of each generated batch.

    It follows from the run's seed, from what the batch is for, and from its number since that began.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._purpose = ""
        self._batches = 0

    def begin(self, purpose: str) -> None:
        """What the next batches are for, such as a step by its number."""
        self._purpose, self._batches = purpose, 0

    def draw(self, rows: int) -> torch.Tensor:
        """The next batch's, int64 ``[rows]``, 0 or above."""
        number, self._batches = self._batches, self._batches + 1
        return self.of(f"{self._purpose}/{number}", rows)

    def of(self, purpose: str, rows: int) -> torch.Tensor:
        """Return seeds that follow from the run's seed and a purpose alone, int64 ``[rows]``, 0 or above."""
        text = f"{self._seed}/{purpose}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.randint(2**63 - 1, (rows,), generator=generator)
