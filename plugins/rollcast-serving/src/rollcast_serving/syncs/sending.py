"""What all syncs share that send weights in buckets: packing, sending, and the attestation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

from torch import Tensor

from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import RollcastError, WeightSyncError
from rollcast.protocol import combine_checksums, tensor_checksum
from rollcast_serving.weight_sync import BaseWeightSync, RemoteRollout

__all__ = ["BucketSync", "Receivers", "Transport", "pack_buckets"]


#: How long a target that hung up may take to say why, in seconds.
_ACCOUNT_S = 5.0


def pack_buckets(named: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in their order, in buckets of at most ``size`` bytes; a larger tensor goes alone."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in named:
        count = tensor.numel() * tensor.element_size()
        if bucket and held + count > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += count
    if bucket:
        yield bucket


class Receivers:
    """The targets' calls that are under way while a transport sends.

    Args:
        calls: of :meth:`RemoteRollout.receive_weights`.
    """

    def __init__(self, calls: Sequence[Future[WeightReport]]) -> None:
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    def raise_failure(self, wait_s: float = 0.0) -> None:
        """Raise the error of a target that has failed, if one has, or does within ``wait_s``."""
        if wait_s and self._calls:
            wait(self._calls, wait_s, FIRST_EXCEPTION)
        for call in self._calls:
            if call.done():
                call.result()

    def reports(self) -> list[WeightReport]:
        """Wait for all reports."""
        return [call.result() for call in self._calls]


class Transport(ABC):
    """One sync's way; a context manager that gives back whatever it opened.

    Attributes:
        source: what the targets need to open their end, JSON-like.
        calls_first: whether targets are called before the first bucket, or after the last.
    """

    source: Mapping[str, Any]
    calls_first: ClassVar[bool] = True

    @abstractmethod
    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:
        """Send a bucket; returns when its tensors may change.

        Raises:
            WeightSyncError: it was not taken in time.
        """

    @abstractmethod
    def finish(self, receivers: Receivers) -> None:
        """Say that there are no more."""


class BucketSync(BaseWeightSync):
    """Sends full tensors in buckets of bounded size, and holds each target's report against them."""

    #: Its name in the registry, which the targets are told.
    name: ClassVar[str]

    @abstractmethod
    def transport(self) -> AbstractContextManager[Transport]:
        """A way to the present targets, for one sync."""

    async def sync(self, version: int, only_adapter: bool = False) -> list[WeightReport]:
        """See :meth:`BaseWeightSync.sync`; a rank without targets takes part in the collectives."""
        adapter = self.engine.get_adapter()
        reports: list[WeightReport] = []
        if adapter is None or not only_adapter:
            reports = self._send_all(self.engine.get_per_tensor_param(), version)
        if adapter is not None:
            reports = self._send_all(adapter.tensors.items(), version, {"adapter": dict(adapter.config)})
        return reports

    def _send_all(
        self, named: Iterable[tuple[str, Tensor]], version: int, described: Mapping[str, Any] | None = None
    ) -> list[WeightReport]:
        buckets = pack_buckets(named, self.settings.bucket_bytes)
        try:
            return self._send(buckets, version, described or {}) if self.targets else []
        finally:
            for _ in buckets:  # without targets, or after a failure: the other ranks are in the collectives
                pass

    def _send(
        self, buckets: Iterator[list[tuple[str, Tensor]]], version: int, described: Mapping[str, Any]
    ) -> list[WeightReport]:
        targets = cast("Sequence[RemoteRollout]", self.targets)
        sent = _Sent()
        with ThreadPoolExecutor(len(targets), "weights") as pool, self.transport() as transport:

            def call() -> Receivers:
                source = {**transport.source, **described}
                return Receivers(
                    [
                        pool.submit(target.receive_weights, self.name, {**source, "target": index}, version)
                        for index, target in enumerate(targets)
                    ]
                )

            receivers = call() if transport.calls_first else Receivers([])
            try:
                for bucket in buckets:
                    transport.send(sent.add(bucket), receivers)
                transport.finish(receivers)
            except (OSError, RuntimeError) as error:
                # What a target says of it is nearer to the cause than that it hung up.
                receivers.raise_failure(_ACCOUNT_S)
                if isinstance(error, RollcastError):
                    raise
                raise WeightSyncError(f"sending version {version} by {self.name} failed: {error}") from error
            reports = (receivers if transport.calls_first else call()).reports()
        for index, report in enumerate(reports):
            sent.attest(report, version, f"replica {index}")
        return reports


class _Sent:
    """What was sent, to hold the reports against."""

    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0
        self.checksums: dict[str, str] = {}
        self.last_names: dict[str, list[str]] = {}

    def add(self, bucket: Sequence[tuple[str, Tensor]]) -> WeightBucket:
        """Count a bucket, and give its tensors their checksums."""
        expected = {name: tensor_checksum(tensor) for name, tensor in bucket}
        number = str(len(self.checksums))
        self.checksums[number] = combine_checksums(expected.items())
        self.last_names[number] = list(expected)
        self.tensors += len(bucket)
        self.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        return WeightBucket(bucket, expected)

    def attest(self, report: WeightReport, version: int, who: str) -> None:
        """Refuse a report that is not of what was sent.

        Raises:
            WeightSyncError: says what differs, with the first tensor that can be named.
        """
        if report.version != version:
            raise WeightSyncError(f"{who} reports version {report.version} after an update to version {version}")
        for number, checksum in self.checksums.items():
            if report.checksums.get(number) != checksum:
                names = self.last_names[number]
                raise WeightSyncError(
                    f"{who} reports checksum {report.checksums.get(number)} of bucket {number} ({names[0]} to "
                    f"{names[-1]}), of which {checksum} was sent",
                    tensor=names[0],
                )
        if (report.tensors, report.bytes) != (self.tensors, self.bytes):
            raise WeightSyncError(
                f"{who} reports {report.tensors} tensors of {report.bytes} bytes; "
                f"{self.tensors} of {self.bytes} bytes were sent"
            )
