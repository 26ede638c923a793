"""A control server in each worker's process, to interrupt a call or read its stack while the main thread is busy.

A thread of the worker's process listens on the node's address. Each request is signed, together with a nonce, with a
key known only to the controller and the worker.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
import socket
import socketserver
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from rollcast.contracts.runtime import Cancelled

__all__ = ["ControlAddress", "ControlServer", "Interrupted", "Interruptible", "ask", "ask_all"]

_NONCE = 32
_DIGEST = 32
_MOST = 1 << 20
#: Largest number of open connections; each uses a file descriptor.
_AT_ONCE = 128
_FRAMES = 12
#: Number of cancelled calls that a process remembers, so that cancelled calls in its queue never start.
_REMEMBERED = 4096
#: Signal that wakes a sleeping main thread; not used by Python, torch or Ray. None on Windows.
_SIGNAL = getattr(signal, "SIGUSR2", None)


class ControlAddress(NamedTuple):
    """The address of a process's control server, the key that signs requests, and Ray's ids of the process."""

    host: str
    port: int
    key: bytes
    worker_id: str = ""
    node_id: str = ""


class Interrupted(BaseException):
    """The controller cancelled the running call. Not an Exception, so that methods do not catch it by accident."""


class Interruptible:
    """The call that the main thread runs, identified by a token, so that another thread can interrupt only this call.

    Create it in the main thread; in any other thread, calls cannot be interrupted.
    """

    def __init__(self) -> None:
        self._token = self._wanted = ""
        self._given_up: deque[str] = deque(maxlen=_REMEMBERED)
        self._main = threading.main_thread()
        self.possible = _SIGNAL is not None and threading.current_thread() is self._main
        if _SIGNAL is not None and self.possible:
            signal.signal(_SIGNAL, self._raise)

    @contextmanager
    def running(self, token: str) -> Iterator[None]:
        """Mark the call ``token`` as running inside the block.

        Raises:
            Interrupted: the call was cancelled.
        """
        self._wanted = ""
        self._token = token
        try:
            # The order matters: interrupt() writes the cancelled token first and reads the running token after it.
            if token in self._given_up:
                raise Interrupted(token)
            yield
        finally:
            self._token = ""

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if self._token and self._token == self._wanted:
            self._token = ""
            raise Interrupted(self._wanted)

    def interrupt(self, token: str) -> Cancelled:
        """Interrupt the call if it is running, else prevent its start; native code is interrupted when it returns."""
        self._given_up.append(token)
        if token != self._token:
            return "ended"
        if not self.possible:
            return "unreachable"
        self._wanted = token
        signal.pthread_kill(self._main.ident or 0, int(_SIGNAL or 0))
        return "interrupted"

    def stack(self) -> str:
        """Return the main thread's stack as text, from the worker's method inwards."""
        frame = sys._current_frames().get(self._main.ident or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        entries = [
            i for i, entry in enumerate(frames) if entry.name == "call" and entry.filename.endswith("hosting.py")
        ]
        inner = frames[entries[-1] + 1 :] if entries else []
        return "".join(traceback.format_list(inner[-_FRAMES:])).rstrip()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.settimeout(5.0)
        nonce = secrets.token_bytes(_NONCE)
        sock.sendall(nonce)
        try:
            signed = _receive(sock)
        except OSError:
            return  # the client has disconnected
        digest, message = signed[:_DIGEST], signed[_DIGEST:]
        if hmac.compare_digest(digest, hmac.digest(self.server.key, nonce + message, "sha256")):
            sock.sendall(json.dumps(self.server.answer(json.loads(message))).encode())


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, node: str, key: bytes, answer: Callable[[dict[str, Any]], str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in node else socket.AF_INET
        self.key = key
        self.answer = answer
        super().__init__((node, 0), _Handler)


def _receive(sock: socket.socket) -> bytes:
    """Receive all data until the other side stops sending."""
    parts = b""
    while len(parts) < _MOST:
        part = sock.recv(65536)
        if not part:
            break
        parts += part
    return parts


class ControlServer:
    """A server that answers requests in its own threads until :meth:`close`.

    Args:
        node: address to listen on.
        answers: name of a request → function of the request's fields that returns the answer.
    """

    def __init__(self, node: str, answers: Mapping[str, Callable[..., Any]]) -> None:
        self._answers = answers
        key = secrets.token_bytes(32)

        self._server = _Server(node, key, self._answer)
        self.address = ControlAddress(node, self._server.server_address[1], key)
        threading.Thread(target=self._server.serve_forever, name="rollcast-control", daemon=True).start()

    def _answer(self, request: dict[str, Any]) -> str:
        return str(self._answers[request.pop("ask")](**request))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


async def _ask(address: ControlAddress, request: dict[str, str], timeout: float) -> str:
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            nonce = await reader.readexactly(_NONCE)
            message = json.dumps(request).encode()
            writer.write(hmac.digest(address.key, nonce + message, "sha256") + message)
            writer.write_eof()
            answer = await reader.read()
        finally:
            writer.close()
    if not answer:
        raise ConnectionError(f"{address.host}:{address.port} refused the request")
    return str(json.loads(answer))


def ask(address: ControlAddress, request: dict[str, str], timeout: float = 5.0) -> str:
    """Send one request and wait for the answer.

    Raises:
        OSError: nothing answers within ``timeout`` seconds, or the request was refused.
    """
    (answer,) = ask_all([(address, request)], timeout)
    if isinstance(answer, OSError):
        raise answer
    return answer


def ask_all(
    questions: Sequence[tuple[ControlAddress | None, dict[str, str]]], timeout: float = 5.0
) -> list[str | OSError]:
    """Send requests concurrently; return each answer, or the error if there is none.

    Args:
        questions: pairs of address and request; the address is None if the process has none.
        timeout: time limit of each request in seconds.
    """
    if not questions:
        return []

    async def one(turn: asyncio.Semaphore, address: ControlAddress | None, request: dict[str, str]) -> str | OSError:
        if address is None:
            return ConnectionError("the process cannot be asked during a call")
        try:
            async with turn:
                return await _ask(address, request, timeout)
        except asyncio.IncompleteReadError:
            return ConnectionError(f"{address.host}:{address.port} closed the connection")
        except OSError as error:  # includes TimeoutError
            return error if str(error) else TimeoutError(f"no answer from {address.host}:{address.port}")

    async def every() -> list[str | OSError]:
        turn = asyncio.Semaphore(_AT_ONCE)
        return list(await asyncio.gather(*(one(turn, *question) for question in questions)))

    # In a separate thread, because the caller's thread may already run an event loop.
    with ThreadPoolExecutor(1, thread_name_prefix="rollcast-control") as pool:
        return pool.submit(asyncio.run, every()).result()
