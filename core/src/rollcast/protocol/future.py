"""A handle to a DataProto that workers are still computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollcast.errors import DataProtoError

Fetch = Callable[[Sequence[object], float | None], list[object]]
Collect = Callable[[list[object]], object]
Ready = Callable[[Sequence[object]], bool]


def concat_shards(values: list[Any]) -> object:
    """Join the shards of a call: the default way to collect."""
    from rollcast.protocol.dataproto import DataProto

    return DataProto.concat(values)


def _only(values: list[object]) -> object:
    return values[0]


class DataProtoFuture:
    """The result of a non-blocking call: one reference per shard, not yet fetched.

    Args:
        refs: what the runtime gave for each shard, in order of the rows.
        fetch: blocks until all given references are computed, at most for the given seconds
            (``None``: without limit), and returns their values; raises the runtime's own errors.
        collect: makes the result from the values of all shards.
        ready: whether all given references are computed; does not block.

    Attributes:
        refs: the references, as a tuple.

    Example::

        future = group.generate(prompts)    # a non-blocking method
        parts = future.chunk(len(future.refs))    # no data moves
        batch = future.get(timeout=600)
    """

    def __init__(
        self,
        refs: Sequence[object],
        fetch: Fetch,
        collect: Collect = concat_shards,
        ready: Ready | None = None,
    ) -> None:
        self.refs = tuple(refs)
        self._fetch = fetch
        self._collect = collect
        self._ready = ready
        self._results: list[object] = []

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result; later calls return the same object.

        Args:
            timeout: seconds, ``None`` for no limit. A call that ran out of time can be repeated.

        Raises:
            DataProtoError: the runtime returned another number of values than of references.
        """
        if not self._results:
            values = self._fetch(self.refs, timeout)
            if len(values) != len(self.refs):
                raise DataProtoError(f"{len(self.refs)} shards were fetched but {len(values)} values came back")
            self._results.append(self._collect(values))
        return self._results[0]

    def done(self) -> bool:
        """Whether :meth:`get` would return without waiting.

        Raises:
            DataProtoError: the future was made without a ``ready`` function and is not fetched.
        """
        if self._results:
            return True
        if self._ready is None:
            raise DataProtoError("this future cannot tell whether it is done; call get(timeout=)")
        return self._ready(self.refs)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future per shard; nothing is fetched.

        Raises:
            DataProtoError: ``chunks`` is not the number of shards, or the shards are not plain
                parts of the result (it is collected in another way than by joining them).
        """
        if chunks != len(self.refs):
            raise DataProtoError(
                f"a future of {len(self.refs)} shards can be cut in {len(self.refs)} chunks, not"
                f" in {chunks}; use get().chunk({chunks})"
            )
        if self._collect is not concat_shards and self._collect is not _only:
            raise DataProtoError(
                "the shards of this future are not parts of its result, because it is collected"
                f" with {self._collect!r}; use get().chunk({chunks})"
            )
        return [DataProtoFuture([ref], self._fetch, _only, self._ready) for ref in self.refs]

    @staticmethod
    def concat(futures: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The rows of all futures, in order, as one future; nothing is fetched.

        Raises:
            DataProtoError: the list is empty, or the futures belong to different runtimes.
        """
        if not futures:
            raise DataProtoError("concat: the list of futures is empty")
        first = futures[0]
        if any(future._fetch != first._fetch for future in futures):
            raise DataProtoError("concat: the futures are fetched in different ways; get() them")
        refs = [ref for future in futures for ref in future.refs]
        if all(future._collect in (concat_shards, _only) for future in futures):
            return DataProtoFuture(refs, first._fetch, concat_shards, first._ready)

        def collect(values: list[object]) -> object:
            position = 0
            joined: list[object] = []
            for future in futures:
                joined.append(future._collect(values[position : position + len(future.refs)]))
                position += len(future.refs)
            return concat_shards(joined)

        return DataProtoFuture(refs, first._fetch, collect, first._ready)
