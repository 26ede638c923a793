"""A sandbox for untrusted Python programs: a process with limits.

Limits on Linux:

- CPU seconds, address space and output are limited in the child (``setrlimit``); wall-clock time by
  the parent, which kills the whole process group.
- The child inherits no environment variable and no file descriptor but its three standard streams, and
  starts in an empty folder that is removed afterwards. It does not see the parent's module path.
- No network: a network namespace of its own where the system permits one, and a filter of system calls
  that refuses sockets, new programs and new processes (threads are fine). If the system permits
  neither, only Python's own calls are refused, which native code can bypass;
  :func:`isolation` returns the isolation of this machine.
- A sandbox started by root runs as the user ``nobody``, who may write only into the sandbox's own folder.

The sandbox is not a virtual machine: the program can read the files that its user may read (those of root, if
only root can read Python itself). Started by another user than root, it can write that user's files.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rollcast.errors import ConfigError

__all__ = ["SandboxLimits", "SandboxResult", "isolation", "run_sandboxed"]

_CHILD = Path(__file__).with_name("_sandbox_child.py")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a program.

    Attributes:
        time_s: wall-clock time in seconds.
        cpu_s: CPU time in seconds, rounded up.
        memory_mb: address space in MiB; the interpreter alone takes about 30.
        output_kb: size in KiB of standard output, of standard error and of each file.

    Raises:
        ConfigError: a limit is not positive.
    """

    time_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    output_kb: int = 256

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"the sandbox's {key} is {value}; it has to be above 0")


@dataclass(frozen=True)
class SandboxResult:
    """The result of a program.

    Attributes:
        status: ``ok`` (exit status 0), ``error`` (another one, or a signal), ``time``, ``cpu``, ``memory`` or
            ``output``, after the limit that ended it.
        stdout, stderr: output of the program, at most ``output_kb`` each.
        isolation: kinds of isolation that the system permitted; see :func:`isolation`.
    """

    status: str
    stdout: str
    stderr: str
    isolation: Mapping[str, bool]


def run_sandboxed(program: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Run a program until it ends or reaches a limit.

    Raises:
        OSError: the process cannot be started or limited; the program has not run.
    """
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix="rollcast-sandbox-") as name:
        folder = Path(name)
        (folder / "work").mkdir()
        for file, text in (("program.py", program), ("stdin", stdin)):
            (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")
        for path, mode in ((folder, 0o755), (folder / "work", 0o777), (folder / "program.py", 0o644)):
            path.chmod(mode)
        ours, theirs = os.pipe()
        with open(ours, "rb") as report:
            try:
                code, in_time = _run(folder, limits, theirs)
            finally:
                os.close(theirs)
            found = json.loads(report.read() or b'{"error": "the process ended before"}')
        stdout, stderr = (_read(folder / stream, limits) for stream in ("stdout", "stderr"))
    if "error" in found:
        raise OSError(f"the sandbox could not be set up: {found['error']}; {stderr.strip()[-500:]}")
    return SandboxResult(_status(code, in_time, stdout, stderr, limits), stdout, stderr, found)


def _run(folder: Path, limits: SandboxLimits, report: int) -> tuple[int, bool]:
    program, cpu_s = str(folder / "program.py"), math.ceil(limits.cpu_s)
    settings = json.dumps({**asdict(limits), "cpu_s": cpu_s, "program": program, "report": report})
    command = [sys.executable, "-I", "-B", "-X", "utf8", str(_CHILD), settings]
    with (
        (folder / "stdin").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
    ):
        child = subprocess.Popen(  # noqa: S603 -- our own interpreter and file; what it runs is what the limits are for
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder / "work",
            # Threads of numerical libraries would each take a stack from the address space.
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            pass_fds=[report],
        )
        try:
            child.wait(limits.time_s)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return child.returncode, in_time


def _read(path: Path, limits: SandboxLimits) -> str:
    with path.open("rb") as file:
        return file.read(limits.output_kb << 10).decode("utf-8", "replace")


def _status(code: int, in_time: bool, stdout: str, stderr: str, limits: SandboxLimits) -> str:
    if not in_time:
        return "time"
    if code == 0:
        return "ok"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "cpu"
    if "MemoryError" in stderr[-500:]:
        return "memory"
    full = limits.output_kb << 10
    if max(len(stdout.encode()), len(stderr.encode())) >= full or "OSError: [Errno 27]" in stderr[-500:]:
        return "output"
    return "error"


@functools.cache
def isolation() -> Mapping[str, bool]:
    """Return the kinds of isolation that the system permits.

    ``namespace`` is a network of its own, ``filter`` a filter of system calls, ``user`` a user other than root.
    """
    return run_sandboxed("").isolation
