"""A registered method as the controller calls it on a group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rollcast.controller.calls_by_name import CallsByName
from rollcast.controller.decorator import Registered
from rollcast.controller.dispatch import RankOutputs, distribute, join
from rollcast.errors import DispatchError

if TYPE_CHECKING:
    from rollcast.protocol.future import DataProtoFuture

__all__ = ["GroupMethod"]


class GroupMethod:
    """Dispatch, execute, collect.

    ``group.method(...)`` gives the result, ``group.method.remote(...)`` a handle to it at once.
    """

    def __init__(self, group: CallsByName, name: str, function: Callable[..., Any], entry: Registered) -> None:
        self._group = group
        self._entry = entry
        functools.update_wrapper(self, function, updated=())
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._entry.blocking:
            return self.remote(*args, **kwargs)
        finish, _ = self._start(args, kwargs, keep=False)
        return finish(None)

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Start the call and return a handle; what it computes stays with the workers until it is read."""
        from rollcast.protocol.future import DataProtoFuture

        finish, refs = self._start(args, kwargs, keep=True)
        runtime = self._group.runtime
        return DataProtoFuture(finish, runtime.fetch, functools.partial(runtime.ready, refs))

    def _start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], keep: bool
    ) -> tuple[Callable[[float | None], Any], list[Any]]:
        """Send the calls; gives what waits for the result, and the references waited for."""
        entry, group = self._entry, self._group
        recorder = group.runtime.recorder
        recording = recorder.begin(group, self.__name__, args, kwargs) if recorder is not None else None
        with recording or nullcontext(), self._named_in_errors():
            calls = distribute(entry.dispatch_mode, group, args, kwargs)
            ranks = [r for r in entry.execute_mode.ranks(group.world_size) if calls.per_rank[r] is not None]
            refs = group.send(self.__name__, [(r, calls.per_rank[r]) for r in ranks], keep, calls.answering)

        def finish(timeout: float | None) -> Any:
            with recording or nullcontext():
                outputs = group.receive(self.__name__, ranks, refs, timeout)
                if keep:
                    outputs = [_as_handle(output, group.runtime.fetch) for output in outputs]
                with self._named_in_errors():
                    found = RankOutputs(outputs, ranks, calls.state, entry.execute_mode.name)
                    result = join(entry.dispatch_mode, group, found)
                if recording is not None:
                    recording.end(result)
            return result

        return finish, refs

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """A mode knows nothing of the method that it serves, so the method's name is added here."""
        try:
            yield
        except DispatchError as error:
            error.add_note(f"in a call of {self!r}")
            raise

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self._group!r}>"


def _as_handle(output: Any, fetch: Any) -> Any:
    from rollcast.protocol.future import DataProtoFuture, StoredShard

    return DataProtoFuture.of_shard(output, fetch) if isinstance(output, StoredShard) else output
