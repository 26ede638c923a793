"""The number of sequences that a replica decodes at a time while it generates a batch of unequal lengths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollcast_automap.costs.length_curve import LengthCurve

__all__ = ["Decoding", "read_decoding"]

Floats: TypeAlias = NDArray[np.floating[Any]]
#: Points per mean length in which starts are counted, and most points before starts are taken to be uniform in time.
_FINE, _MOST = 16, 512
#: Phases of the drain; the first phases are short, because most rows end early.
_PHASES = 32


@dataclass(frozen=True)
class Decoding:
    """The decoding of a batch in phases.

    Attributes:
        slots: sequences that are decoded at once.
        equal: decoding steps that the batch would take if all responses were equally long.
        full: decoding steps with all slots busy.
        full_tokens: mean generated tokens of a row during the full steps.
        drain: phases after the full steps, when the queue is empty: (steps, busy slots, generated tokens of a row).
    """

    slots: int
    equal: float
    full: float
    full_tokens: float
    drain: tuple[tuple[float, float, float], ...]

    @property
    def phases(self) -> tuple[tuple[float, float, float], ...]:
        """Steps, busy slots and mean generated tokens of a row in all phases; the full phase comes first."""
        return ((self.full, float(self.slots), self.full_tokens), *self.drain)


@lru_cache(maxsize=4096)
def read_decoding(response: LengthCurve, rows: int, slots: int, batch: int) -> Decoding:
    """Return the decoding of a replica's rows.

    Each slot takes the next row of the queue when its row has ended, so the starts are a renewal process. All slots are
    full until the queue is empty; after that, a slot is busy with the probability that its row has not ended yet. The
    stage lasts until no slot of any replica is busy; until then, this replica is assumed to have a busy slot.

    Args:
        response: distribution of response lengths in tokens.
        rows: responses that the replica generates.
        slots: sequences that it decodes at once.
        batch: responses that all replicas generate; the longest response ends the stage.
    """
    slots = min(slots, rows)
    starts, width, full = _starts(response, rows / slots)
    edges = [response.longest * (place / _PHASES) ** 2 for place in range(_PHASES + 1)]
    drain = []
    for low, high in itertools.pairwise(edges):
        busy, tokens = _busy(response, starts, width, (low + high) / 2)
        here, anywhere = (1.0 - (1.0 - min(busy, 1.0)) ** count for count in (slots, batch * slots / rows))
        if anywhere > 1e-9:
            drain.append(((high - low) * anywhere, max(slots * busy / max(here, 1e-12), 1.0), tokens))
    return Decoding(
        slots=slots,
        equal=rows * response.mean / slots,
        full=full,
        full_tokens=_full_tokens(response, starts, width, full),
        drain=tuple(drain),
    )


def _starts(response: LengthCurve, share: float) -> tuple[Floats, float, float]:
    """Return the expected row starts of a slot at points in time, the steps between two points, and the last point.

    The last point is the decoding step at which the queue is empty. Points so early that no row started there can
    still be in flight at the last point are left out.

    Args:
        response: distribution of response lengths in tokens.
        share: rows that the slot decodes, 1 or more.
    """
    width = response.mean / _FINE
    if share * _FINE > _MOST:
        # After many rows the starts are uniform in time: the equilibrium of renewal theory.
        starts = np.full(round(min(response.longest, share * response.mean) / width) + 1, width / response.mean)
        starts[-1] /= 2
        return starts, width, share * response.mean - response.mean_square / (2 * response.mean)
    points = np.arange(_MOST + 1) * width
    ends = -np.diff(_surviving(response, np.concatenate(([-1.0], points + width / 2))))
    starts = np.zeros(_MOST + 1)
    total = starts[0] = 1.0 / (1.0 - ends[0])
    last = 0
    while total < share and last < _MOST:
        last += 1
        starts[last] = starts[:last] @ ends[last:0:-1] / (1.0 - ends[0])
        total += starts[last]
    starts[last] -= max(total - share, 0.0)
    return starts[: last + 1], width, width * last


def _busy(response: LengthCurve, starts: Floats, width: float, after: float) -> tuple[float, float]:
    """Return the probability that a slot is busy ``after`` steps from the last point, and the tokens of its row."""
    ages = after + width * np.arange(len(starts) - 1, -1, -1)
    alive = starts * _surviving(response, ages)
    busy = float(alive.sum())
    return min(busy, 1.0), float(alive @ ages) / busy if busy > 0 else after


def _full_tokens(response: LengthCurve, starts: Floats, width: float, full: float) -> float:
    """Return the mean tokens of a row while all slots are busy."""
    count = round(full / width)
    if count >= len(starts):
        return response.mean_square / (2 * response.mean)
    if not count:
        return 0.0
    ages = width * (np.arange(count) + 0.5)
    alive = _surviving(response, ages)
    busy = np.convolve(starts[:count], alive)[:count]
    return float((np.convolve(starts[:count], alive * ages)[:count] / np.maximum(busy, 1e-12)).mean())


def _surviving(response: LengthCurve, lengths: Floats) -> Floats:
    """Return the probabilities that a row is longer than each of ``lengths``."""
    return np.asarray(1.0 - np.interp(lengths, response.quantiles, response.levels, left=0.0, right=1.0))
