"""What every benchmark says at its end: a table for people, and a JSON list for tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Comparison", "write_report"]


@dataclass(frozen=True)
class Comparison:
    """One figure of ours beside somebody else's.

    Attributes:
        name: what is measured, with its unit.
        ours, other: the two figures; their ratio is ``ours / other``.
        at_most, at_least: the goal of the ratio, one of the two.

    Raises:
        ValueError: there is no goal, or there are two.
    """

    name: str
    ours: float
    other: float
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.name}: give at_most or at_least, and not both")

    @property
    def ratio(self) -> float:
        """Ours over the other's."""
        return self.ours / self.other

    @property
    def goal(self) -> str:
        """The goal of the ratio, such as ``<= 1.5``."""
        return f">= {self.at_least:g}" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def holds(self) -> bool:
        """Whether the ratio reaches its goal."""
        if self.at_most is not None:
            return self.ratio <= self.at_most
        return self.at_least is not None and self.ratio >= self.at_least

    def as_record(self) -> dict[str, Any]:
        """The comparison as it stands in the JSON file."""
        return {
            "name": self.name,
            "ours": self.ours,
            "other": self.other,
            "ratio": self.ratio,
            "goal": self.goal,
            "holds": self.holds,
        }


def write_report(title: str, comparisons: Sequence[Comparison], notes: Sequence[str], output: Path) -> None:
    """Print the table with its notes, and write the comparisons to ``output``."""
    table = Table(title=title, caption="\n".join([*notes, str(output)]), caption_justify="left")
    for heading in ("name", "ours", "other", "ratio", "goal", "holds"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for each in comparisons:
        numbers = (f"{each.ours:,.4g}", f"{each.other:,.4g}", f"{each.ratio:.3f}")
        table.add_row(each.name, *numbers, each.goal, "yes" if each.holds else "NO")
    Console().print(table)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps([each.as_record() for each in comparisons], indent=2) + "\n")
