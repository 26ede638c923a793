"""The caller's end of a stream to a replica: any number of requests over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp
import msgpack

from rollcast.contracts.rollout import EngineLoad
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.wire import decode_error, decode_load, unpack

__all__ = ["BROKEN", "ReplicaGoneError", "ReplicaStream"]

#: Errors of a broken connection or a malformed stream.
BROKEN = (aiohttp.ClientError, OSError, EOFError, TimeoutError, ValueError)


class ReplicaGoneError(RolloutError):
    """A replica or its engine is dead, or silent for too long; another replica can take over its requests."""


#: Messages of a caller's requests; None when the stream has ended.
Answers = asyncio.Queue[Mapping[str, Any] | None]


class ReplicaStream:
    """An open WebSocket to a replica, read by its own task.

    Args:
        socket: open connection.
        where: name of the replica, for messages.
        silence_s: maximum seconds without a message; a living replica sends heartbeats.
        hear: called with each load of the engine, and with None for a heartbeat.
    """

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        where: str,
        silence_s: float,
        hear: Callable[[EngineLoad | None], None],
    ) -> None:
        self._socket, self._where, self._silence_s, self._hear = socket, where, silence_s, hear
        self._waiting: dict[str, Answers] = {}
        self._load: asyncio.Future[EngineLoad] = asyncio.get_running_loop().create_future()
        #: Cause of the end; empty while the stream is open.
        self.end = ""
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def open(
        cls,
        session: aiohttp.ClientSession,
        url: str,
        where: str,
        silence_s: float,
        hear: Callable[[EngineLoad | None], None],
    ) -> ReplicaStream:
        """Connect to a replica.

        Raises:
            ReplicaGoneError: the replica does not answer.
            RolloutError: the replica refuses the connection.
        """
        try:
            socket = await session.ws_connect(url, max_msg_size=0, compress=0, autoping=True)
        except aiohttp.WSServerHandshakeError as error:
            raise RolloutError(f"{where} answered {error.status}: {error.message}") from error
        except BROKEN as error:
            raise ReplicaGoneError(f"{where} is unreachable: {type(error).__name__}: {error}") from error
        return cls(socket, where, silence_s, hear)

    async def first_load(self) -> EngineLoad:
        """Return the first load that the replica reports.

        Raises:
            ReplicaGoneError: the stream ended before that.
        """
        return await asyncio.shield(self._load)

    def expect(self, names: Iterable[str]) -> Answers:
        """Return a queue of the messages with these ids."""
        answers: Answers = asyncio.Queue()
        for name in names:
            self._waiting[name] = answers
        if self.end:
            answers.put_nowait(None)
        return answers

    async def send(self, body: bytes) -> None:
        """Send requests; a broken connection ends the stream, which the answers' queue reports."""
        try:
            await self._socket.send_bytes(body)
        except BROKEN as error:
            self._finish(f"{self._where} disconnected: {type(error).__name__}: {error}")

    async def forget(self, names: Iterable[str]) -> None:
        """Cancel requests whose messages are no longer awaited."""
        known = [name for name in names if self._waiting.pop(name, None) is not None]
        if known and not self.end:
            await self.send(msgpack.packb({"cancel": known}))

    async def close(self) -> None:
        """Close the connection; requests in flight are cancelled."""
        self._reader.cancel()
        await self._socket.close()
        self._finish(f"the connection to {self._where} is closed")

    async def _read(self) -> None:
        end = f"{self._where} disconnected: it closed the connection"
        try:
            while not self.end:
                data = await self._socket.receive_bytes(timeout=self._silence_s)
                for message in unpack(data):
                    self._pass_on(message)
        except TimeoutError:
            end = f"{self._where} was silent for {self._silence_s:g} s"
        except TypeError:  # a close message of the connection
            pass
        except BROKEN as error:
            end = f"{self._where} disconnected: {type(error).__name__}: {error}"
        except RollcastError as error:
            end = str(error)
        finally:
            self._finish(end)

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            answers = self._waiting.pop(message["id"], None)
            if answers is not None:  # else its caller is gone
                answers.put_nowait(message)
        elif "gone" in message:
            self._finish(f"{self._where}: its engine is dead: {message['gone']}")
        elif "refused" in message:
            raise decode_error(message["refused"], self._where)
        elif "load" in message:
            load = decode_load(message["load"])
            if not self._load.done():
                self._load.set_result(load)
            self._hear(load)
        else:
            self._hear(None)

    def _finish(self, end: str) -> None:
        if self.end:
            return
        self.end = end
        for answers in set(self._waiting.values()):
            answers.put_nowait(None)
        if not self._load.done():
            self._load.set_exception(ReplicaGoneError(end))
            self._load.exception()  # mark as retrieved: it need not be awaited
