"""Really importing parts, in a child process, so that nothing they do can reach this one.

The child answers on a private copy of its standard output, because a plugin may print, even from
native code; both of its own streams go to a file whose end is quoted if the child dies. If it dies
or hangs, the part that it was at is the culprit, and another child goes on with the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, Literal, cast

from rollcast.errors import PluginConflictError, PluginError, PluginVersionError
from rollcast.plugins.metadata import PartInfo

_log = logging.getLogger("rollcast.plugins")

Checked = Literal["ok", "broken", "conflict", "incompatible"]

_POLL = 0.2  # seconds between looks at whether the child lives
_GRACE = 5.0  # seconds that a child has to end after it closed its output

# sys.path first: the core itself may be on it only because this process put it there.
_BOOT = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "from rollcast.plugins.check import serve; serve(request)"
)


def check_parts(
    parts: Sequence[PartInfo], registries: Sequence[str], timeout: float
) -> Iterator[tuple[PartInfo, Checked, str]]:
    """Import each part in a child process and yield its state and cause.

    Args:
        parts: installed parts.
        registries: modules that the child imports first, for the registries they declare.
        timeout: seconds that one part may take.

    Raises:
        PluginError: no child can be started, or it fails before it comes to the first part.
    """
    left = list(parts)
    while left:
        with _Child(left, registries) as child:
            while left:
                answer = child.read(timeout)
                if answer is None and not child.is_ready:
                    raise PluginError(f"the process for checking plugins failed: {child.obituary}")
                part = left.pop(0)
                if answer is None:
                    yield part, "broken", f"importing it {child.obituary}"
                    break
                yield part, cast(Checked, answer["state"]), answer["cause"]


class _Child:
    """A child process at work on a list of parts."""

    def __init__(self, parts: Sequence[PartInfo], registries: Sequence[str]) -> None:
        self._request = {
            "path": sys.path,
            "registries": list(registries),
            "parts": [[part.group, part.name] for part in parts],
        }
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.is_ready = False
        self.obituary = ""

    def __enter__(self) -> _Child:
        if not sys.executable:
            raise PluginError("cannot check plugins: this Python does not know its own executable")
        self._noise: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._pump, daemon=True).start()
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError), stdin:  # it died: read() will tell
                json.dump(self._request, stdin)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # The whole session: a plugin may have left processes of its own behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._noise.close()

    def _pump(self) -> None:
        stdout = self._process.stdout
        if stdout is not None:
            for line in stdout:
                self._answers.put(line)
        self._answers.put(None)

    def read(self, timeout: float) -> dict[str, Any] | None:
        """The next answer about a part; None if the child died or hangs, see ``obituary``."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._answers.get(timeout=_POLL)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self.obituary = f"did not end within {timeout:g} seconds"
                    return None
                # A process that the plugin forked may keep the pipe open after its parent died.
                if self._process.poll() is None or not self._answers.empty():
                    continue
                line = None
            if line is None:
                self.obituary = self._exit_text()
                return None
            message: dict[str, Any] = json.loads(line)
            match message["kind"]:
                case "ready":
                    self.is_ready = True
                case "warning":
                    _log.warning("%s", message["text"])
                case _:
                    return message

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "cut the process off from its output"
        how = f"ended the process with exit status {code}"
        if code < 0:
            how = f"ended the process by signal {signal.Signals(-code).name}"
        self._noise.seek(0, os.SEEK_END)
        self._noise.seek(max(0, self._noise.tell() - 2000))
        lines = self._noise.read().decode(errors="replace").strip().splitlines()
        return f"{how}; its last output: {' | '.join(lines[-3:])}" if lines else how


def serve(request: dict[str, Any]) -> None:
    """Run in the child: import the requested parts one by one and write an answer for each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A plugin that reads its input gets an end of file instead of blocking.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def answer(**message: str) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for module in request["registries"]:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001
            text = f"cannot check types of the groups that {module} declares: {error!r}"
            answer(kind="warning", text=text)
    answer(kind="ready")
    for group, name in request["parts"]:
        state, cause = _check_one(group, name)
        answer(kind="part", state=state, cause=cause)
    # Threads and exit handlers that plugins left behind are no reason to wait.
    answers.close()
    os._exit(0)


def _check_one(group: str, name: str) -> tuple[Checked, str]:
    from rollcast.plugins.loader import load_part
    from rollcast.plugins.metadata import find_claims
    from rollcast.plugins.registry import find_registries

    try:
        for claim in find_claims(group, name):
            load_part(claim)
        # Only now, because the import may have declared the group's registry.
        for registry in find_registries():
            if registry.group == group:
                registry.get(name)
    except PluginVersionError as error:
        return "incompatible", str(error)
    except PluginConflictError as error:
        return "conflict", str(error)
    except PluginError as error:
        return "broken", str(error)
    return "ok", ""
