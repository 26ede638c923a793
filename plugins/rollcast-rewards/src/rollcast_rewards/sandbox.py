"""A sandbox for untrusted Python programs: a process with limits.

:class:`LocalSandbox` starts programs on this machine, each in a process of its own that sees the interpreter, the
installed packages and an empty folder. :func:`isolation` says what the system permits, and
:data:`KINDS` what each kind means; a program does not start where a promised kind is missing, unless the caller
allows it. :func:`run_sandboxed` runs one program.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from rollcast.errors import ConfigError

__all__ = [
    "KINDS",
    "PROMISED",
    "Execution",
    "LocalSandbox",
    "SandboxLimits",
    "SandboxResult",
    "check_allowed",
    "isolation",
    "mechanism",
    "run_sandboxed",
    "run_tests",
]

#: ``tests`` and ``solution`` are the two ends of a channel.
Role = Literal["script", "tests", "solution"]

_SERVER = Path(__file__).with_name("_sandbox_server.py")
_START_S = 120.0
_GRACE_S = 30.0
_SYSTEM = (
    *("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime"),
)

#: Kinds of isolation and their meaning.
KINDS: Mapping[str, str] = {
    "files": "reads only the interpreter, its packages and system libraries, and writes only to its own folder",
    "network": "has no network",
    "processes": "neither sees, signals nor starts other processes",
    "shared_memory": "leaves no shared memory, message queues or keys behind",
    "privileges": "is not root and has no capability",
    "storage": "writes at most 64 MiB in 4096 files",
}
#: Kinds without which a program does not start, unless the caller allows it.
PROMISED = ("files", "network", "processes", "shared_memory", "privileges")


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
        isolation: True for each of :data:`KINDS` that held.
        passed: True if the program was tests, and all of them passed.
    """

    status: str
    stdout: str
    stderr: str
    isolation: Mapping[str, bool]
    passed: bool = False


