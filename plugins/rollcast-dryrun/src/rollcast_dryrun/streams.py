"""Streams and events that order operations by vector clocks, as ``torch.cuda`` does by waiting.

Source of the clocks: L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978; C. Fidge,
"Timestamps in Message-Passing Systems", 1988.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

__all__ = ["Clock", "DeviceStreams", "MockEvent", "MockStream"]

#: Number of the last operation of each stream that has happened before.
Clock = dict[int, int]


def _merge(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


class DeviceStreams:
    """The streams of one process on a device and the host that queues work on them.

    Attributes:
        host: operations that the host has waited for.
        sent: operations that the process's collectives and messages come after.

    Args:
        note_wait: called each time that code lets the host wait for a stream, an event or the device.
        first: streams of another process of the node, which tells this one when it has waited for the device.
    """

    def __init__(self, note_wait: Callable[[], None], first: DeviceStreams | None = None) -> None:
        self.host: Clock = {} if first is None else first.host
        self.numbers: Iterator[int] = count() if first is None else first.numbers
        self.sent: Clock = {}
        self._note_wait = note_wait
        self.streams: list[MockStream] = []
        self.default = MockStream(self)
        self._current = [self.default]

    @property
    def current(self) -> MockStream:
        """Stream on which operations are queued now."""
        return self._current[-1]

    @contextmanager
    def use(self, stream: MockStream | None) -> Iterator[MockStream | None]:
        """Queue operations on ``stream`` during the block; None changes nothing."""
        if stream is None:
            yield None
            return
        self._current.append(stream)
        try:
            yield stream
        finally:
            self._current.pop()

    def set_current(self, stream: MockStream) -> None:
        """Queue operations on ``stream`` from now on."""
        self._current[-1] = stream

    def send(self) -> None:
        """Note that the current stream's last operation communicates."""
        _merge(self.sent, self.current.clock)

    def wait_for_sent(self) -> None:
        """Let the current stream wait for all that communicates; single operations are not told apart."""
        _merge(self.current.clock, self.sent)

    def wait_on_host(self, clock: Mapping[int, int]) -> None:
        """Block the host until the operations of ``clock`` are done."""
        _merge(self.host, clock)

    def synchronize(self, *clocks: Mapping[int, int]) -> None:
        """Block the host, because code asks for it, until the operations of ``clocks`` are done; by default all of the
        process.
        """
        self._note_wait()
        for clock in clocks or tuple(stream.clock for stream in self.streams):
            _merge(self.host, clock)

    def are_done(self, clock: Mapping[int, int]) -> bool:
        """Return True if the host knows that the operations of ``clock`` are done."""
        return all(self.host.get(stream, 0) >= tick for stream, tick in clock.items())


class MockStream:
    """A stream; stands for ``torch.cuda.Stream``.

    Attributes:
        number: index among the device's streams; 0 is the first process's default stream.
        clock: operations that the stream's next operation comes after.
    """

    def __init__(self, owner: DeviceStreams) -> None:
        self.owner = owner
        self.number = next(owner.numbers)
        self.clock: Clock = {}
        self.device = torch.device("cuda", 0)
        self.stream_id, self.device_index, self.device_type = self.number, 0, 1
        self.cuda_stream = self.number
        owner.streams.append(self)

    def tick(self) -> int:
        """Queue an operation and return its number."""
        _merge(self.clock, self.owner.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def follows(self, stream: int, tick: int) -> bool:
        """Return True if operation ``tick`` of ``stream`` ends before the next operation here starts."""
        return stream == self.number or max(self.clock.get(stream, 0), self.owner.host.get(stream, 0)) >= tick

    def wait_event(self, event: MockEvent) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: MockStream) -> None:
        _merge(self.clock, stream.clock)

    def record_event(self, event: MockEvent | None = None) -> MockEvent:
        event = MockEvent(self.owner) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.owner.synchronize(self.clock)

    def query(self) -> bool:
        return self.owner.are_done(self.clock)

    def __enter__(self) -> MockStream:
        self.owner._current.append(self)  # of this module
        return self

    def __exit__(self, *exception: object) -> None:
        self.owner._current.pop()


class MockEvent:
    """An event; stands for ``torch.cuda.Event``."""

    def __init__(self, owner: DeviceStreams) -> None:
        self.owner = owner
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self.clock = dict((stream or self.owner.current).clock)

    def wait(self, stream: Any = None) -> None:
        (stream or self.owner.current).wait_event(self)

    def synchronize(self) -> None:
        self.owner.synchronize(self.clock)

    def query(self) -> bool:
        return self.owner.are_done(self.clock)

    def elapsed_time(self, _: MockEvent) -> float:
        return 1.0
