"""The Ray session of this process: which one it is, and how a background thread uses it without starting another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rollcast_ray.ray_internals import session_lock

__all__ = ["current_session", "staying_in"]


def current_session() -> str | None:
    """Return an id of this process's connection to Ray, another one after each ``ray.init``; None without Ray."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # An embedded Ray has a session name of its own; a cluster that is joined again counts its jobs.
    cluster = context.get_session_name() if hasattr(context, "get_session_name") else context.gcs_address
    return f"{cluster}/{context.get_job_id()}"


@contextmanager
def staying_in(session: str | None) -> Iterator[bool]:
    """Keep ``ray.shutdown`` and ``ray.init`` waiting during the block; yield True if the session is still the current.

    Every call into Ray starts a session where none is, so a look at ``ray.is_initialized`` before the call is not
    enough for a thread of its own: the session may end between the two.
    """
    with session_lock():
        yield session is not None and current_session() == session
