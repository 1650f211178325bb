"""A proxy between clients and the server that can do what networks do: break, delay, stall, lose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from faults.loop_thread import LoopThread

LENGTH_LIMIT = 2**20


class Cut(Enum):
    """Where the connection that carries a command breaks."""

    BEFORE = auto()  # the server never sees the command
    AFTER = auto()  # the server has run it; its answer is lost


class Proxy:
    """Passes what comes on a unix socket to the server's; an event loop in a thread.

    `cut_at` breaks the connection of the command with that number, counted from 1 over all connections; a pipeline sent
    in one piece counts as one. `delay` holds up every answer. While it is stalled, it accepts connections and bytes,
    and passes nothing on: to its clients, packets vanish.
    """

    def __init__(self, path: str, target: str) -> None:
        self._path = path
        self._target = target
        self._cut: tuple[int, Cut] | None = None
        self._open: asyncio.Event
        self._delay_s = 0.0
        self.num_commands = 0
        self.num_cuts = 0
        self._thread = LoopThread()
        self._thread.run(self._start())
        self.url = f"unix://{path}"

    def cut_at(self, number: int, where: Cut) -> None:
        """Break the connection of the `number`th command from now on, once."""
        self._call(lambda: self._set_cut(number, where))

    def delay(self, seconds: float) -> None:
        """Hold up each answer from now on."""
        self._call(lambda: setattr(self, "_delay_s", seconds))

    def stall(self) -> None:
        """Pass nothing on until `flow`."""
        self._call(lambda: self._open.clear())

    def flow(self) -> None:
        """Pass on again, also what has come meanwhile."""
        self._call(lambda: self._open.set())

    def close(self) -> None:
        self._call(lambda: self._server.close())
        self._thread.close()

    # In the loop

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    def _set_cut(self, number: int, where: Cut) -> None:
        self.num_commands = 0
        self._cut = (number, where)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lost_answer = asyncio.Event()
        server: asyncio.StreamWriter | None = None
        try:
            from_server, server = await asyncio.open_unix_connection(self._target)
            passing = [self._requests(reader, server, lost_answer), self._answers(from_server, writer, lost_answer)]
            await asyncio.gather(*passing)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            if server is not None:
                server.transport.abort()

    async def _requests(
        self, source: asyncio.StreamReader, server: asyncio.StreamWriter, lost_answer: asyncio.Event
    ) -> None:
        while data := await source.read(LENGTH_LIMIT):
            await self._open.wait()
            self.num_commands += 1
            if self._cut is not None and self.num_commands == self._cut[0]:
                where, self._cut = self._cut[1], None
                self.num_cuts += 1
                if where is Cut.BEFORE:
                    raise ConnectionResetError
                lost_answer.set()
            server.write(data)
            await server.drain()
        raise ConnectionResetError  # one side has closed: so does the other

    async def _answers(
        self, source: asyncio.StreamReader, writer: asyncio.StreamWriter, lost_answer: asyncio.Event
    ) -> None:
        while data := await source.read(LENGTH_LIMIT):
            if lost_answer.is_set():
                break
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    # From other threads

    def _call(self, change: Callable[[], None]) -> None:
        async def run() -> None:
            change()

        self._thread.run(run())
