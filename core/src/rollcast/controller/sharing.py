"""Values that several ranks of one call get: stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rollcast.controller.dispatch import RankCall

__all__ = ["SharedValues"]


class SharedValues:
    """Puts references in place of the values that several calls share.

    A value is stored when the first call that has it is sent, so that this rank is at work while the
    next value is stored.

    Args:
        calls: of all ranks.
        put: stores a value and returns the reference.
    """

    def __init__(self, calls: Sequence[RankCall], put: Callable[[Any], Any]) -> None:
        large = [id(value) for call in calls for value in _values(call) if getattr(value, "nbytes", 0)]
        self._shared = {key for key, count in Counter(large).items() if count > 1}
        self._put = put
        self._stored: dict[int, Any] = {}

    def replace(self, call: RankCall) -> RankCall:
        """The call with references in place of shared values."""
        if not any(id(value) in self._shared for value in _values(call)):
            return call
        return RankCall(
            tuple(self._reference(value) for value in call.args),
            {key: self._reference(value) for key, value in call.kwargs.items()},
        )

    def _reference(self, value: Any) -> Any:
        if id(value) not in self._shared:
            return value
        if id(value) not in self._stored:
            self._stored[id(value)] = self._put(value)
        return self._stored[id(value)]


def _values(call: RankCall) -> tuple[Any, ...]:
    return (*call.args, *call.kwargs.values())
