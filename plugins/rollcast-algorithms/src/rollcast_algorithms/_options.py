"""Parsing of a function's options, which rejects unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

__all__ = ["read_options"]


def read_options(part: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``options`` into ``defaults``.

    Raises:
        ValueError: ``part`` does not have an option; lists the options that it has.
    """
    for key in options:
        if key not in defaults:
            near = difflib.get_close_matches(str(key), defaults, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(defaults)) or "none"
            raise ValueError(f"{part} has no option {key!r}; its options: {known}{hint}")
    return {**defaults, **options}
