"""A real server that keeps its data when it is killed: append-only file on, on a unix socket."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import redis

from headrace.producer.child import start_child
from headrace.producer.embedded import find_server

_START_S = 60.0


class DurableServer:
    """A server in a folder (of a path short enough for a socket's); `kill` and `start` it at will."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 's.sock'}"

    def start(self) -> None:
        """Start, and wait until it has read its data and answers."""
        options = {"--port": "0", "--unixsocket": "s.sock", "--dir": str(self._folder), "--save": ""}
        aof = {"--appendonly": "yes", "--appendfsync": "everysec", "--stream-node-max-bytes": "512"}
        words = [word for option in (options | aof).items() for word in option]
        (self._folder / "s.sock").unlink(missing_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = start_child([find_server(), *words], log=log)
        deadline_s = time.monotonic() + _START_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return
                assert time.monotonic() < deadline_s, (self._folder / "server.log").read_text()
                time.sleep(0.01)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
