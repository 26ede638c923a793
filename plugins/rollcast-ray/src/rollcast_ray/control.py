"""A way into a worker's process while its main thread is busy: to interrupt a call, or to see where it stands.

A thread of the worker's process listens on the node's address. Each request is signed with a key that
only the controller knows, over a number that is used once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import signal
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["ControlAddress", "ControlServer", "Interrupted", "Interruptible", "ask", "ask_all"]

_NONCE = 32
_DIGEST = 32
_MOST = 1 << 20
_AT_ONCE = 16
_FRAMES = 12
#: Wakes a sleeping main thread, and is used by neither Python, torch nor Ray; not on Windows.
_SIGNAL = getattr(signal, "SIGUSR2", None)


class ControlAddress(NamedTuple):
    """Address where a process answers during a call, and the key that signs requests."""

    host: str
    port: int
    key: bytes


class Interrupted(BaseException):
    """The controller has given the running call up. Not an Exception, so that no method catches it by chance."""


class Interruptible:
    """What the main thread runs, by a token, so that another thread can interrupt that and nothing else.

    To be made in the main thread; elsewhere nothing can be interrupted.
    """

    def __init__(self) -> None:
        self._token = self._wanted = ""
        self._main = threading.main_thread()
        self.possible = _SIGNAL is not None and threading.current_thread() is self._main
        if _SIGNAL is not None and self.possible:
            signal.signal(_SIGNAL, self._raise)

    @contextmanager
    def running(self, token: str) -> Iterator[None]:
        """The call ``token`` runs inside.

        Raises:
            Interrupted: it was given up.
        """
        self._wanted = ""
        self._token = token
        try:
            yield
        finally:
            self._token = ""

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if self._token and self._token == self._wanted:
            self._token = ""
            raise Interrupted(self._wanted)

    def interrupt(self, token: str) -> bool:
        """Interrupt that call if it runs; code outside of Python ends first."""
        if not (self.possible and token and token == self._token):
            return False
        self._wanted = token
        signal.pthread_kill(self._main.ident or 0, int(_SIGNAL or 0))
        return True

    def stack(self) -> str:
        """Where the main thread is: the innermost lines, from the worker's method on."""
        frame = sys._current_frames().get(self._main.ident or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        entries = [
            i for i, found in enumerate(frames) if found.name == "call" and found.filename.endswith("hosting.py")
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
            return  # whoever that was has gone
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
    """Everything up to the other side's end of sending."""
    parts = b""
    while len(parts) < _MOST:
        part = sock.recv(65536)
        if not part:
            break
        parts += part
    return parts


class ControlServer:
    """Answers, in threads of its own, until :meth:`close`.

    Args:
        node: the address to listen on.
        answers: request → function of the request's fields that gives the answer.
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


def ask(address: ControlAddress, request: dict[str, str], timeout: float = 1.0) -> str:
    """Send one request and wait for the answer.

    Raises:
        OSError: nobody answers within ``timeout`` seconds, or the request was refused.
    """
    with socket.create_connection((address.host, address.port), timeout) as sock:
        sock.settimeout(timeout)
        nonce = b""
        while len(nonce) < _NONCE:
            part = sock.recv(_NONCE - len(nonce))
            if not part:
                raise ConnectionError(f"{address.host}:{address.port} closed the connection")
            nonce += part
        message = json.dumps(request).encode()
        sock.sendall(hmac.digest(address.key, nonce + message, "sha256") + message)
        sock.shutdown(socket.SHUT_WR)
        answer = _receive(sock)
        if not answer:
            raise ConnectionError(f"{address.host}:{address.port} refused the request")
        return str(json.loads(answer))


def ask_all(
    questions: Sequence[tuple[ControlAddress | None, dict[str, str]]], timeout: float = 2.0
) -> list[str | None]:
    """Send requests at the same time; None for each that was not answered within ``timeout`` seconds."""

    def one(address: ControlAddress | None, request: dict[str, str]) -> str | None:
        try:
            return None if address is None else ask(address, request)
        except OSError:
            return None

    if not questions:
        return []
    pool = ThreadPoolExecutor(min(_AT_ONCE, len(questions)), thread_name_prefix="rollcast-control")
    futures = [pool.submit(one, *question) for question in questions]
    done, _ = wait(futures, timeout)
    pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() if future in done else None for future in futures]
