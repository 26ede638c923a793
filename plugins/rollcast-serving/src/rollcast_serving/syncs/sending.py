"""Weight syncs that send buckets: packing, sending, verification, and targets that die meanwhile."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar
from typing import cast as typed

from torch import Tensor

from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import RollcastError, RolloutError, WeightSyncError
from rollcast.protocol import combine_checksums, tensor_checksum
from rollcast_serving.casting import CastRoom, Outgoing, WeightCast
from rollcast_serving.contracts.weight_sync import (
    BaseWeightSync,
    Delivery,
    RemoteRollout,
    SyncInterruptedError,
    SyncSettings,
)

if TYPE_CHECKING:
    from rollcast.contracts.engine import BaseEngine
    from rollcast.contracts.rollout import BaseRollout

__all__ = ["ACCOUNT_S", "BucketSync", "Receivers", "TargetLostError", "Transport", "pack_buckets"]


#: Seconds that a target which closed the connection may take to report the reason.
ACCOUNT_S = 5.0
#: Seconds that living targets have to end after their group broke.
_BREAK_S = 1.0


def pack_buckets(
    named: Iterable[tuple[str, Tensor]], size: int, cast: WeightCast | None = None
) -> Iterator[list[Outgoing]]:
    """Yield tensors in order, in buckets of at most ``size`` bytes; a larger tensor is sent alone.

    Args:
        named: names and tensors.
        size: maximum size of a bucket in bytes, after the cast.
        cast: conversion of each tensor; None for none.
    """
    bucket: list[Outgoing] = []
    held = 0
    for name, tensor in named:
        outgoing = Outgoing(name, tensor, tensor.dtype if cast is None else cast.dtype_of(name, tensor))
        if bucket and held + outgoing.size > size:
            yield bucket
            bucket, held = [], 0
        bucket.append(outgoing)
        held += outgoing.size
    if bucket:
        yield bucket


class TargetLostError(Exception):
    """A target died, and the transport cannot continue for the others."""


class Receivers:
    """The calls to the targets in flight while a transport sends.

    Args:
        calls: calls of :meth:`RemoteRollout.receive_weights`, one per target.
    """

    def __init__(self, calls: Sequence[Future[WeightReport]]) -> None:
        self._calls = calls
        #: Errors of dead targets, by index.
        self.lost: dict[int, RolloutError] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def check(self, wait_s: float = 0.0) -> None:
        """Record targets that have died, waiting up to ``wait_s`` seconds.

        Raises:
            WeightSyncError: a living target refused the weights.
        """
        waiting = [call for place, call in enumerate(self._calls) if place not in self.lost]
        if wait_s and waiting:
            wait(waiting, wait_s, FIRST_EXCEPTION)
        for place, call in enumerate(self._calls):
            if place not in self.lost and call.done() and (error := call.exception()) is not None:
                self.lose(place, error)

    def lose(self, place: int, error: BaseException) -> None:
        """Record that a target died; re-raise the error if it has another cause."""
        if isinstance(error, WeightSyncError) or not isinstance(error, RolloutError):
            raise error
        self.lost[place] = error

    def check_all(self) -> None:
        """Record targets that have died.

        Raises:
            TargetLostError: a target died.
            WeightSyncError: a living target refused the weights.
        """
        self.check()
        if self.lost:
            raise TargetLostError

    def results(self) -> list[Delivery]:
        """Wait for all calls; return each target's report or error."""
        for place, call in enumerate(self._calls):
            if place not in self.lost and (error := call.exception()) is not None:
                self.lose(place, error)
        return [self.lost[place] if place in self.lost else call.result() for place, call in enumerate(self._calls)]

    def account(self, wait_s: float) -> None:
        """Record targets that have died, waiting up to ``wait_s`` seconds for the first, or for a refused tensor.

        Unlike :meth:`check`, a living target's error is not raised: it may only report that the transport broke.
        """
        deadline = time.monotonic() + wait_s
        while True:
            errors = [call.exception() if call.done() else None for call in self._calls]
            for place, error in enumerate(errors):
                if (
                    place not in self.lost
                    and isinstance(error, RolloutError)
                    and not isinstance(error, WeightSyncError)
                ):
                    self.lost[place] = error
            waiting = [call for call in self._calls if not call.done()]
            is_refused = any(isinstance(error, WeightSyncError) and error.tensor for error in errors)
            left = deadline - time.monotonic()
            if self.lost or is_refused or not waiting or left <= 0:
                return
            wait(waiting, left, FIRST_COMPLETED)

    def interrupted(self, wait_s: float) -> list[Delivery]:
        """Return the errors of dead targets; the others, whose transport is gone, count as interrupted."""
        wait(self._calls, wait_s)
        self.account(0.0)
        causes = "; ".join(str(error) for error in self.lost.values())
        again = SyncInterruptedError(f"the weights did not arrive because of another replica: {causes}")
        return [self.lost.get(place, again) for place in range(len(self._calls))]


class Transport(ABC):
    """Transport of one sync; a context manager that closes whatever it opened.

    Attributes:
        source: JSON-like description with which the targets open their end.
        calls_first: True if targets are called before the first bucket, False if after the last.
    """

    source: Mapping[str, Any]
    calls_first: ClassVar[bool] = True

    def stage(self, bucket: Sequence[Outgoing], room: CastRoom, receivers: Receivers) -> WeightBucket:
        """Return a bucket as it is sent, with its checksums, for :meth:`send`; raises the same errors.

        Args:
            bucket: names, tensors, and the dtypes to send them in.
            room: memory for cast tensors, if the transport has none of its own.
            receivers: calls of the targets.
        """
        named = list(room.cast(bucket))
        return WeightBucket(named, {name: tensor_checksum(tensor) for name, tensor in named})

    @abstractmethod
    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:
        """Send the staged bucket; return when the engine's tensors may change.

        Raises:
            WeightSyncError: a living target refused the bucket.
            TargetLostError: a target died, and the others cannot be served without it.
        """

    @abstractmethod
    def finish(self, receivers: Receivers) -> None:
        """Announce that there are no more buckets; raises the same errors as :meth:`send`."""


