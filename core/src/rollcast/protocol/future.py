"""DataProtoFuture: a call in flight whose result is a batch, which stays on the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rollcast.errors import DataProtoError, WorkerError
from rollcast.protocol._remote import RowMap
from rollcast.protocol._remote import promise as promise
from rollcast.protocol.batch import DataProto

__all__ = ["DataProtoFuture", "promise"]

Resolve = Callable[["float | None"], Any]


class DataProtoFuture:
    """The result of a non-blocking call, whose rows stay in the workers' store.

    :meth:`select` names columns of the result and returns them as a :class:`~rollcast.protocol.DataProto` at once, with
    remote columns. Passed to a worker group, the future stands for its result: the workers wait for the call, and read
    the rows that they need directly from the workers that store them. :meth:`get` fetches the result.

    The length of the result is known at once if the method is registered with ``rows="same"``; such a future can be
    split, and passed to another call, while its own call is still running.

    Args:
        resolve: Function that waits for the call for at most the given seconds and returns its result, a batch with
            remote columns or anything else.
        ready: Function that returns True if ``resolve`` would not wait.
        cancel: Function that cancels the call and returns True if it had not ended.
        refs: The runtime's references to the call's results, one per rank, in rank order (``ray.wait(future.refs)``).
        rows: Rows of the result, before the call ends; None if unknown.
        by_rank: Function that yields the rank and result of each rank as they end, waiting at most the given seconds
            in total.
    """

    def __init__(
        self,
        resolve: Resolve,
        ready: Callable[[], bool] | None = None,
        cancel: Callable[[], bool] | None = None,
        refs: Sequence[Any] = (),
        rows: RowMap | None = None,
        by_rank: Callable[[float | None], Iterator[tuple[int, Any]]] | None = None,
    ) -> None:
        self.refs = tuple(refs)
        self._resolve = resolve
        self._ready = ready
        self._cancel = cancel
        self._cancelled = False
        self._rows = rows
        self._by_rank = by_rank
        self._result: tuple[Any, ...] = ()
        self._local: DataProto | None = None

    # ---- waiting ----

    def wait(self, timeout: float | None = None) -> DataProtoFuture:
        """Wait until the call has ended, without fetching anything.

        Raises:
            WorkerError: the call failed or was cancelled.
            WorkerTimeoutError: ``timeout`` seconds passed; the call continues and can be awaited again.
        """
        if not self._result:
            if self._cancelled:
                raise WorkerError("this call was cancelled, so it has no result")
            self._result = (self._resolve(timeout),)
        return self

    def cancel(self) -> bool:
        """Cancel the call on every rank; return True if it had not ended.

        A rank that has not started the call drops it; a rank that is running the call is interrupted, which poisons a
        group of several ranks: see :meth:`rollcast.WorkerGroup.restart`.
        """
        if self._cancelled or self._result or self._cancel is None:
            return False
        self._cancelled = self._cancel()
        return self._cancelled

    def done(self) -> bool:
        """Return True if :meth:`wait` would return at once."""
        return bool(self._result) or self._cancelled or self._ready is None or self._ready()

    def get(self, timeout: float | None = None) -> Any:
        """Fetch and return the DataProto, or the call's other result; later calls return the same object.

        The tensors have their own memory: writing to them does not affect other readers of the rows.

        Raises:
            WorkerError: the call failed or was cancelled.
            WorkerTimeoutError: the deadline (seconds) passed; the call goes on, and can be awaited again.
        """
        result = self.wait(timeout)._result[0]
        if type(result) in (list, tuple):  # a dispatch mode may collect a list by rank
            return type(result)(part.local(timeout=timeout) if isinstance(part, DataProto) else part for part in result)
        if not isinstance(result, DataProto):
            return result
        if self._local is None:
            self._local = result.local(timeout=timeout)
        return self._local

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """Yield ``(rank, result)`` in the order in which the ranks end; the columns of DataProtos are remote.

        Args:
            timeout: Deadline for all ranks in seconds; by default the deadline of the group.

        Raises:
            WorkerError: a rank failed, or the deadline passed.
        """
        if self._by_rank is None:
            raise DataProtoError("as_completed() works on the future that a call of a registered method returned")
        return self._by_rank(timeout)

    # ---- the result as a batch ----

    def __len__(self) -> int:
        return len(self._rows) if self._rows is not None and not self._result else len(self._batch())

    def _batch(self) -> DataProto:
        """Return the result as a batch, of which only the length is known while the call is in flight.

        Raises:
            WorkerError: the length is unknown, and the call failed.
            DataProtoError: the result is not a batch.
        """
        result = self.argument()
        if not isinstance(result, DataProto):
            raise DataProtoError(f"the call returned a {type(result).__name__}, not a DataProto; take it with get()")
        return result

    def select(self, keys: Iterable[str] | str | None = None) -> DataProto:
        """Return columns of the result as a batch with remote columns, without the metadata; ``None`` for both, whole.

        Does not wait for the call if the length of the result is known: a missing column raises when it is read, and
        without keys, asking for names or metadata waits.
        """
        return self._batch() if keys is None else self._batch().select(keys, [])

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split the rows into ``chunks`` batches of equal length; see :meth:`DataProto.chunk`."""
        return self._batch().chunk(chunks)

    @staticmethod
    def concat(members: Sequence[DataProtoFuture | DataProto]) -> DataProto:
        """Concatenate the rows of results, and of batches; does not wait for results whose length is known."""
        return DataProto.concat(
            [member._batch() if isinstance(member, DataProtoFuture) else member for member in members]
        )

    def argument(self) -> Any:
        """Return what a call gets for the future: a batch with remote columns, or the result of another kind.

        Waits only if the length of the result is unknown.
        """
        rows = self._rows
        if rows is not None and not self._result:
            return DataProto.of_calls(RowMap(rows.pieces, rows.index, rows.fetch, (self,)))
        return self.wait()._result[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.argument(),)

    def __repr__(self) -> str:
        if self._result:
            return f"DataProtoFuture({self._result[0]!r})"
        return f"DataProtoFuture(in flight{'' if self._rows is None else f', rows={len(self._rows)}'})"


def _identity(value: Any) -> Any:
    return value
