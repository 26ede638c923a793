"""Seeds of generated rows: independent of the number of ranks, and the same after a restart."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["RowSeeds"]


class RowSeeds:
    """A seed for each row of each generated batch.

    Seeds are derived from the run's seed, the purpose of the batch, and its number since :meth:`begin`.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._purpose = ""
        self._batches = 0

    def begin(self, purpose: str) -> None:
        """Set the purpose of the next batches, such as "step 3", and restart their numbering."""
        self._purpose, self._batches = purpose, 0

    def draw(self, rows: int) -> torch.Tensor:
        """Return the seeds of the next batch, int64 ``[rows]``, 0 or above."""
        number, self._batches = self._batches, self._batches + 1
        return self.of(f"{self._purpose}/{number}", rows)

    def of(self, purpose: str, rows: int) -> torch.Tensor:
        """Return seeds derived only from the run's seed and ``purpose``, int64 ``[rows]``, 0 or above."""
        text = f"{self._seed}/{purpose}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.randint(2**63 - 1, (rows,), generator=generator)