class BucketSync(BaseWeightSync):
    """A weight sync that sends full tensors in buckets of bounded size, and verifies each target's report."""

    #: Name in the registry, which is sent to the targets.
    name: ClassVar[str]

    def __init__(
        self,
        engine: BaseEngine,
        targets: Sequence[BaseRollout | RemoteRollout] = (),
        settings: SyncSettings | None = None,
    ) -> None:
        super().__init__(engine, targets, settings)
        self._room = CastRoom()

    @abstractmethod
    def transport(self) -> AbstractContextManager[Transport]:
        """Return a transport to the current targets, for one sync."""

    async def sync(self, version: int, only_adapter: bool = False) -> list[Delivery]:
        """Send the weights; see :meth:`BaseWeightSync.sync`. A rank without targets takes part in the collectives."""
        adapter = self.engine.get_adapter()
        reports: list[Delivery] = []
        if adapter is None or not only_adapter:
            reports = self._send_all(self.engine.get_per_tensor_param(), version, cast=self.settings.cast)
        if adapter is not None:
            reports = self._send_all(adapter.tensors.items(), version, {"adapter": dict(adapter.config)})
        return reports

    def _send_all(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        described: Mapping[str, Any] | None = None,
        cast: WeightCast | None = None,
    ) -> list[Delivery]:
        buckets = pack_buckets(named, self.settings.bucket_bytes, cast)
        try:
            return self._send(buckets, version, described or {}) if self.targets else []
        finally:
            for _ in buckets:  # without targets or after a failure: the other ranks wait in the collectives
                pass
            self._room.leave_device()

    def _send(self, buckets: Iterator[list[Outgoing]], version: int, described: Mapping[str, Any]) -> list[Delivery]:
        targets = typed("Sequence[RemoteRollout]", self.targets)
        sent = _Sent()
        pool = ThreadPoolExecutor(len(targets), "weights")
        receivers = Receivers([])
        try:
            with self.transport() as transport:

                def call() -> Receivers:
                    source = {**transport.source, **described}
                    return Receivers(
                        [
                            pool.submit(target.receive_weights, self.name, {**source, "target": index}, version)
                            for index, target in enumerate(targets)
                        ]
                    )

                receivers = call() if transport.calls_first else receivers
                self._send_buckets(transport, buckets, sent, receivers, version)
                receivers = receivers if transport.calls_first else call()
                results = receivers.results()
        except TargetLostError:
            return receivers.interrupted(_BREAK_S)
        finally:
            # A target that hangs keeps its thread until its own deadline.
            pool.shutdown(wait=False)
        for index, report in enumerate(results):
            if isinstance(report, WeightReport):
                sent.attest(report, version, f"replica {index}")
        return results

    def _send_buckets(
        self,
        transport: Transport,
        buckets: Iterator[list[Outgoing]],
        sent: _Sent,
        receivers: Receivers,
        version: int,
    ) -> None:
        try:
            for bucket in buckets:
                staged = transport.stage(bucket, self._room, receivers)
                sent.add(staged)
                transport.send(staged, receivers)
                del bucket, staged  # so that the next bucket is not gathered beside this one
            transport.finish(receivers)
        except (OSError, RuntimeError, EOFError) as error:
            # A target's own report explains more than its closed connection, and the death of one target more than the
            # report of another that their group broke.
            receivers.account(ACCOUNT_S)
            if receivers.lost:
                raise TargetLostError from error
            receivers.check()
            if isinstance(error, RollcastError):
                raise
            raise WeightSyncError(f"sending version {version} by {self.name} failed: {error}") from error


class _Sent:
    """Record of the sent tensors, to verify reports."""

    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0
        self.checksums: dict[str, str] = {}
        self.last_names: dict[str, list[str]] = {}

    def add(self, bucket: WeightBucket) -> None:
        """Count a bucket."""
        number = str(len(self.checksums))
        self.checksums[number] = combine_checksums(bucket.expected.items())
        self.last_names[number] = list(bucket.expected)
        self.tensors += len(bucket)
        self.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)

    def attest(self, report: WeightReport, version: int, who: str) -> None:
        """Check that a report matches the sent tensors.

        Raises:
            WeightSyncError: it does not; the message says what differs, with the first tensor if it is known.
        """
        if report.version != version:
            raise WeightSyncError(f"{who} reports version {report.version} after an update to version {version}")
        for number, checksum in self.checksums.items():
            if report.checksums.get(number) != checksum:
                names = self.last_names[number]
                raise WeightSyncError(
                    f"{who} reports checksum {report.checksums.get(number)} for bucket {number} ({names[0]} to "
                    f"{names[-1]})), but {checksum} was sent",
                    tensor=names[0],
                )
        if (report.tensors, report.bytes) != (self.tensors, self.bytes):
            raise WeightSyncError(
                f"{who} reports {report.tensors} tensors of {report.bytes} bytes; "
                f"{self.tensors} of {self.bytes} bytes were sent"
            )
