"""How many sequences a replica decodes at a time while a batch of unequal lengths is generated."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast_automap.length_curve import LengthCurve

__all__ = ["Decoding", "read_decoding"]

_STEPS = 24


@dataclass(frozen=True)
class Decoding:
    """The decoding of a batch in phases.

    Attributes:
        slots: sequences that are decoded at once.
        equal: decoding steps that the batch would take if all responses were equally long.
        full: steps with all slots busy; the context of a row is a mean one.
        drain: after these, with an empty queue: (steps, busy slots, tokens that a row has by then) of each phase.
    """

    slots: int
    equal: float
    full: float
    drain: tuple[tuple[float, float, float], ...]


def read_decoding(response: LengthCurve, rows: int, slots: int, batch: int) -> Decoding:
    """Return the decoding of a replica's rows.

    Slots are full until the queue is empty; then the rows end one by one, by the survivors of the length distribution
    (after queueing, by its equilibrium distribution), up to the expected longest of the batch.

    Args:
        response: distribution of response lengths in tokens.
        rows: responses that the replica generates.
        slots: sequences that it decodes at once.
        batch: responses that all replicas generate; the longest of them ends the stage.
    """
    slots = min(slots, rows)
    fresh = slots >= rows
    survivors = response.surviving if fresh else response.remaining
    drained = response.mean if fresh else response.mean_square / (2 * response.mean)
    width = response.expected_longest(batch) / _STEPS
    middles = [(step + 0.5) * width for step in range(_STEPS)]
    return Decoding(
        slots=slots,
        equal=rows * response.mean / slots,
        full=max((rows * response.mean - slots * drained) / slots, 0.0),
        drain=tuple((width, max(slots * survivors(done), 1.0), done) for done in middles),
    )
