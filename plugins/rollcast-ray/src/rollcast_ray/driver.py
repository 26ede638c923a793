"""A process of the cluster that drives worker groups in place of the command's process."""

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
#: Seconds that an interrupted function has to stop its workers.
_STOP_S = 30.0


def run_driver(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run a function in a Ray task; see :meth:`rollcast.contracts.runtime.Runtime.run_driver`."""
    # No CPU of its own: the loop waits most of the time, and the pools may ask for all CPUs of a node.
    # No retry by Ray, which would begin while workers of the lost attempt still run.
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
    """Run the function in the folder of the command, so that relative paths mean the same.

    Args:
        folder: of the command.
        driver_path: ``sys.path`` of the command; its folders that exist here are added.
        blob: pickle of the function and its arguments.
    """
    # Ray cancels a task by this signal. A Ray that a shell's background job started hands down that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.extend(entry for entry in driver_path if entry not in sys.path and Path(entry).exists())
    if Path(folder).is_dir():
        os.chdir(folder)
    function, args = pickle.loads(blob)
    return function(*args)


def _own_error(error: ray.exceptions.RayTaskError) -> BaseException:
    """Return the function's exception, with its traceback as a note unless it is an error for the user."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    if not isinstance(cause, RollcastError):
        cause.add_note(str(error))
    return cause
