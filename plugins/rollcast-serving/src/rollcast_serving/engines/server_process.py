"""An engine's server as a child process: started, watched and stopped by its owner."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollcast.errors import RolloutError

__all__ = ["ServerProcess", "read_spec"]

_HOST = "127.0.0.1"
_LOG_LINES = 20
_STOP_GRACE_S = 3.0
_PARENT_POLL_S = 0.5


class ServerProcess:
    """A server that listens on this machine's loopback, in its own process group.

    It ends with :meth:`stop`, and by itself when this process is gone.

    Args:
        engine: engine's name, for messages.
        module: module that serves, run as ``python -m``; it must call :func:`read_spec` first.
        args: arguments of the engine by name, except its address.
        environment: environment variables of the process.
        folder: folder of its log and its temporary files.
        leftovers: path prefix of files in shared memory that the engine removes only if it ends by itself.
    """

    def __init__(
        self,
        engine: str,
        module: str,
        args: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        leftovers: str = "",
    ) -> None:
        self.engine = engine
        self.api_key = secrets.token_urlsafe(24)
        self.log = folder / "server.log"
        self._leftovers = leftovers
        self._reserved = _reserve_port()
        port: int = self._reserved.getsockname()[1]
        self.url = f"http://{_HOST}:{port}"
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(  # noqa: S603  # the module is the adapter's own
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(folder)},
                process_group=0,
            )
        listening = {"host": _HOST, "port": port, "api_key": self.api_key}
        message = {"args": dict(args), "listening": listening, "parent": os.getpid()}
        # If the process is already gone, death() reports it later.
        with suppress(BrokenPipeError), self._popen.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps(message).encode())

    @property
    def pid(self) -> int:
        """Process id of the server, and of its group."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._popen.poll() is None

    def death(self, problem: str) -> RolloutError:
        """Return an error that says how the server ended, with the end of its log."""
        code = self._popen.poll()
        if code is None:
            end = "while its process runs"
        elif code < 0:
            end = f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            end = f"its process ended with exit code {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if self.log.exists() else []
        return RolloutError(f"{problem}, {end}; the end of its log:" + "".join(f"\n    {line}" for line in lines))

    def stop(self) -> None:
        """End the server and all processes that it started; there is nothing to save."""
        self._reserved.close()
        group = self._popen.pid
        leftovers = self._mapped_files()
        with suppress(ProcessLookupError):
            # Python's resource tracker survives SIGTERM and removes the semaphores of the other processes.
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
        """Return the group's files in shared memory that would be left behind."""
        paths: set[Path] = set()
        for maps in Path("/proc").glob("[0-9]*/maps") if self._leftovers else ():
            with suppress(OSError):
                if os.getpgid(int(maps.parent.name)) == self._popen.pid:
                    lines = [line for line in maps.read_text().splitlines() if self._leftovers in line]
                    paths.update(Path(line[line.index(self._leftovers) :]) for line in lines)
        # The kernel marks a file that was unlinked while mapped by a note after its name.
        return {path for path in paths if path.exists()}


def read_spec() -> tuple[dict[str, Any], dict[str, Any]]:
    """Read in the server's process what to serve; from then on the process ends with its parent.

    The spec comes through standard input, because a command line would show the API key to every user of the machine.

    Returns:
        Arguments of the engine by name, and ``host``, ``port`` and ``api_key`` of the server.
    """
    spec = json.load(sys.stdin)
    threading.Thread(target=_end_with_parent, args=(int(spec["parent"]),), daemon=True).start()
    return spec["args"], spec["listening"]


def _end_with_parent(parent: int) -> None:
    """Kill this process and everything that it started once the rollout's process is gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    # SIGTERM ends all processes except Python's resource tracker, which then removes their semaphores.
    os.killpg(0, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)


def _reserve_port() -> socket.socket:
    """Return a socket that reserves a port until it is closed.

    The socket does not listen, so the server, which also binds with SO_REUSEADDR, can bind the port, while a process
    that asks for any free port does not get it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((_HOST, 0))
    return holder
