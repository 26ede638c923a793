"""A process that has imported what ``rollcast`` imports, and forks a command whenever it is sent one.

Importing takes most of the time of a command that is refused or trains two tiny steps.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

#: What a run of the quick start has imported at its end, except Ray.
PRELOADED = (
    "hydra.compose",
    "rich.console",
    "rollcast.cli.app",
    "rollcast.config",
    "rollcast_algorithms.policy_losses",
    "rollcast_data.tokenizer",
    "rollcast_fsdp.engine",
    "rollcast_hf.rollout",
    "rollcast_trainer.ppo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
ROLLCAST = Path(sys.executable).with_name("rollcast")


@dataclass(frozen=True)
class Command:
    """The arguments of ``rollcast``, its working directory and environment, and the files for its output."""

    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    out: Path
    err: Path


class WarmProcess:
    """A handle to the process; it is started by the first command and ends with this process.

    Commands run one at a time.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> tuple[int | None, str, str]:
        """Return the exit code, what was written to stdout, and to stderr.

        The code is None if the command did not end within ``timeout`` seconds; it is then killed.
        """
        connection = self._started()
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place) / "out", Path(place) / "err"
            connection.send(Command(arguments, folder, environment, out, err))
            pid = connection.recv()
            ended = connection.poll(timeout)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            code = connection.recv()
            return code if ended else None, out.read_text(), err.read_text()

    def _started(self) -> Connection:
        if self._connection is None:
            self._connection, theirs = Pipe()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
            theirs.close()
            atexit.register(self._connection.close)
        return self._connection


def receive(connection: Connection) -> Command | None:
    """Fork for each command that comes; return the command in the forked process, and None at the end."""
    while True:
        try:
            command: Command = connection.recv()
        except EOFError:
            return None
        pid = os.fork()
        if pid == 0:
            connection.close()
            return command
        connection.send(pid)
        _, status = os.waitpid(pid, 0)
        connection.send(os.waitstatus_to_exitcode(status))


def become(command: Command) -> None:
    """Give this process what Python would have set up for the command."""
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    for target, (name, flags) in enumerate(
        [
            (os.devnull, os.O_RDONLY),
            (str(command.out), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            (str(command.err), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ]
    ):
        file = os.open(name, flags)
        os.dup2(file, target)
        os.close(file)
    sys.argv[:] = [str(ROLLCAST), *command.arguments]
    added = [entry for entry in command.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = [str(ROLLCAST.parent), *added]
    importlib.invalidate_caches()


def serve() -> None:
    connection = Connection(int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # else the first collection in each fork would copy every page
    command = receive(connection)
    if command is not None:
        become(command)
        from rollcast.cli.app import main
        from rollcast.plugins import discovery

        discovery.refresh()
        main()


if __name__ == "__main__":
    sys.modules["warm_process"] = sys.modules["__main__"]  # commands are pickled by this name
    serve()
