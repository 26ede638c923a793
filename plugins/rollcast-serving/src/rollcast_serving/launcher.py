"""The process of a replica: start, liveness, stop."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollcast.contracts.rollout import EngineNode
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import RolloutError
from rollcast_serving.contracts.weight_sync import WeightSyncCapabilities
from rollcast_serving.lifeline import Meeting
from rollcast_serving.polling import wait_readable
from rollcast_serving.wire import decode_error

__all__ = ["ReplicaAddress", "ReplicaProcess", "ReplicaSpec", "find_cause", "served_by"]

_STOP_GRACE_S = 10.0
_LOG_LINES = 20
#: The last line of a traceback, behind the name of the process that wrote it, and the most of it that is quoted.
_EXCEPTION = re.compile(r"(?<![\w.'\"])(?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*")
_LONGEST_CAUSE = 500


@dataclass(frozen=True)
class ReplicaSpec:
    """Settings of a replica.

    Attributes:
        rollout: the config's ``rollout`` section as plain data.
        model_path: folder of the model and tokenizer.
        seed: seed of the sampler.
        pad_token_id, eos_token_id: ids of the tokenizer.
        stop_token_ids: ids that end every response; see :class:`~rollcast.contracts.rollout.RolloutSetup`.
        trust_remote_code: allow the model folder's own Python code.
        python: interpreter of the replica's environment; None for this process's.
        env: environment variables in addition to this process's own.
        launch_timeout_s: deadline until it is ready, in seconds.
        log_dir: folder of its output; None for a temporary folder.
        host: address to listen on.
        multi_node: True if the rollout's engines can span nodes.
        role: role that the replica plays; names it in messages.
        section: dotted key of the config section that ``rollout`` comes from.
    """

    rollout: Mapping[str, Any]
    model_path: str
    seed: int
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()
    trust_remote_code: bool = False
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    launch_timeout_s: float = 300.0
    log_dir: str | None = None
    host: str = "127.0.0.1"
    multi_node: bool = False
    role: str = "rollout"
    section: str = "rollout"

    def name_of(self, index: int, separator: str = " ") -> str:
        """Return the name of a replica in messages, such as ``replica 0`` or ``judge 0``."""
        return f"{'replica' if self.role == 'rollout' else self.role}{separator}{index}"


@dataclass(frozen=True)
class ReplicaAddress:
    """Address of a replica, and its access token.

    Attributes:
        index: number of the replica in its run.
        node: address of its node.
        host, port: address of the server for the run.
        openai_port: port of the OpenAI-compatible server, on the node's loopback.
        token: secret that callers must send.
        generation: number of earlier starts.
        device: id of its first accelerator; empty without one.
    """

    index: int
    node: str
    host: str
    port: int
    openai_port: int
    token: str = field(repr=False)
    generation: int = 0
    device: str = ""

    @property
    def url(self) -> str:
        """URL of the server for the run."""
        return f"http://{self.host}:{self.port}"


def served_by(
    place: WorkerContext, capabilities: WeightSyncCapabilities, replicas: Sequence[ReplicaAddress]
) -> list[ReplicaAddress]:
    """Return the replicas to which a rank of the engine sends its weights; each has one such rank at most.

    Args:
        place: the rank's place.
        capabilities: capabilities of the weight sync.
        replicas: all that need the weights.
    """
    if not capabilities.same_node:
        return list(replicas) if place.rank == 0 else []
    here = [replica for replica in replicas if replica.node == place.node]
    if capabilities.shared_devices:
        return [replica for replica in here if replica.device == place.device_id]
    return here if place.local_rank == 0 else []


class ReplicaProcess:
    """A replica's process on a node, in its own session so that it ends together with everything that it started.

    Args:
        spec: settings of the replica.
        index: number of the replica, for messages and the log's name.
        node: address of this node.
        generation: number of earlier starts.
        place: this node's place in the replica's engine.
        meeting: meeting of the processes of a replica that spans nodes; None for a replica on one node.
        listener: socket of the meeting's lifeline, on the replica's first node; closed here.

    Raises:
        RolloutError: the process cannot be started.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        index: int = 0,
        node: str = "127.0.0.1",
        generation: int = 0,
        place: EngineNode = EngineNode(),  # noqa: B008  # immutable
        meeting: Meeting | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.spec = spec
        self.index = index
        self._engine_node, self._meeting = place, meeting
        self._place = (node, generation)
        self._token = secrets.token_urlsafe(24)
        folder = Path(spec.log_dir) if spec.log_dir else Path(tempfile.mkdtemp(prefix="rollcast-replica-"))
        folder.mkdir(parents=True, exist_ok=True)
        self._name = spec.name_of(index) + (f" on its node {place.rank}" if place.rank else "")
        part = f"_node_{place.rank}" if place.rank else ""
        self.log = folder / f"{spec.name_of(index, '_')}{part}.log"
        self._tell, theirs = os.pipe()
        self._started = time.monotonic()
        python = spec.python or sys.executable
        try:
            with self.log.open("ab") as log:
                self.popen = subprocess.Popen(  # noqa: S603  # the interpreter is the one that the config names
                    [python, "-m", "rollcast_serving.process"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.env},
                    pass_fds=[theirs, *([] if listener is None else [listener.fileno()])],
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._tell)
            raise RolloutError(
                f"{self._name} cannot be started with {spec.section}.replica.python={python!r}: {error}"
            ) from error
        finally:
            os.close(theirs)
            inherited = -1 if listener is None else listener.fileno()
            if listener is not None:
                listener.close()
        self._write_spec(theirs, inherited)

    def _write_spec(self, theirs: int, listener: int) -> None:
        spec = self.spec
        message = {
            "rollout": dict(spec.rollout),
            "model_path": spec.model_path,
            "seed": spec.seed,
            "pad_token_id": spec.pad_token_id,
            "eos_token_id": spec.eos_token_id,
            "stop_token_ids": spec.stop_token_ids,
            "trust_remote_code": spec.trust_remote_code,
            "host": spec.host,
            "token": self._token,
            "node": asdict(self._engine_node),
            "meeting": None if self._meeting is None else asdict(self._meeting),
            "listener": listener,
            "tell": theirs,
            "parent": os.getpid(),
        }
        # Through standard input, where other users cannot read the token. If the process is gone, wait_ready() reports
        # it.
        with suppress(BrokenPipeError), self.popen.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps(message).encode())

    def wait_ready(self) -> ReplicaAddress:
        """Wait until the replica serves, and return its address.

        Raises:
            RolloutError: it ended, or was not ready in time; the message has the end of its log.
        """
        text = b""
        deadline = self._started + self.spec.launch_timeout_s
        try:
            while not text.endswith(b"\n"):
                if not wait_readable(self._tell, deadline - time.monotonic()):
                    self.stop()
                    raise RolloutError(
                        f"{self._name} was not ready within {self.spec.section}.replica.launch_timeout_s="
                        f"{self.spec.launch_timeout_s:g}{self._with_log()}"
                    )
                part = os.read(self._tell, 65536)
                if not part:
                    break
                text += part
        finally:
            os.close(self._tell)
        return self._address(text)

    def _address(self, text: bytes) -> ReplicaAddress:
        if not text.endswith(b"\n"):
            self.stop()
            raise RolloutError(f"{self._name} ended while it started, {self.describe_end()}{self._with_log()}")
        message = json.loads(text)
        if "error" in message:
            self.stop()
            section = self.spec.section
            keys = "" if section == "rollout" else f"the keys of its rollout are under {section}; "
            error = decode_error(message["error"], f"{self._name} ({keys}log: {self.log})")
            cause = find_cause(self.log.read_text(errors="replace"), str(error))
            raise RolloutError(f"{error}; its log says: {cause}") if cause and type(error) is RolloutError else error
        node, generation = self._place
        return ReplicaAddress(
            self.index, node, self.spec.host, message["port"], message["openai_port"], self._token, generation
        )

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self.popen.poll() is None

    def describe_end(self) -> str:
        """Return a phrase that says how the process ended."""
        code = self.popen.poll()
        if code is None:
            return "running"
        return f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"

    def _with_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        missing = "No module named rollcast_serving" in "\n".join(lines)
        help_text = f"\n  install rollcast-serving and the rollout's plugin for {self.spec.python}" if missing else ""
        return help_text + f"\n  end of {self.log}:" + "".join(f"\n    {line}" for line in lines)

    def stop(self) -> None:
        """End the process and everything that it started; may be called twice."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_STOP_GRACE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def find_cause(log: str, message: str) -> str:
    """Return the last exception in the log of a failed start that the message does not have; empty if there is none.

    Engines start processes of their own, and say of their failure that the root cause is above.
    """
    causes = [match[0].strip() for match in _EXCEPTION.finditer(log)]
    return next((cause[:_LONGEST_CAUSE] for cause in reversed(causes) if cause.partition(": ")[2] not in message), "")
