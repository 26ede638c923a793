"""The tool ``my_plugin``: conversion of lengths."""

from typing import Literal

METRES = {"mm": 0.001, "m": 1.0, "km": 1000.0, "mile": 1609.344}


def my_plugin(
    value: float, source: Literal["mm", "m", "km", "mile"], target: Literal["mm", "m", "km", "mile"]
) -> float:
    """Convert a length from one unit to another.

    Args:
        value: Length in the source unit.
        source: Unit of the value.
        target: Unit of the result.
    """
    return value * METRES[source] / METRES[target]
