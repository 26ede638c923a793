"""Attacks on the sandbox, and a command that tries all of them as the current user.

``python sandbox_attacks.py MECHANISM`` prints JSON: the isolation, the attacks that succeeded, and their number.
A program that succeeds prints WON; damage that outlives the programs is looked for on the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollcast_rewards.sandbox import LocalSandbox, SandboxLimits

_C = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef call(*a): return libc.syscall(*a)\n"


def _wins(expression: str) -> str:
    return f"if {expression}: print('WON')"


#: Kind of isolation → name → program. SECRET is a file of the host that anybody may read and write, MARK a name that
#: no file has, VICTIM the process id of another program, and CALLER that of its caller. Numbers are those of x86-64.
ATTACKS: dict[str, dict[str, str]] = {
    "files": {
        "shadow": "print(open('/etc/shadow').read(), 'WON')",
        "passwd": "print(open('/etc/passwd').read(), 'WON')",
        "root's home": "import os\n" + _wins("'.profile' in os.listdir('/root') or os.listdir('/root/.ssh')"),
        "a secret": _wins("'hunter2' in open('SECRET').read()"),
        "the folder of a secret": "import os\n" + _wins("os.listdir(os.path.dirname('SECRET'))"),
        "through a link": "import os\nos.symlink('SECRET', 'way')\n" + _wins("open('way').read()"),
        "a hard link": "import os\nos.link('SECRET', 'way')\nprint('WON')",
        "write a secret": "open('SECRET', 'w').write('x')\nprint('WON')",
        "append to a secret": "open('SECRET', 'a').write('x')\nprint('WON')",
        "remove a secret": "import os\nos.remove('SECRET')\nprint('WON')",
        "rename a secret": "import os\nos.rename('SECRET', 'SECRET' + '2')\nprint('WON')",
        "mode of a secret": "import os\nos.chmod('SECRET', 0o600)\nprint('WON')",
        "owner of a secret": "import os\nos.chown('SECRET', os.getuid(), -1)\nprint('WON')",
        "times of a secret": "import os\nos.utime('SECRET', (1, 1))\nprint('WON')",
        "truncate a secret": "import os\nos.truncate('SECRET', 0)\nprint('WON')",
        "truncate by opening": "import os\nos.open('SECRET', os.O_RDONLY | os.O_TRUNC)\nprint('WON')",
        "an attribute of a secret": "import os\nos.setxattr('SECRET', 'user.a', b'b')\nprint('WON')",
        "temporary files": "open('/tmp/MARK', 'w').write('x')",
        "older temporary files": "open('/var/tmp/MARK', 'w').write('x')",
        "locks": "open('/run/lock/MARK', 'w').write('x')",
        "shared memory files": "open('/dev/shm/MARK', 'w').write('x')",
        "the interpreter": "import os\nopen(os.path.dirname(os.__file__) + '/MARK', 'w').write('x')\nprint('WON')",
        "packages": "import sys\nopen(sys.path[-1] + '/MARK', 'w').write('x')\nprint('WON')",
        "other programs' folders": (
            "import glob, os\n"
            "if [f for f in glob.glob('/tmp/rollcast-sandbox-*/') if not os.path.samefile(f, '.')]: print('WON')"
        ),
        "memory of others": "print(open('/proc/VICTIM/environ').read(), 'WON')",
        "root of others": "import os\n" + _wins("os.listdir('/proc/VICTIM/root')"),
        "a handle of a file": _C + "h = ctypes.create_string_buffer(128)\nh[0] = b'\\x80'\n"
        "m = ctypes.c_int()\n" + _wins("call(303, -100, b'/usr/lib', h, ctypes.byref(m), 0) == 0"),
        "mount": _C + _wins("libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0"),
        "mount the root anew": _C + _wins("libc.mount(None, b'/', None, 32, None) == 0"),
        "leave the root": _C + _wins("libc.chroot(b'.') == 0"),
    },
    "processes": {
        "kill": "import os\nos.kill(VICTIM, 9)\nprint('WON')",
        "kill everything": "import os\nos.kill(-1, 9)\nprint('WON')",
        "kill a thread": _C + _wins("call(234, VICTIM, VICTIM, 9) == 0"),
        "kill a task": _C + _wins("call(200, VICTIM, 9) == 0"),
        "queue a signal": _C + "i = (ctypes.c_int * 32)(9, 0, -1)\n" + _wins("call(129, VICTIM, 9, i) == 0"),
        "signal by descriptor": _C + _wins("call(434, VICTIM, 0) >= 0"),
        "trace": _C + _wins("call(101, 16, VICTIM, 0, 0) == 0"),
        "read memory": _C + "b = ctypes.create_string_buffer(8)\nv = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n"
        + _wins("call(310, CALLER, v, 1, v, 1, 0) > 0"),
        "limits": "import resource\nresource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))\nprint('WON')",
        "priority": "import os\nos.setpriority(os.PRIO_PROCESS, VICTIM, 19)\nprint('WON')",
        "cores": "import os\nos.sched_setaffinity(VICTIM, {0})\nprint('WON')",
        "fork": "import os\nif os.fork() >= 0: print('WON')",
        "vfork": _C + _wins("call(58) >= 0"),
        "clone3": _C + "a = ctypes.create_string_buffer(88)\n" + _wins("call(435, a, 88) >= 0"),
        "start a program": "import subprocess\nsubprocess.run(['/usr/bin/env'])\nprint('WON')",
        "run on without a caller": _C + _wins("libc.prctl(1, 0, 0, 0, 0) == 0"),
        "list processes": "import os\nif any(name.isdigit() for name in os.listdir('/proc')): print('WON')",
    },
    "shared_memory": {
        "segments": _C + _wins("libc.shmget(0x52c, 4096, 0o1666) >= 0"),
        "queues": _C + _wins("libc.msgget(0x52c, 0o1666) >= 0"),
        "semaphores": _C + _wins("libc.semget(0x52c, 1, 0o1666) >= 0"),
        "POSIX queues": _C + _wins("call(240, b'MARK', 0o102, 0o666, 0) >= 0"),
        "keys": _C + _wins("call(248, b'user', b'MARK', b'x', 1, -4) >= 0"),
        "named memory": "from multiprocessing import shared_memory\n"
        "shared_memory.SharedMemory('MARK', True, 4096)\nprint('WON')",
    },
    "network": {
        "TCP": "import socket\nsocket.socket()\nprint('WON')",
        "UDP": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nprint('WON')",
        "netlink": _C + _wins("libc.socket(16, 3, 0) >= 0"),
        "local sockets": _C + _wins("libc.socket(1, 1, 0) >= 0"),
        "io_uring": _C + "p = ctypes.create_string_buffer(120)\n" + _wins("call(425, 1, p) >= 0"),
    },
    "privileges": {
        "inherited descriptors": "import os\nfor n in range(3, 64):\n    try: os.fstat(n)\n    except OSError: continue\n"
        "    print('WON')",
        "be root": "import os\nos.setuid(0)\nprint('WON')",
        "is root": "import os\n" + _wins("0 in os.getresuid() + os.getresgid() or 0 in os.getgroups()"),
        "capabilities": _C + "h = (ctypes.c_uint * 2)(0x20080522, 0)\nd = (ctypes.c_uint * 6)()\nlibc.capget(h, d)\n"
        + _wins("any(d)"),
        "new privileges": _C + _wins("not libc.prctl(39, 0, 0, 0, 0) or any(libc.prctl(47, 1, n, 0, 0) == 1 for n in range(41))"),
        "a user namespace": _C + _wins("libc.unshare(0x10000000) == 0"),
        "another namespace": _C + _wins("call(308, 0, 0) == 0"),
        "bpf": _C + "a = ctypes.create_string_buffer(128)\n" + _wins("call(321, 0, a, 128) >= 0"),
        "performance counters": _C + "a = ctypes.create_string_buffer(128)\n" + _wins("call(298, a, 0, -1, -1, 0) >= 0"),
        "page faults": _C + _wins("call(323, 1) >= 0"),
        "personality": _C + _wins("call(135, 0x40000) >= 0"),
        "the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())\nprint('WON')",
        "the host's name": "import socket\nsocket.sethostname('MARK')\nprint('WON')",
    },
    "storage": {
        "fill the disk": "for n in range(400): open(f'f{n}', 'wb').write(b'x' * 262144)\nprint('WON')",
        "many files": "for n in range(5000): open(f'f{n}', 'w').close()\nprint('WON')",
    },
}  # fmt: skip


def main(mechanism: str) -> dict[str, object]:
    """Try every attack; return what succeeded."""
    sandbox = LocalSandbox([mechanism])
    sandbox.start()
    mark = f"rollcast-attack-{os.getpid()}"
    limits = SandboxLimits(time_s=60, cpu_s=30)
    won: dict[str, list[str]] = {kind: [] for kind in ATTACKS}
    with tempfile.TemporaryDirectory() as name, sandbox.exec("import time; time.sleep(600)", limits=limits):
        secret = Path(name, "secret")
        secret.write_text("hunter2")
        secret.chmod(0o666)
        Path(name).chmod(0o777)
        before = secret.stat()
        victim = _victim(sandbox)

        def attack(program: str) -> bool:
            for word, value in (("SECRET", secret), ("MARK", mark), ("VICTIM", victim), ("CALLER", os.getpid())):
                program = program.replace(word, str(value))
            with sandbox.exec(program, limits=limits) as execution:
                return "WON" in execution.wait().stdout

        with ThreadPoolExecutor(8) as pool:
            for kind, attacks in ATTACKS.items():
                won[kind] += [
                    name for name, success in zip(attacks, pool.map(attack, attacks.values()), strict=True) if success
                ]
        after = secret.stat()
        if (after.st_mode, after.st_mtime, secret.read_text()) != (before.st_mode, before.st_mtime, "hunter2"):
            won["files"].append("the secret has changed")
        for folder in ("/tmp", "/var/tmp", "/run/lock", "/dev/shm", name):
            for path in Path(folder).glob(f"*{mark}*"):
                won["files"].append(f"left {path}")
        os.kill(victim, 0)
    libc = ctypes.CDLL(None)
    for call in (libc.shmget, libc.msgget):
        arguments = (0x52C, 0, 0) if call is libc.shmget else (0x52C, 0)
        if call(*arguments) >= 0:
            won["shared_memory"].append("left an object of System V")
    isolation = dict(sandbox.isolation)
    sandbox.close()
    return {"isolation": isolation, "won": won, "tried": sum(map(len, ATTACKS.values())), "user": os.geteuid()}


def _victim(sandbox: LocalSandbox) -> int:
    """Return the process id of the sleeping program: the youngest process below this one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        rows = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout.split()[2:]
        parents = {int(pid): int(parent) for pid, parent in zip(rows[::2], rows[1::2], strict=True)}

        def depth(pid: int, parents: dict[int, int] = parents) -> int:
            steps = 0
            while pid in parents and pid != os.getpid():
                pid, steps = parents[pid], steps + 1
            return steps if pid == os.getpid() else -1

        deepest = max((pid for pid in parents if depth(pid) >= 2), key=depth, default=None)
        if deepest is not None:
            return deepest
        time.sleep(0.05)
    raise TimeoutError("the victim did not start")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
