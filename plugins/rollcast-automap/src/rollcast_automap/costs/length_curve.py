"""A distribution of sequence lengths from quantiles: moments, survival, expected maximum and random draws."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from rollcast.errors import ConfigError, DataError
from rollcast_automap.contract import Lengths

__all__ = ["LengthCurve", "read_samples"]


def read_samples(path: Path, longest: int) -> list[float]:
    """Return the token counts of a file with one count per line, cut at ``longest``; empty lines are skipped.

    Raises:
        DataError: the file cannot be read or has no number, or a line is not a positive number; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--lengths {path} cannot be read: {error}") from error
    quantiles: list[float] = []
    for number, line in enumerate(lines, 1):
        try:
            value = float(line) if line.strip() else None
        except ValueError:
            value = -1.0
        if value is not None and not value > 0:
            raise DataError(f"--lengths {path}, line {number}: {line.strip()!r} is no number of tokens above 0")
        quantiles += [] if value is None else [min(value, float(longest))]
    if not quantiles:
        raise DataError(f"--lengths {path} has no numbers; write one number of tokens a line")
    return quantiles


@dataclass(frozen=True)
class LengthCurve:
    """A piecewise linear distribution of lengths in tokens.

    Attributes:
        levels: cumulative probabilities in rising order, from 0 to 1.
        quantiles: length at each level, in rising order.
    """

    levels: tuple[float, ...]
    quantiles: tuple[float, ...]

    def __post_init__(self) -> None:
        levels, quantiles = list(self.levels), list(self.quantiles)
        rising = levels == sorted(set(levels)) and quantiles == sorted(quantiles)
        if len(levels) != len(quantiles) or len(levels) < 2 or not rising or (levels[0], levels[-1]) != (0.0, 1.0):
            raise ConfigError(
                f"lengths have the levels {levels} and the quantiles {quantiles}; give as many of each, rising, with "
                "levels from 0 to 1"
            )
        if quantiles[0] < 0:
            raise ConfigError(f"lengths start at {quantiles[0]} tokens; a length is 0 or more")

    @classmethod
    def fixed(cls, length: float) -> LengthCurve:
        """Return a distribution in which every sequence has the same length."""
        return cls((0.0, 1.0), (length, length))

    @classmethod
    @lru_cache(maxsize=256)
    def read(cls, lengths: Lengths) -> LengthCurve:
        """Return the curve through the quantiles of a problem.

        Without quantiles, the lengths are assumed to be exponential and cut at the maximum, with the given mean after
        the cut. If the mean reaches the maximum, all lengths are equal.
        """
        if lengths.mean >= lengths.maximum:
            return cls.fixed(float(lengths.maximum))
        known = list(lengths.quantiles)
        if not known:
            levels = [place / 32 for place in range(1, 32)]
            scale = _uncut_mean(lengths.mean, lengths.maximum)
            known = [(level, min(-scale * math.log(1 - level), float(lengths.maximum))) for level in levels]
        if known[0][0] > 0:
            known.insert(0, (0.0, min(1.0, known[0][1])))
        if known[-1][0] < 1:
            known.append((1.0, float(lengths.maximum)))
        return cls(tuple(level for level, _ in known), tuple(value for _, value in known))

    @classmethod
    def from_samples(cls, samples: Sequence[float], points: int = 64) -> LengthCurve:
        """Return the distribution of measured lengths.

        Raises:
            ConfigError: There is no sample.
        """
        if not samples:
            raise ConfigError("a distribution of lengths needs at least one sample")
        ordered = sorted(samples)
        last = len(ordered) - 1
        levels = tuple(place / points for place in range(points + 1))
        quantiles = []
        for level in levels:
            below = int(level * last)
            share = level * last - below
            quantiles.append(ordered[below] + share * (ordered[min(below + 1, last)] - ordered[below]))
        return cls(levels, tuple(quantiles))

    @classmethod
    def of_batch(cls, lengths: Sequence[float]) -> LengthCurve:
        """Return the distribution that has exactly the lengths of a batch, each with the same probability.

        Mean and mean square equal those of the batch, even if one long row dominates them.

        Raises:
            ConfigError: There is no length.
        """
        if not lengths:
            raise ConfigError("a batch of lengths needs at least one length")
        count = len(lengths)
        step = 1e-9 / count  # levels have to rise strictly, so a jump gets a small width
        levels = [level for place in range(1, count) for level in (place / count - step, place / count + step)]
        values = [value for value in sorted(lengths) for _ in range(2)]
        return cls((0.0, *levels, 1.0), tuple(values))

    def statistics(self, maximum: int) -> Lengths:
        """Return the mean and the quantiles of this curve for a problem whose longest length is ``maximum`` tokens."""
        return Lengths(self.mean, maximum, tuple(zip(self.levels, self.quantiles, strict=True)))

    @property
    def longest(self) -> float:
        """Longest length in tokens."""
        return self.quantiles[-1]

    @cached_property
    def mean(self) -> float:
        """Mean length in tokens."""
        return sum(width * (low + high) / 2 for width, low, high in self._pieces)

    @cached_property
    def mean_square(self) -> float:
        """Mean of the squared length; attention over whole rows grows with this number."""
        return sum(width * (low * low + low * high + high * high) / 3 for width, low, high in self._pieces)

    def plus(self, other: LengthCurve) -> tuple[float, float]:
        """Return mean and mean square of the sum of two independent lengths."""
        mean = self.mean + other.mean
        return mean, self.mean_square + other.mean_square + 2 * self.mean * other.mean

    def surviving(self, length: float) -> float:
        """Return the probability that a sequence is longer than ``length``."""
        if length < self.quantiles[0]:
            return 1.0
        if length >= self.longest:
            return 0.0
        place = bisect_right(self.quantiles, length)
        low, high = self.quantiles[place - 1], self.quantiles[place]
        share = (length - low) / (high - low)
        return 1.0 - (self.levels[place - 1] + share * (self.levels[place] - self.levels[place - 1]))

    def remaining(self, length: float) -> float:
        """Return the probability that a sequence in flight at a random moment has more than ``length`` tokens to go.

        For sequences that start one after the other, this is the equilibrium distribution of renewal theory: the
        integral of the survival function beyond ``length``, divided by the mean.
        """
        total = 0.0
        for width, low, high in self._pieces:
            if high <= length:
                continue
            # Mean of max(x - length, 0) over a uniform piece.
            start = max(low, length)
            total += width * ((low + high) / 2 - length if high == low or low >= length else 0.0)
            if low < length < high:
                total += width * (high - start) ** 2 / (2 * (high - low))
        return total / self.mean if self.mean else 0.0

    def expected_longest(self, count: int) -> float:
        """Return the expected length of the longest of ``count`` sequences.

        The expectation is the integral of ``1 - F(x)**count``; over a linear piece of ``F`` it has a closed form.
        """
        length = self.quantiles[0]
        power = count + 1
        for place in range(1, len(self.levels)):
            low, high = self.quantiles[place - 1], self.quantiles[place]
            start, end = self.levels[place - 1], self.levels[place]
            mean_power = (end**power - start**power) / (power * (end - start))
            length += (high - low) * (1.0 - mean_power)
        return length

    def draw(self, count: int, seed: int) -> list[float]:
        """Draw ``count`` lengths in whole tokens; equal seeds draw equal lengths."""
        source = random.Random(seed)  # noqa: S311  # no secret
        lengths = []
        for _ in range(count):
            level = source.random()
            place = bisect_right(self.levels, level, hi=len(self.levels) - 1)
            start, end = self.levels[place - 1], self.levels[place]
            low, high = self.quantiles[place - 1], self.quantiles[place]
            lengths.append(float(max(round(low + (high - low) * (level - start) / (end - start)), 1)))
        return lengths

    @cached_property
    def _pieces(self) -> list[tuple[float, float, float]]:
        """Probability, least and greatest length of each linear piece."""
        return [
            (self.levels[place] - self.levels[place - 1], self.quantiles[place - 1], self.quantiles[place])
            for place in range(1, len(self.levels))
        ]


def _uncut_mean(mean: float, maximum: int) -> float:
    """Return the mean of the exponential distribution whose mean is ``mean`` after a cut at ``maximum``."""
    low, high = mean, mean
    while high * -math.expm1(-maximum / high) < mean and high < 1e6 * maximum:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-maximum / middle) < mean else (low, middle)
    return high
