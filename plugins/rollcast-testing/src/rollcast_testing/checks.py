"""The check that conformance tests make of a law. Imports no torch."""

from __future__ import annotations

__all__ = ["require"]


def require(condition: bool, law: str) -> None:
    """Check a condition.

    Raises:
        AssertionError: the condition is False; names the failed check.
    """
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(f"failed check: {law}")
