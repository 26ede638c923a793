"""The Ray session of this process: its identity, and its safe use from background threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rollcast_ray.ray_internals import session_lock

__all__ = ["current_session", "staying_in"]


def current_session() -> str | None:
    """Return an id of this process's connection to Ray, which changes with each ``ray.init``; None without Ray."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # Each embedded Ray has its own session name; joining the same cluster again changes the job id.
    cluster = context.get_session_name() if hasattr(context, "get_session_name") else context.gcs_address
    return f"{cluster}/{context.get_job_id()}"


@contextmanager
def staying_in(session: str | None) -> Iterator[bool]:
    """Block ``ray.shutdown`` and ``ray.init`` during the block; yield True if ``session`` is still the current one.

    A call to Ray starts a session if there is none, so a background thread cannot rely on checking
    ``ray.is_initialized`` before the call: the session may end between the check and the call.
    """
    with session_lock():
        yield session is not None and current_session() == session
