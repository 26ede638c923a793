"""Every error that rollcast raises on purpose.

One root, :class:`RollcastError`; each class is also the standard library error that a caller
would expect in its place, and each survives pickling with its fields, because an error that is
born in a worker has to reach the controller whole.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[RollcastError], args: tuple[Any, ...], state: dict[str, Any]) -> RollcastError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class RollcastError(Exception):
    """The root of all errors that rollcast raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class PluginError(RollcastError):
    """A part could not be provided by the installed plugins."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed distribution and no in-process registration provides the part."""


class PluginLoadError(PluginError, ImportError):
    """The distribution that provides the part failed while it was imported."""


class PluginConflictError(PluginError, ValueError):
    """Two distributions claim the same name in one group."""


class PluginTypeError(PluginError, TypeError):
    """The loaded object is not what its group holds."""


class PluginVersionError(PluginError, RuntimeError):
    """The distribution does not support the installed version of the core."""


class ConfigError(RollcastError, ValueError):
    """A configuration key or value is wrong; names the key, where it was set, and what is valid."""


class DataProtoError(RollcastError, ValueError):
    """An operation on a DataProto does not fit its columns or its length."""


class ColumnError(DataProtoError, LookupError):
    """A column that was asked for is not in the DataProto."""


class DispatchError(RollcastError, ValueError):
    """Arguments, modes or outputs do not fit the way a call is distributed."""


class UnknownDispatchModeError(PluginNotFoundError, AttributeError):
    """``Dispatch.NAME`` names no registered mode."""


class ResourceError(RollcastError, RuntimeError):
    """The cluster cannot give what a resource pool asks for."""


class WorkerError(RollcastError, RuntimeError):
    """A call on a worker group failed; the message names group, role, rank, node and method.

    Attributes:
        group, role, method: what was called.
        rank, node: the first rank that failed, and where it ran.
        cause_type: class name of the first cause, as it was raised in the worker.
        remote_traceback: the worker's traceback as text, empty if the process died.
    """

    group: str = ""
    role: str = ""
    method: str = ""
    rank: int = -1
    node: str = ""
    cause_type: str = ""
    remote_traceback: str = ""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A blocking call did not end before its deadline."""


class DataError(RollcastError, ValueError):
    """A dataset file, row or column is missing or malformed; names file and row."""


class RewardError(RollcastError, ValueError):
    """A reward raised, returned a value that is not finite, or the wrong number of values."""


class CheckpointError(RollcastError, OSError):
    """A checkpoint could not be written or read; complete older ones are untouched."""


class CapabilityError(RollcastError, ValueError):
    """The chosen parts cannot work together, or a part cannot do what was asked."""


class RequestError(RollcastError, ValueError):
    """A request that a rollout cannot serve; names the request and what is wrong with it."""


class RolloutError(RollcastError, RuntimeError):
    """A rollout engine or replica died, hangs, or answered what its contract does not allow."""


class WeightSyncError(RolloutError):
    """Weights did not reach a rollout as they are; it generates nothing until an update succeeds.

    Attributes:
        tensor: the first tensor that is wrong, empty if none can be named.
    """

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class RendererError(RollcastError, ValueError):
    """A conversation cannot be rendered: the template refuses it, or a tool format is unknown."""


class EnvironmentFailed(RollcastError, RuntimeError):
    """An environment raised, hung or died; ends its own rollout only."""


class SessionEnded(RollcastError, RuntimeError):
    """A session's budget allows no further reply.

    Attributes:
        end: reason, one of :data:`rollcast.contracts.trajectory.ENDS`.
    """

    def __init__(self, message: str, end: str = "length") -> None:
        super().__init__(message)
        self.end = end
