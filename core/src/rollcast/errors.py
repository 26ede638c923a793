"""The error classes of rollcast.

All derive from :class:`RollcastError`. Each class also derives from the standard exception that a caller would
expect, and keeps its fields when pickled, because errors are sent from workers to the controller.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[RollcastError], args: tuple[Any, ...], state: dict[str, Any]) -> RollcastError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class RollcastError(Exception):
    """Base class of the errors of rollcast."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class PluginError(RollcastError):
    """A plugin is missing or cannot be used."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed distribution and no in-process registration provides the plugin."""


class PluginLoadError(PluginError, ImportError):
    """The import of a plugin failed."""


class PluginConflictError(PluginError, ValueError):
    """Two distributions claim the same name in one group."""


class PluginTypeError(PluginError, TypeError):
    """The loaded object does not pass the check of its group."""


class PluginVersionError(PluginError, RuntimeError):
    """The distribution does not support the installed version of the core."""


class ConfigError(RollcastError, ValueError):
    """A configuration key or value is wrong; names the key, where it was set, and what is valid."""


class DataProtoError(RollcastError, ValueError):
    """An operation on a DataProto is invalid for its columns or its length."""


class ColumnError(DataProtoError, LookupError):
    """A requested column is not in the DataProto."""


class DispatchError(RollcastError, ValueError):
    """Arguments or outputs do not match the dispatch mode of a call, or a mode is invalid."""


class UnknownDispatchModeError(PluginNotFoundError, AttributeError):
    """No mode is registered under the name in ``Dispatch.NAME``."""


class ResourceError(RollcastError, RuntimeError):
    """The cluster lacks the resources that a resource pool requests."""


class WorkerError(RollcastError, RuntimeError):
    """A call on a worker group failed; the message names group, role, rank, node and method.

    Attributes:
        group, role, method: names of the called group, role and method.
        rank, node: first rank that failed, and its node.
        cause_type: class name of the error as raised in the worker.
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
    """A call did not end before its deadline."""


class DataError(RollcastError, ValueError):
    """A dataset file, row or column is missing or malformed; names file and row."""


class RewardError(RollcastError, ValueError):
    """A reward raised an error, or returned a value that is not finite or the wrong number of values."""


class CheckpointError(RollcastError, OSError):
    """A checkpoint could not be written or read; complete older checkpoints are unchanged."""


class CapabilityError(RollcastError, ValueError):
    """The chosen plugins cannot be combined, or a plugin does not support a requested feature."""


class RequestError(RollcastError, ValueError):
    """A rollout cannot serve a request; names the request and the reason."""


class RolloutError(RollcastError, RuntimeError):
    """A rollout engine or replica died, hangs, or violated its contract."""


class WeightSyncError(RolloutError):
    """A rollout received corrupt or incomplete weights; generation is blocked until an update succeeds.

    Attributes:
        tensor: name of the first corrupt tensor; empty if unknown.
    """

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class RendererError(RollcastError, ValueError):
    """A conversation cannot be rendered, because the template rejects it or the tool format is unknown."""


class EnvironmentFailed(RollcastError, RuntimeError):
    """An environment raised an error, hung or died; this ends only its own rollout."""


class SessionEnded(RollcastError, RuntimeError):
    """A session's budget allows no further reply.

    Attributes:
        end: reason, such as ``length`` or ``max_turns``.
    """

    def __init__(self, message: str, end: str = "length") -> None:
        super().__init__(message)
        self.end = end
