"""Restricts this process and then runs a program in it; see :mod:`rollcast_rewards.sandbox`.

Run as ``python -I _sandbox_child.py <settings as JSON>``, with the standard library only. The limits that took
effect, or the error, are written to the pipe ``report``, which is closed before the program starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

_NOBODY = 65534
_NEW_NETWORK, _NEW_USER = 0x4000_0000, 0x1000_0000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_ALLOW, _KILL, _REFUSE, _ABSENT = 0x7FFF_0000, 0x8000_0000, 0x0005_0001, 0x0005_0026
_THREAD = 0x0001_0000
_SET_KEEPCAPS, _CAPABILITY_VERSION, _MAY_READ = 8, 0x2008_0522, 1 << 2

#: Machine → its audit number, system calls that are refused, clone, and those that are said not to exist.
_CALLS: dict[str, tuple[int, tuple[int, ...], int, tuple[int, ...]]] = {
    # socket, fork, vfork, execve, kill, ptrace, unshare, tkill, setns, io_uring_setup, pidfd_send_signal, execveat
    "x86_64": (0xC000_003E, (41, 57, 58, 59, 62, 101, 272, 200, 308, 425, 424, 322, 165, 155), 56, (435,)),
    "aarch64": (0xC000_00B7, (198, 221, 129, 117, 97, 130, 268, 425, 424, 281, 40, 41), 220, (435,)),
}
#: Python audit events that are refused if the system permits no other isolation.
_EVENTS = ("socket.", "os.fork", "os.exec", "os.posix_spawn", "os.kill", "subprocess.Popen", "ctypes.")


def _limit(settings: dict[str, Any]) -> None:
    memory, output, cpu = settings["memory_mb"] << 20, settings["output_kb"] << 10, settings["cpu_s"]
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, output, output),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        least = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, least), least))


def _own_network(libc: ctypes.CDLL) -> bool:
    return any(libc.unshare(flags) == 0 for flags in (_NEW_NETWORK, _NEW_NETWORK | _NEW_USER))


def _leave_root(libc: ctypes.CDLL) -> bool:
    """Change to the user ``nobody``; return True if the process belongs to an ordinary user now.

    If only root can read the standard library, the capability to read all files is kept, and no other.
    """
    if os.getuid() != 0:
        return True
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.seteuid(_NOBODY)
        readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        if not readable and libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0) != 0:
            return False
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:
        return os.getuid() != 0
    if not readable:
        header = ctypes.create_string_buffer(struct.pack("II", _CAPABILITY_VERSION, 0))
        kept = ctypes.create_string_buffer(struct.pack("6I", _MAY_READ, _MAY_READ, 0, 0, 0, 0))
        libc.capset(header, kept)
    return True


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Install a seccomp filter; return True if it is in force.

    Refused calls fail with EPERM, absent ones with ENOSYS; clone may only make threads.
    """
    known = _CALLS.get(platform.machine())
    if known is None:
        return False
    audit, refused, clone, absent = known

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump(code: int, value: int, yes: int, no: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def give(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    equal, at_least, has_bits = 0x15, 0x35, 0x45
    program = [load(4), jump(equal, audit, 1, 0), give(_KILL), load(0), jump(at_least, 0x4000_0000, 0, 1), give(_KILL)]
    for number in refused:
        program += [jump(equal, number, 0, 1), give(_REFUSE)]
    for number in absent:
        program += [jump(equal, number, 0, 1), give(_ABSENT)]
    program += [jump(equal, clone, 0, 3), load(16), jump(has_bits, _THREAD, 1, 0), give(_REFUSE), give(_ALLOW)]
    code = ctypes.create_string_buffer(b"".join(program))
    packed = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    header = ctypes.create_string_buffer(packed)
    return bool(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0)


def _refuse_events(event: str, _arguments: tuple[Any, ...]) -> None:
    if event.startswith(_EVENTS):
        raise PermissionError(f"{event} is not permitted in the sandbox")


def _report(settings: dict[str, Any], found: dict[str, Any]) -> None:
    with open(settings["report"], "w", encoding="utf-8") as pipe:
        json.dump(found, pipe)


def main(settings: dict[str, Any]) -> None:
    """Restrict the process and run ``settings["program"]`` as ``__main__``."""
    try:
        with open(settings["program"], encoding="utf-8", errors="surrogateescape") as file:
            source = file.read()
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = _own_network(libc)
        user = _leave_root(libc)
        _limit(settings)
        libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        filtered = _filter_calls(libc)
    except Exception as error:  # noqa: BLE001 -- the parent raises it
        _report(settings, {"error": f"{type(error).__name__}: {error}"})
        return
    _report(settings, {"namespace": namespace, "filter": filtered, "user": user})
    if not filtered:
        sys.addaudithook(_refuse_events)
    sys.argv = ["program.py"]
    module: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__, "__file__": "program.py"}
    exec(compile(source, "program.py", "exec", dont_inherit=True), module)  # noqa: S102 -- the purpose of this file


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
