"""Functions that run in a process of the cluster."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def tell_where(file: str) -> int:
    Path(file).write_text("written from a relative path")
    return os.getpid()


def fail() -> None:
    raise ValueError("my own error")


def die() -> None:
    os._exit(3)


def wait_for_ever(folder: str) -> None:
    (Path(folder) / "begun").touch()
    try:
        while True:
            threading.Event().wait(0.05)
    except KeyboardInterrupt:
        (Path(folder) / "stopped").touch()
        raise
