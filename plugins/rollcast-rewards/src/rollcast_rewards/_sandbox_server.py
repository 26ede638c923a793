"""A process that starts confined programs; see :mod:`rollcast_rewards.sandbox`.

Run as ``python -I _sandbox_server.py <settings as JSON>``, with the standard library only. It forks for each job,
which takes a few milliseconds where a new interpreter takes tens. A job is one message on the server's socket: limits
as JSON, with descriptors of a control socket, the program, standard input, output and error, and perhaps a channel.
The server sees no program's text, so no program finds another's in its memory.

On the control socket, the program's process reports the isolation or an error, then the server the exit status. The
process is killed at its time limit and when the other end of the control socket is closed.
"""

# The server starts sooner without pathlib, and the program's streams stay open.
# ruff: noqa: PTH100, PTH120, SIM115

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import types
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from rollcast_rewards import _sandbox_channel as channel
from rollcast_rewards import _sandbox_confine as confinement

del sys.path[0]

#: Python audit events that are refused if the system permits no filter of system calls.
_EVENTS = ("socket.", "os.fork", "os.exec", "os.posix_spawn", "os.kill", "subprocess.Popen", "ctypes.")
_DESCRIPTORS = 6


@dataclass
class _Started:
    """A running program: its control socket and the time at which it is killed."""

    control: socket.socket
    deadline: float
    in_time: bool = True


class _Job:
    """The job of a program's process, which has left the server's loop."""

    def __init__(self, settings: dict[str, Any], control: socket.socket, descriptors: list[int], number: int) -> None:
        self.settings, self.control, self.descriptors, self.number = settings, control, descriptors, number


def serve(settings: dict[str, Any]) -> _Job | None:
    """Start programs until the caller closes the socket; return a job in its new process, else None."""
    server = socket.socket(fileno=settings["socket"])
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    selector.register(reading, selectors.EVENT_READ)
    running: dict[int, _Started] = {}
    number = 0
    while True:
        for key, _ in selector.select(_end_late(running)):
            if key.data is not None:  # the caller has closed the control socket
                _abandon(key, running, selector)
            elif key.fileobj == reading:
                os.read(reading, 4096)
                _reap(running, selector)
            else:
                number = (number + 1) % 256
                job = _receive(server, number)
                if job is None:
                    for pid in running:
                        _kill(pid)
                    return None
                child = _start(job, settings)
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # Nothing may close a descriptor later, when its number belongs to the program.
                    selector.close()
                    for control in (server, *(program.control for program in running.values())):
                        control.close()
                    return job
                if child is not None:
                    running[child] = _Started(job.control, time.monotonic() + job.settings["time_s"])
                    selector.register(job.control, selectors.EVENT_READ, child)


def _abandon(key: selectors.SelectorKey, running: dict[int, _Started], selector: selectors.BaseSelector) -> None:
    """Kill a program whose caller has left, unless it was reaped a moment ago."""
    if key.data in running:
        selector.unregister(key.fileobj)
        _kill(key.data)


def _end_late(running: dict[int, _Started]) -> float | None:
    """Kill programs whose time is over; return the seconds until the next deadline, None if there is none."""
    now = time.monotonic()
    waits = []
    for pid, program in running.items():
        if program.in_time and program.deadline <= now:
            program.in_time = False
            _kill(pid)
        elif program.in_time:
            waits.append(program.deadline - now)
    return min(waits, default=None)


def _receive(server: socket.socket, number: int) -> _Job | None:
    """Return the next job; None if the caller has closed the socket."""
    data, descriptors, _, _ = socket.recv_fds(server, 1 << 16, _DESCRIPTORS)
    if not data:
        return None
    return _Job(json.loads(data), socket.socket(fileno=descriptors[0]), descriptors[1:], number)


def _start(job: _Job, settings: dict[str, Any]) -> int | None:
    """Fork; return the process id, 0 in the child, or None if it failed. The child alone keeps the descriptors."""
    child: int | None
    try:
        child = confinement.clone(settings["namespaces"])
    except OSError as error:
        _send(job.control, {"error": str(error)})
        job.control.close()
        child = None
    if child != 0:
        for descriptor in job.descriptors:
            os.close(descriptor)
    return child


def _reap(running: dict[int, _Started], selector: selectors.BaseSelector) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        program = running.pop(pid)
        with suppress(KeyError):
            selector.unregister(program.control)
        _send(program.control, {"code": os.waitstatus_to_exitcode(status), "in_time": program.in_time})
        program.control.close()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the caller has left
        control.send(json.dumps(message).encode())


def _refuse_events(event: str, _arguments: tuple[Any, ...]) -> None:
    if event.startswith(_EVENTS):
        raise PermissionError(f"{event} is not permitted in the sandbox")


def run(job: _Job, settings: dict[str, Any]) -> None:
    """Restrict this process and run the job's program as ``__main__``."""
    os.setsid()
    try:
        source = _take_descriptors(job)
        number = settings["server"] % (1 << 22) * 256 + job.number
        isolation, has_filter = confinement.confine(job.settings, settings, number)
        lacking = [kind for kind in job.settings["required"] if not isolation[kind]]
        if lacking:
            raise OSError(f"the isolation of {', '.join(lacking)} does not hold any more")
    except Exception as error:  # noqa: BLE001 -- the caller raises it
        _send(job.control, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(job.control, {"isolation": isolation})
    if not has_filter:
        sys.addaudithook(_refuse_events)
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__="program.py")
    sys.modules["__main__"] = module
    role = job.settings["role"]
    if role == "tests":
        channel.run_tests(source, module.__dict__, lambda: _send(job.control, {"passed": True}))
        return
    job.control.close()
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 -- the file's purpose
    if role == "solution":
        channel.serve_solution(module.__dict__)


def _take_descriptors(job: _Job) -> str:
    """Make the job's descriptors standard streams and channel, close all others; return the program's text."""
    program, *streams = job.descriptors
    high = max(*job.descriptors, job.control.fileno()) + 1
    with open(program, encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    for place, descriptor in enumerate((*streams, job.control.detach())):
        os.dup2(descriptor, high + place)
    os.closerange(0, high)
    os.closerange(high + len(streams) + 1, 1 << 20)
    for place in range(len(streams)):
        os.dup2(high + place, place)
    control = os.dup2(high + len(streams), len(streams))
    os.closerange(high, high + len(streams) + 1)
    job.control = socket.socket(fileno=control)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1
    )
    return source


def main(settings: dict[str, Any]) -> None:
    """Serve one caller."""
    try:
        if settings["namespaces"]:
            confinement.enter_namespaces(settings["readable"])
        confinement.drop_bounding_set()
    except OSError as error:
        _send(socket.socket(fileno=settings["socket"]), {"error": str(error)})
        return
    settings["server"] = os.getpid()
    job = serve(settings)
    if job is not None:
        run(job, settings)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
