"""Confines a process; used by :mod:`rollcast_rewards._sandbox_server`, with the standard library only.

:func:`enter_namespaces` is called once by the server, :func:`confine` once by the process of each program.
"""

# Paths are texts of several roots here, and the server starts sooner without pathlib.
# ruff: noqa: PTH102, PTH103, PTH106, PTH110, PTH112, PTH120, PTH211

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["clone", "confine", "drop_bounding_set", "enter_namespaces"]

LIBC = ctypes.CDLL(None, use_errno=True)
_NOBODY = 65534
_FIRST_USER = 1 << 30
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_SIGCHLD = 17
_SET_DEATH_SIGNAL, _SET_KEEPCAPS, _SET_SECCOMP, _DROP_BOUND, _SET_NO_NEW_PRIVS = 1, 8, 22, 24, 38
_AMBIENT, _AMBIENT_CLEAR, _FILTER_MODE = 47, 4, 2
_CAPABILITY_VERSION, _MAY_READ = 0x2008_0522, 1 << 2
_NO_SUID, _NO_DEVICES, _NO_EXEC, _READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = (
    2, 4, 8, 1, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_DETACH = 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HOST = "/.host"
_STORAGE = "size=64m,nr_inodes=4096,mode=0700"

_ALLOW, _KILL, _REFUSE, _ABSENT = 0x7FFF_0000, 0x8000_0000, 0x0005_0001, 0x0005_0026
_THREAD = 0x0001_0000
_ARCHITECTURES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
#: The last system call that the lists below know; later ones are said not to exist.
_LAST_CALL = 467
_CLONE, _PRCTL, _PRLIMIT, _TGKILL = (56, 220), (157, 167), (302, 261), (234, 131)
#: Refused system calls by what they would do, with their numbers on x86-64 and ARM64; -1 for none.
_REFUSED = {
    "reach the network": [(41, 198)],
    "start programs and processes": [(57, -1), (58, -1), (59, 221), (322, 281)],
    # kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, pidfd_open, pidfd_getfd, ptrace,
    # process_vm_readv, process_vm_writev, process_madvise, process_mrelease, kcmp, migrate_pages, move_pages,
    # setpriority, ioprio_set, sched_setparam, sched_setscheduler, sched_setattr, sched_setaffinity
    "reach other processes": [
        (62, 129), (200, 130), (129, 138), (297, 240), (424, 424), (434, 434), (438, 438), (101, 117),
        (310, 270), (311, 271), (440, 440), (448, 448), (312, 272), (256, 238), (279, 239),
        (141, 140), (251, 30), (142, 118), (144, 119), (314, 274), (203, 122),
    ],
    # shmget, shmat, shmctl, shmdt, semget, semop, semctl, semtimedop, msgget, msgsnd, msgrcv, msgctl, mq_open,
    # mq_unlink, mq_timedsend, mq_timedreceive, mq_notify, mq_getsetattr, add_key, request_key, keyctl
    "leave memory behind": [
        (29, 194), (30, 196), (31, 195), (67, 197), (64, 190), (65, 193), (66, 191), (220, 192),
        (68, 186), (69, 189), (70, 188), (71, 187), (240, 180), (241, 181), (242, 182), (243, 183), (244, 184),
        (245, 185), (248, 217), (249, 218), (250, 219),
    ],
    # unshare, setns, mount, umount2, pivot_root, chroot, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick,
    # mount_setattr, name_to_handle_at, open_by_handle_at, swapon, swapoff, acct, quotactl, quotactl_fd
    "change what is mounted": [
        (272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51), (428, 428), (429, 429), (430, 430),
        (431, 431), (432, 432), (433, 433), (442, 442), (303, 264), (304, 265), (167, 224), (168, 225), (163, 89),
        (179, 60), (443, 443),
    ],
    # bpf, perf_event_open, userfaultfd, init_module, finit_module, delete_module, kexec_load, kexec_file_load, reboot,
    # settimeofday, clock_settime, adjtimex, clock_adjtime, sethostname, setdomainname, iopl, ioperm, syslog,
    # lookup_dcookie, vhangup, personality, fanotify_init, inotify_init, inotify_init1, memfd_secret, modify_ldt, uselib
    "reach rare parts of the kernel": [
        (321, 280), (298, 241), (323, 282), (175, 105), (313, 273), (176, 106), (246, 104), (320, 294), (169, 142),
        (164, 170), (227, 112), (159, 171), (305, 266), (170, 161), (171, 162), (172, -1), (173, -1), (103, 116),
        (212, 18), (153, 58), (135, 92), (300, 262), (253, -1), (294, 26), (447, 447), (154, -1), (134, -1),
    ],
}  # fmt: skip
#: Refused without a mount namespace, because Landlock does not govern them: truncate, chmod, fchmod, fchmodat,
#: fchmodat2, chown, fchown, lchown, fchownat, utime, utimes, futimesat, utimensat, setxattr and its variants,
#: removexattr and its variants.
_REFUSED_ON_HOST_FILES = [
    (76, 45), (90, -1), (91, 52), (268, 53), (452, 452), (92, -1), (93, 55), (94, -1), (260, 54), (132, -1), (235, -1),
    (261, -1), (280, 88), (188, 5), (189, 6), (190, 7), (463, 463), (197, 14), (198, 15), (199, 16), (466, 466),
]  # fmt: skip
#: io_uring_setup, io_uring_enter, io_uring_register, clone3, openat2: callers fall back to older calls.
_ABSENT_CALLS = (425, 426, 427, 435, 437)
_OPENS = (((2, -1), 1), ((257, 56), 2))
_ACCESS_OR_TRUNCATE, _TRUNCATE_ONLY = 0o1003, 0o1000


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def enter_namespaces(readable: Sequence[str]) -> None:
    """Move this process to file systems, IPC objects and a network of its own.

    Args:
        readable: folders and files of the host that stay visible, read-only.

    Raises:
        OSError: the system does not permit it; the process is unusable afterwards.
    """
    spaces, user, group = _NEW_MOUNTS | _NEW_IPC | _NEW_NETWORK, os.geteuid(), os.getegid()
    if user == 0:
        _check(LIBC.unshare(spaces), "unshare")
    else:
        _check(LIBC.unshare(spaces | _NEW_USER), "unshare with a user namespace")
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w", encoding="ascii") as stream:
                stream.write(text)
    os.umask(0o022)
    places = {path: os.path.realpath(path) for path in readable}
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    _mount("rollcast", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=0755")  # noqa: S108 -- of this namespace
    os.mkdir("/tmp" + _HOST)  # noqa: S108
    os.chdir("/tmp")  # noqa: S108
    _check(LIBC.syscall(155 if platform.machine() == "x86_64" else 41, b".", ("." + _HOST).encode()), "pivot_root")
    os.chdir("/")
    os.mkdir("/tmp")  # noqa: S108
    bound: list[str] = []
    for real in sorted({*places.values(), *_DEVICES}):
        if os.path.exists(_HOST + real) and not any(real.startswith(f"{folder}/") for folder in bound):
            _show(real)
            bound.append(real)
    for path, real in places.items():
        if path != real and not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(real, path)
    _check(LIBC.umount2(_HOST.encode(), _DETACH), "unmount the host's files")
    os.rmdir(_HOST)
    _mount(None, "/", None, _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEVICES, "size=1m,mode=0755")


def _show(path: str) -> None:
    """Make a folder or file of the host visible, read-only."""
    if os.path.isdir(_HOST + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    _mount(_HOST + path, path, None, _BIND | _RECURSIVE)
    # mount_setattr reaches file systems mounted below; it is younger (Linux 5.12) than the second way.
    wanted = ctypes.create_string_buffer(struct.pack("4Q", _READ_ONLY | _NO_SUID, 0, 0, 0))
    if LIBC.syscall(442, -100, path.encode(), 0x8000, wanted, 32) == 0 or path in _DEVICES:
        return
    present = os.statvfs(path).f_flag
    flags = present & (_NO_DEVICES | _NO_EXEC | 1024 | 2048) | (1 << 21 if present & 4096 else 0)
    _mount(None, path, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | flags)


def drop_bounding_set() -> None:
    """Remove all capabilities from the bounding set, so that no program can ever gain one."""
    for capability in range(64):
        LIBC.prctl(_DROP_BOUND, capability, 0, 0, 0)


def clone(has_namespaces: bool) -> int:
    """Fork; with ``has_namespaces``, the child also has mounts, IPC objects and process ids of its own.

    Raises:
        OSError: the system refuses.
    """
    if not has_namespaces:
        return os.fork()
    flags = _NEW_MOUNTS | _NEW_IPC | _NEW_PROCESSES | _SIGCHLD
    number = 56 if platform.machine() == "x86_64" else 220
    # PyDLL keeps the interpreter's lock, so that the child has it too. This process has no other thread.
    child: int = ctypes.PyDLL(None, use_errno=True).syscall(number, flags, None, None, None, None)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone: " + os.strerror(ctypes.get_errno()))
    return child


def confine(job: dict[str, Any], server: dict[str, Any], number: int) -> tuple[dict[str, bool], bool]:
    """Restrict this process; return the kinds of isolation that hold now, and True if system calls are filtered.

    Args:
        job: the limits, and ``folder``, the program's own on the host if the server has no namespaces.
        server: ``namespaces`` and ``bubblewrap``: True if mounts, IPC objects, network and process ids are private;
            ``readable``: files and folders that the program may read.
        number: number of the program, from which root chooses its user.

    Raises:
        OSError: a limit cannot be set.
    """
    own = server["namespaces"] or server["bubblewrap"]
    folder = "/tmp" if own else job["folder"]  # noqa: S108 -- of the namespace
    user = _FIRST_USER + number if os.geteuid() == 0 else os.geteuid()
    if server["namespaces"]:
        ids = f",uid={user},gid={user}" if os.geteuid() == 0 else ""
        _mount("rollcast", folder, "tmpfs", _NO_SUID | _NO_DEVICES, _STORAGE + ids)
    elif os.geteuid() == 0:
        os.chown(folder, user, user)
    os.chdir(folder)
    _limit(job)
    has_privileges = _leave_root(user)
    LIBC.prctl(_SET_DEATH_SIGNAL, 9, 0, 0, 0)
    LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    abi = _restrict_files(["/"] if own else [*server["readable"], *_DEVICES], folder)
    filtered = _filter_calls(own, abi)
    files = own or (abi >= 1 and filtered)
    isolation = {
        "files": files,
        "network": own or filtered,
        "processes": own or (filtered and files),
        "shared_memory": own or filtered,
        "privileges": not has_privileges,
        "storage": bool(server["namespaces"]),
    }
    return isolation, filtered


def _limit(job: dict[str, Any]) -> None:
    memory, output, cpu = job["memory_mb"] << 20, job["output_kb"] << 10, job["cpu_s"]
    for kind, value in (
        # Hard and soft: the first process of a namespace ignores SIGXCPU.
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (least, least))


def _leave_root(user: int) -> bool:
    """Drop root and all capabilities; return True if the process keeps a privilege.

    If only root can read the standard library, the capability to read all files is kept, and no other.
    """
    keeps = 0
    if os.geteuid() == 0:
        os.setgroups([])
        for number in (user, _NOBODY):  # a container may know few users
            try:
                os.setresgid(number, number, number)
                os.seteuid(number)
            except OSError:
                continue
            user = number
            break
        else:
            return True
        keeps = 0 if os.access(os.__file__, os.R_OK, effective_ids=True) else _MAY_READ
        os.seteuid(0)
        LIBC.prctl(_SET_KEEPCAPS, int(keeps != 0), 0, 0, 0)
        os.setresuid(user, user, user)
    LIBC.prctl(_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("II", _CAPABILITY_VERSION, 0))
    sets = ctypes.create_string_buffer(struct.pack("6I", keeps, keeps, 0, 0, 0, 0))
    _check(LIBC.capset(header, sets), "drop all capabilities")
    return keeps != 0


def _restrict_files(readable: Iterable[str], folder: str) -> int:
    """Restrict this process to some files by Landlock; return the version of Landlock, 0 for none."""
    abi: int = LIBC.syscall(444, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return 0
    rights = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1
    network, scopes = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("3Q", rights, network, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules: int = LIBC.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return 0
    reads, of_files = 0b1101, 0b0111 | (rights & (1 << 14 | 1 << 15))
    for path, allowed in (*((path, reads) for path in readable), ("/dev/null", reads | 2), (folder, rights)):
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        applicable = rights if os.path.isdir(path) else of_files
        LIBC.syscall(445, rules, 1, struct.pack("=Qi", allowed & applicable, place), 0)
        os.close(place)
    restricted = LIBC.syscall(446, rules, 0) == 0
    os.close(rules)
    return abi if restricted else 0


def _filter_calls(own_files: bool, abi: int) -> bool:  # noqa: C901 -- one list of rules
    """Install a seccomp filter; return True if it is in force.

    Refused calls fail with EPERM, absent ones with ENOSYS; clone may only make threads, and a signal, a limit or a
    setting may only be for this process.
    """
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return False
    column, audit = known
    equal, above, has_bits = 0x15, 0x25, 0x45

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump(code: int, value: int, yes: int, no: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def end(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    def argument(number: int, index: int, *tests: bytes) -> list[bytes]:
        """Decide a call by its argument, with instructions that end the filter."""
        return [jump(equal, number, 0, 1 + len(tests)), load(16 + 8 * index), *tests] if number >= 0 else []

    program = [load(4), jump(equal, audit, 1, 0), end(_KILL), load(0), jump(above, _LAST_CALL, 0, 1), end(_ABSENT)]
    refused = [call[column] for calls in _REFUSED.values() for call in calls]
    if not own_files:
        refused += [call[column] for call in _REFUSED_ON_HOST_FILES]
    for number, answer in (
        *((number, _REFUSE) for number in refused),
        *((number, _ABSENT) for number in _ABSENT_CALLS),
    ):
        if number >= 0:
            program += [jump(equal, number, 0, 1), end(answer)]
    me, allow, refuse = os.getpid(), end(_ALLOW), end(_REFUSE)
    program += argument(_CLONE[column], 0, jump(has_bits, _THREAD, 1, 0), refuse, allow)
    program += argument(_TGKILL[column], 0, jump(equal, me, 1, 0), refuse, allow)
    program += argument(_PRLIMIT[column], 0, jump(equal, 0, 2, 0), jump(equal, me, 1, 0), refuse, allow)
    # The process has to end with the server, so its death signal stays.
    program += argument(_PRCTL[column], 0, jump(equal, _SET_DEATH_SIGNAL, 0, 1), refuse, allow)
    if not own_files and abi < 3:  # such a Landlock does not govern truncation by opening
        keep = struct.pack("HBBI", 0x54, 0, 0, _ACCESS_OR_TRUNCATE)
        for numbers, index in _OPENS:
            program += argument(numbers[column], index, keep, jump(equal, _TRUNCATE_ONLY, 0, 1), refuse, allow)
    program.append(allow)
    code = ctypes.create_string_buffer(b"".join(program))
    packed = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    header = ctypes.create_string_buffer(packed)
    return bool(LIBC.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0)
