"""A process on the cluster that drives worker groups instead of the command's process."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from rollcast.errors import RollcastError, WorkerError

__all__ = ["run_driver"]

logger = logging.getLogger(__name__)
#: Time limit in seconds for an interrupted function to stop its workers.
_STOP_S = 30.0


def run_driver(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run a function in a Ray task; see :meth:`rollcast.contracts.runtime.Runtime.run_driver`."""
    # Reserve no CPU: the loop waits most of the time, and the pools may request all CPUs of a node.
    # Disable Ray's retries, which would start while workers of the failed attempt still run.
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")(_drive)
    ref = task.remote(str(Path.cwd()), list(sys.path), cloudpickle.dumps((function, args)))
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise _own_error(error) from None
    except ray.exceptions.RayError as error:
        text = str(error).partition(" Some common causes")[0].strip()
        raise WorkerError(f"the process of the training loop died: {text}") from error
    except (KeyboardInterrupt, SystemExit):
        ray.cancel(ref, force=False)
        if not ray.wait([ref], timeout=_STOP_S)[0]:
            logger.warning("the training loop on the cluster did not stop within %g s", _STOP_S)
        raise


def _drive(folder: str, driver_path: list[str], blob: bytes) -> Any:
    """Run the function in the command's working folder, so that relative paths have the same meaning.

    Args:
        folder: working folder of the command.
        driver_path: ``sys.path`` of the command; its folders that exist on this node are added.
        blob: pickle of the function and its arguments.
    """
    # Ray cancels a task with this signal. If Ray was started from a shell's background job, its processes inherit that
    # the signal is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.extend(entry for entry in driver_path if entry not in sys.path and Path(entry).exists())
    if Path(folder).is_dir():
        os.chdir(folder)
    function, args = pickle.loads(blob)
    return function(*args)


def _own_error(error: ray.exceptions.RayTaskError) -> BaseException:
    """Return the function's exception, with its traceback as a note unless the error is meant for the user."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    if not isinstance(cause, RollcastError):
        cause.add_note(str(error))
    return cause