class _Server:
    """A process that starts programs; see ``_sandbox_server.py``.

    Args:
        namespaces: True to run programs in namespaces of their own.
        bubblewrap: path of ``bwrap``, which runs the server in namespaces; None for none.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, namespaces: bool, bubblewrap: str | None = None) -> None:
        self.namespaces, self.bubblewrap = namespaces, bubblewrap
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            settings = {
                "socket": theirs.fileno(),
                "namespaces": namespaces,
                "bubblewrap": bubblewrap is not None,
                "readable": _readable(),
            }
            prefix = _bubblewrap_command(bubblewrap) if bubblewrap else []
            command = [*prefix, sys.executable, "-I", "-B", "-X", "utf8", str(_SERVER), json.dumps(settings)]
            self.popen = subprocess.Popen(  # noqa: S603 -- our own interpreter and file
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                # Threads of numerical libraries would each take a stack from the address space.
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )

    def send(self, job: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        socket.send_fds(self.socket, [json.dumps(job).encode()], list(descriptors))

    def complaint(self) -> str:
        """Return why the server has ended."""
        with suppress(OSError):
            self.socket.settimeout(1.0)
            data = self.socket.recv(1 << 16)
            if data:
                return str(json.loads(data).get("error"))
        self.close()
        stderr: IO[bytes] | None = self.popen.stderr
        return stderr.read().decode("utf-8", "replace").strip()[-500:] if stderr is not None else ""

    def close(self) -> None:
        """End the server and its programs."""
        self.socket.close()
        try:
            self.popen.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


def _readable() -> list[str]:
    """Return the folders and files of the host that a program may read: the interpreter, packages and libraries."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    library = str(Path(os.__file__).parent)
    own = [str(Path(prefix) / "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    paths = dict.fromkeys([*_SYSTEM, *own, library, *packages])
    return [path for path in paths if Path(path).exists()]


def _bubblewrap_command(program: str) -> list[str]:
    command = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev"]
    shown = [*_readable(), str(_SERVER.parent), str(Path(sys.prefix))]
    for path in dict.fromkeys([*shown, *(os.path.realpath(path) for path in shown)]):
        command += ["--ro-bind", path, path]
    for path in {sys.executable, os.path.realpath(sys.executable)}:
        command += ["--ro-bind", path, path]
    return [*command, "--size", str(64 << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]  # noqa: S108


class Execution:
    """A running program; use it as a context manager, which kills the program at its end."""

    def __init__(self, limits: SandboxLimits, stack: ExitStack, control: socket.socket, server: _Server) -> None:
        self._limits, self._stack, self._control, self._server = limits, stack, control, server
        self._files: dict[str, IO[bytes]] = {}

    def wait(self) -> SandboxResult:
        """Wait for the end of the program.

        Raises:
            OSError: the process could not be started or limited; the program has not run.
        """
        report: dict[str, Any] = {}
        self._control.settimeout(self._limits.time_s + _GRACE_S)
        while "code" not in report:
            try:
                data = self._control.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise OSError(f"the sandbox has ended: {self._server.complaint()}")
            report |= json.loads(data)
            if "error" in report:
                raise OSError(f"the sandbox could not be set up: {report['error']}")
        stdout, stderr = (self._read(name) for name in ("stdout", "stderr"))
        if "isolation" not in report:
            raise OSError(f"the sandbox could not be set up: the process ended before; {stderr.strip()[-500:]}")
        status = _status(report["code"], report["in_time"], stdout, stderr, self._limits)
        return SandboxResult(status, stdout, stderr, report["isolation"], report.get("passed", False))

    def _read(self, name: str) -> str:
        return os.pread(self._files[name].fileno(), self._limits.output_kb << 10, 0).decode("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class LocalSandbox:
    """Programs on this machine, confined by the kernel.

    The first of three mechanisms that works is used: ``namespaces`` (with root's right, or in a user namespace),
    ``bubblewrap`` (where only this program may make namespaces), and ``process`` (without namespaces). Landlock, a
    filter of system calls and limits are added to each.

    Args:
        mechanisms: mechanisms to try, in this order.
    """

    def __init__(self, mechanisms: Sequence[str] = ("namespaces", "bubblewrap", "process")) -> None:
        self._mechanisms = tuple(mechanisms)
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._bubblewrap: str | None = None
        self._owner = 0
        self.isolation: Mapping[str, bool] = {}
        self.mechanism = ""
        #: Mechanisms that do not work here, and why.
        self.refused: dict[str, str] = {}

    def start(self) -> None:
        """Find a mechanism that works and start its server, unless this process has done so.

        Raises:
            OSError: no program can be started at all.
        """
        with self._lock:
            if self._owner == os.getpid() and self.mechanism and self._is_alive():
                return
            self._owner, self._server, self._bubblewrap = os.getpid(), None, None
            for name in self._mechanisms:
                program = shutil.which("bwrap") if name == "bubblewrap" else None
                if name == "bubblewrap" and (program is None or os.geteuid() == 0):
                    # For root it makes no difference: bubblewrap cannot change to a user of the program's own.
                    self.refused[name] = "bwrap is not installed" if program is None else "not for root"
                    continue
                try:
                    self._try(name, program)
                except OSError as error:
                    self.refused[name] = str(error)
                else:
                    return
            raise OSError(f"no program can be started in the sandbox: {_refusals(self.refused)}")

    def _is_alive(self) -> bool:
        return self.mechanism == "bubblewrap" or (self._server is not None and self._server.popen.poll() is None)

    def _try(self, name: str, bubblewrap: str | None) -> None:
        server = _Server(name == "namespaces", bubblewrap)
        try:
            with self._execute(server, "", "", SandboxLimits(_START_S, _START_S), "script", None, ()) as execution:
                self.isolation = execution.wait().isolation
        except BaseException:
            server.close()
            raise
        self.mechanism, self._bubblewrap = name, bubblewrap
        if bubblewrap is None:
            self._server = server
        else:
            server.close()

    def exec(
        self,
        program: str,
        stdin: str = "",
        limits: SandboxLimits | None = None,
        *,
        role: Role = "script",
        channel: int | None = None,
        allow_missing: Collection[str] = (),
    ) -> Execution:
        """Start a program.

        Args:
            program: text of the program; for ``tests``, JSON text as ``_sandbox_channel.run_tests`` takes it.
            stdin: standard input.
            limits: limits; None for the default ones.
            role: see :data:`Role`.
            channel: descriptor of the channel.
            allow_missing: promised kinds of isolation without which the program may run.

        Raises:
            ConfigError: a promised kind of isolation is missing and not allowed to be.
            OSError: the program cannot be started.
        """
        self.start()
        lacking = [kind for kind in PROMISED if not self.isolation[kind] and kind not in allow_missing]
        if lacking:
            raise ConfigError(
                f"this machine cannot isolate programs: {_explain(lacking)}. Mechanisms: {_refusals(self.refused)}. "
                f"Permit user namespaces, install bubblewrap or use Linux 5.13 with Landlock; or, if other means "
                f"protect this machine, set allow_missing=[{', '.join(lacking)}] among the options (reward code: "
                "reward.reward_kwargs; tool python: agent.tools.python)"
            )
        server = self._server
        if self._bubblewrap is not None:
            server = _Server(False, self._bubblewrap)
        if server is None:
            raise OSError("the sandbox has no server")
        required = [kind for kind, held in self.isolation.items() if held]
        return self._execute(server, program, stdin, limits or SandboxLimits(), role, channel, required)

    def _execute(
        self,
        server: _Server,
        program: str,
        stdin: str,
        limits: SandboxLimits,
        role: str,
        channel: int | None,
        required: Sequence[str],
    ) -> Execution:
        with ExitStack() as stack:
            if server.bubblewrap is not None and server is not self._server:
                stack.callback(server.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            execution = Execution(limits, stack, ours, server)
            files = execution._files
            with theirs:
                for name, text in (("program", program), ("stdin", stdin), ("stdout", ""), ("stderr", "")):
                    files[name] = stack.enter_context(tempfile.TemporaryFile(buffering=0))
                    if text:
                        files[name].write(text.encode("utf-8", "surrogateescape"))
                        files[name].seek(0)
                job = {**asdict(limits), "cpu_s": math.ceil(limits.cpu_s), "role": role, "required": list(required)}
                if not server.namespaces and server.bubblewrap is None:
                    job["folder"] = tempfile.mkdtemp(prefix="rollcast-sandbox-")
                    stack.callback(_remove, job["folder"])
                descriptors = [theirs.fileno(), *(file.fileno() for file in files.values())]
                try:
                    server.send(job, descriptors if channel is None else [*descriptors, channel])
                except OSError as error:
                    raise OSError(f"the sandbox has ended: {server.complaint() or error}") from error
            execution._stack = stack.pop_all()
            return execution

    def close(self) -> None:
        """End the server and all its programs."""
        if self._server is not None and self._owner == os.getpid():
            self._server.close()
        self._server, self.mechanism = None, ""


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # such as folders too deep for Python
        subprocess.run(["rm", "-rf", "--", folder], check=False)  # noqa: S603, S607 -- a folder of our own


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


def _explain(kinds: Collection[str]) -> str:
    return "; ".join(f"{kind} (a program {KINDS[kind]})" for kind in kinds)


def _refusals(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items()) or "all work"


_LOCAL = LocalSandbox()
atexit.register(_LOCAL.close)


def run_sandboxed(
    program: str, stdin: str = "", limits: SandboxLimits | None = None, allow_missing: Collection[str] = ()
) -> SandboxResult:
    """Run a program until it ends or reaches a limit.

    Raises:
        ConfigError: a promised kind of isolation is missing and not in ``allow_missing``.
        OSError: the process cannot be started or limited; the program has not run.
    """
    with _LOCAL.exec(program, stdin, limits, allow_missing=allow_missing) as execution:
        return execution.wait()


def run_tests(
    program: str, test: Mapping[str, Any], limits: SandboxLimits, allow_missing: Collection[str] = ()
) -> SandboxResult:
    """Run tests of a program, the tests in one process and the program in another; ``passed`` is the outcome.

    Args:
        program: the solution.
        test: ``code`` and ``entry_point``, or ``fn_name``, ``arguments`` and ``expected``.
        limits: limits of each of the two processes.
        allow_missing: see :func:`run_sandboxed`.

    Raises:
        ConfigError, OSError: see :func:`run_sandboxed`.
    """
    ours, theirs = socket.socketpair()
    ends: tuple[tuple[str, Role, socket.socket], ...] = (
        (program, "solution", ours),
        (json.dumps(test), "tests", theirs),
    )
    with ExitStack() as stack:
        with ours, theirs:
            _, tests = (
                stack.enter_context(
                    _LOCAL.exec(text, "", limits, role=role, channel=end.fileno(), allow_missing=allow_missing)
                )
                for text, role, end in ends
            )
        return tests.wait()


def check_allowed(kinds: Collection[str], key: str) -> tuple[str, ...]:
    """Return the kinds of isolation that may be missing.

    Raises:
        ConfigError: a kind is unknown.
    """
    if isinstance(kinds, str) or not all(kind in PROMISED for kind in kinds):
        raise ConfigError(f"{key} is {kinds!r}; it has to be a list of these: {', '.join(PROMISED)}")
    return tuple(kinds)


def isolation() -> Mapping[str, bool]:
    """Return True for each of :data:`KINDS` that holds for programs on this machine.

    Raises:
        OSError: no program can be started at all.
    """
    _LOCAL.start()
    return dict(_LOCAL.isolation)


def mechanism() -> tuple[str, Mapping[str, str]]:
    """Return the mechanism of :class:`LocalSandbox` in use, and why others do not work."""
    _LOCAL.start()
    return _LOCAL.mechanism, dict(_LOCAL.refused)
