"""SGLang's server as a child process: started, looked at, and ended by its own handle."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollcast.errors import RolloutError

__all__ = ["ServerProcess"]

_LOG_LINES = 20
_STOP_GRACE_S = 3.0
_LOADS = "/dev/shm/sglang_loads_"  # noqa: S108  # SGLang's choice
_HOST = "127.0.0.1"


class ServerProcess:
    """A server that listens on this machine's loopback, in a process group of its own.

    It ends with :meth:`stop`, and by itself when this process is gone.

    Args:
        args: SGLang's ``ServerArgs`` by name, less where it listens.
        environment: of the process.
        folder: for its log.
    """

    def __init__(self, args: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self.log = folder / "server.log"
        self._reserved = _reserve_port()
        port: int = self._reserved.getsockname()[1]
        self.url = f"http://{_HOST}:{port}"
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "rollcast_sglang.server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(folder)},
                process_group=0,
            )
        listening = {"host": _HOST, "port": port, "api_key": self.api_key}
        message = {"args": {**args, **listening}, "parent": os.getpid()}
        # A process that is gone already is told of when it is asked for.
        with suppress(BrokenPipeError), self._popen.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps(message).encode())

    @property
    def pid(self) -> int:
        """The server's process id, and its group's."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._popen.poll() is None

    def death(self, what: str) -> RolloutError:
        """An error that says how the server ended, and how its log does."""
        code = self._popen.poll()
        if code is None:
            end = "while its process runs"
        elif code < 0:
            end = f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            end = f"its process ended with exit code {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if self.log.exists() else []
        return RolloutError(f"{what}, {end}; the end of its log:" + "".join(f"\n    {line}" for line in lines))

    def stop(self) -> None:
        """End the server and all that it started; it has nothing to save."""
        self._reserved.close()
        group = self._popen.pid
        leftovers = self._mapped_files()
        with suppress(ProcessLookupError):
            # Python's resource tracker lets this signal pass, and removes the semaphores of the others.
            os.killpg(group, signal.SIGTERM)
        self._popen.kill()
        self._popen.wait()
        deadline = time.monotonic() + _STOP_GRACE_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.02)
            os.killpg(group, signal.SIGKILL)
        for path in leftovers:
            path.unlink(missing_ok=True)

    def _mapped_files(self) -> set[Path]:
        """Files in memory that SGLang removes only when it ends by itself, which takes it seconds."""
        found: set[Path] = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                if os.getpgid(int(maps.parent.name)) == self._popen.pid:
                    lines = [line for line in maps.read_text().splitlines() if line.endswith(".shm")]
                    found.update(Path(line[line.index(_LOADS) :]) for line in lines if _LOADS in line)
        return found


def _reserve_port() -> socket.socket:
    """Return a socket that keeps a port from other processes until it is closed.

    It does not listen. The server, which binds with SO_REUSEADDR too, can therefore bind the same port, and a process
    that asks for any free one does not get it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((_HOST, 0))
    return holder
