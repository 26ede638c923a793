"""The 95 % intervals that the records of a run allow, for the bands of its curves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollcast_report.run_data import Series

__all__ = ["Band", "find_band", "is_bound", "wilson"]

_Z = 1.959964
_MEAN_AT = re.compile(r"val/acc/mean@\d+")


@dataclass(frozen=True)
class Band:
    """The interval of a curve.

    Attributes:
        points: step, lower and upper bound, in order.
        method: name of the computation, as a phrase.
    """

    points: list[tuple[int, float, float]]
    method: str


def is_bound(name: str, series: Mapping[str, Series]) -> bool:
    """Return True if a metric is a bound of another one."""
    stem, _, end = name.rpartition("/")
    return end in ("low", "high") and (stem in series or f"{stem}/mean" in series)


def find_band(metric: str, series: Mapping[str, Series]) -> Band | None:
    """Return the interval of a metric; None if the run recorded nothing that says how sure it is.

    It is recorded as ``<metric>/low`` and ``<metric>/high``: for the mean reward by the trainer, by the normal
    approximation over the prompts' means; for the accuracy of a validation by bootstrap over its prompts. An accuracy
    without these bounds has Wilson's interval for the number of its samples.
    """
    method = "normal approximation over prompts" if metric == "reward/mean" else "as recorded"
    stems = [(metric, method)]
    if metric == "val/accuracy":
        stems += [(name, "bootstrap over prompts") for name in series if _MEAN_AT.fullmatch(name)]
    for stem, how in stems:
        points = _between(series.get(f"{stem}/low", []), series.get(f"{stem}/high", []))
        if points:
            return Band(points, how)
    if metric == "val/accuracy":
        counts = {step: value for step, value in series.get("val/samples", []) if value}
        points = [
            (step, *wilson(value, counts[step]))
            for step, value in series.get(metric, [])
            if value is not None and step in counts
        ]
        if points:
            return Band(points, "Wilson's interval for the number of samples")
    return None


def _between(low: Series, high: Series) -> list[tuple[int, float, float]]:
    upper = {step: value for step, value in high if value is not None}
    return [(step, value, upper[step]) for step, value in low if value is not None and step in upper]


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share among ``count`` independent samples."""
    centre = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
