"""Calls in flight: values shared between ranks, and errors of calls that were never awaited."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.contracts.dispatch import RankCall
from rollcast.controller.arguments import is_batch, is_future
from rollcast.errors import RollcastError

if TYPE_CHECKING:
    from rollcast.protocol import DataProtoFuture

__all__ = ["SharedValues", "Unawaited"]

logger = logging.getLogger(__name__)

#: Size in bytes from which a plain value is stored once for several ranks; below, one copy per rank is cheaper.
_WORTH_STORING = 1 << 10
#: Types that are never worth storing, skipped first.
_SMALL = frozenset({int, float, str, bool, complex, type(None)})


def _bytes_in(value: Any) -> int:
    """Count the bytes of the tensors, arrays and bytes objects in a value, including nested lists, tuples and dicts."""
    kind = type(value)
    if kind in _SMALL:
        return 0
    if kind is bytes or kind is bytearray:
        return len(value) if len(value) >= _WORTH_STORING else 0
    if kind is dict:
        return sum(map(_bytes_in, value.values()))
    if kind is list or kind is tuple:
        return 0 if _SMALL.issuperset(map(type, value)) else sum(map(_bytes_in, value))
    if is_future(value) or (is_batch(value) and value.is_remote):
        return _WORTH_STORING
    return int(getattr(value, "nbytes", 0) or 0)


class SharedValues:
    """Replacement of values that several calls share by references.

    A value is stored when the first call with this value is sent, so that this rank works while the next value is
    stored.

    Args:
        calls: all calls of one group call.
        put: function that stores a value and returns a reference that replaces the value in a call.
    """

    def __init__(self, calls: Sequence[RankCall], put: Callable[[Any], Any]) -> None:
        self._put = put
        self._stored: dict[int, Any] = {}
        self._shared: set[int] = set()
        if len(calls) > 1:
            counts: Counter[int] = Counter()
            values: dict[int, Any] = {}
            seen: set[int] = set()
            for call in calls:
                if id(call) in seen:  # the same call object as another rank's
                    counts.update(map(id, (*call.args, *call.kwargs.values())))
                    continue
                seen.add(id(call))
                for value in (*call.args, *call.kwargs.values()):
                    if type(value) not in _SMALL:
                        counts[id(value)] += 1
                        values[id(value)] = value
            self._shared = {key for key, value in values.items() if counts[key] > 1 and _bytes_in(value)}

    def replace(self, call: RankCall) -> RankCall:
        """Return the call with references in place of shared values."""
        shared = self._shared
        if not shared:
            return call
        if not any(id(value) in shared for value in (*call.args, *call.kwargs.values())):
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


@dataclass(eq=False)
class _Call:
    """A non-blocking call.

    Attributes:
        name: name of the call, for messages.
        receive: function that waits for the call and raises its error.
        ready: function that returns True if ``receive`` would not wait.
        awaited: True once the call has been awaited.
    """

    name: str
    receive: Callable[[], Any]
    ready: Callable[[], bool]
    awaited: bool = False


@dataclass
class Unawaited:
    """The calls of a group whose futures were never awaited.

    A future can be garbage-collected in any thread at any time, so its finalizer only records the call. Errors are
    reported at the next call of the group and when the group ends.
    """

    _dropped: deque[_Call] = field(default_factory=deque)
    _open: dict[int, _Call] = field(default_factory=dict)

    def watch(
        self, future: DataProtoFuture, name: str, receive: Callable[[], Any], ready: Callable[[], bool]
    ) -> Callable[[], None]:
        """Watch the call of a future; return a function that marks the call as awaited."""
        call = _Call(name, receive, ready)
        self._open[id(call)] = call
        weakref.finalize(future, self._dropped.append, call).atexit = False

        def awaited() -> None:
            call.awaited = True
            self._open.pop(id(call), None)

        return awaited

    def report(self) -> None:
        """Log the errors of ended calls whose futures were garbage-collected."""
        for _ in range(len(self._dropped)):
            call = self._dropped.popleft()
            if call.awaited:
                continue
            if call.ready():
                self._log(call)
            else:
                self._dropped.append(call)

    def report_all(self) -> None:
        """Log the errors of all ended calls; called before the group ends."""
        for call in list(self._open.values()):
            if not call.awaited and call.ready():
                self._log(call)
        self._dropped.clear()
        self._open.clear()

    def _log(self, call: _Call) -> None:
        self._open.pop(id(call), None)
        call.awaited = True
        try:
            call.receive()
        except RollcastError as error:
            logger.error("%s failed, and nobody has waited for its handle: %s", call.name, error)


def by_rank(
    ranks: Sequence[int],
    refs: Sequence[Any],
    wait_any: Callable[[Sequence[Any], float | None], list[int]],
    receive: Callable[[int, Any], Any],
    remaining: Callable[[], float | None],
) -> Iterator[tuple[int, Any]]:
    """Yield the rank and result of each call, in the order in which the calls end.

    Args:
        ranks, refs: rank and reference of each call.
        wait_any: function like :meth:`rollcast.contracts.runtime.Runtime.wait_any`.
        receive: function that returns the result of an ended call.
        remaining: function that returns the seconds until the deadline; None for no deadline.
    """
    waiting = list(zip(ranks, refs, strict=True))
    while waiting:
        ended = wait_any([ref for _, ref in waiting], remaining()) or [0]
        for index in sorted(ended, reverse=True):
            # A call whose deadline has passed is received too, which raises the timeout error.
            yield waiting[index][0], receive(*waiting.pop(index))
