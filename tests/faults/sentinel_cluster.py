"""A primary, a replica and three sentinels that watch them, each a real process on a port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from pathlib import Path

import redis
from worker_harness import wait_until

from headrace.producer.child import start_child
from headrace.producer.embedded import find_server

SERVICE = "headrace"
PASSWORD = "of-the-servers"
SENTINEL_PASSWORD = "of-the-sentinels"
READY_S = 30.0


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


class SentinelCluster:
    """Running from `start` on; `kill_primary` and `fail_over` at will."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers = {free_port(): "", free_port(): ""}
        self._sentinels = [free_port() for _ in range(3)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}/0?sentinel_password={SENTINEL_PASSWORD}"

    def start(self) -> None:
        """Start all, and wait until the sentinels know the replica and one another."""
        primary, replica = self._servers
        self._start_server(primary)
        self._start_server(replica, "--replicaof", "127.0.0.1", str(primary))
        for port in self._sentinels:
            self._start_sentinel(port, primary)
        wait_until(self._is_ready, "the sentinels to know all", READY_S)

    def stop(self) -> None:
        for port in list(self._processes):
            self._kill(port)

    def primary_port(self) -> int:
        """The primary's, as the first sentinel that answers has it."""
        for port in self._sentinels:
            with contextlib.suppress(redis.RedisError), self._client(port, SENTINEL_PASSWORD) as sentinel:
                return int(sentinel.sentinel_get_master_addr_by_name(SERVICE)[1])
        raise AssertionError("no sentinel answers")

    def primary(self) -> redis.Redis:
        """A client of the server that is the primary now."""
        return self._client(self.primary_port(), PASSWORD)

    def fail_over(self) -> None:
        """Make the replica the primary and the primary a replica, as an operator would."""
        before = self.primary_port()
        with self._client(self._sentinels[0], SENTINEL_PASSWORD) as sentinel:
            sentinel.sentinel_failover(SERVICE)
        self._wait_for_another(before)
        wait_until(self._is_ready, "the old primary to be a replica", READY_S)

    def kill_primary(self) -> None:
        """Kill it, as a crash would; returns when the sentinels have made another the primary."""
        before = self.primary_port()
        self._kill(before)
        self._wait_for_another(before)

    def _wait_for_another(self, before: int) -> None:
        def has_changed() -> bool:
            after = self.primary_port()
            with self._client(after, PASSWORD) as server:
                return after != before and server.info("replication")["role"] == "master"

        wait_until(has_changed, "a new primary", READY_S)

    def _start_server(self, port: int, *more: str) -> None:
        options = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", "")
        login = ("--requirepass", PASSWORD, "--primaryauth", PASSWORD, "--repl-diskless-sync-delay", "0")
        self._spawn(port, *options, *login, *more)

    def _start_sentinel(self, port: int, primary: int) -> None:
        config = self._folder / f"sentinel-{port}.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self._folder}\nrequirepass {SENTINEL_PASSWORD}\n"
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n"
            f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {SERVICE} 700\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        self._spawn(port, str(config), "--sentinel")

    def _spawn(self, port: int, *words: str) -> None:
        with (self._folder / f"{port}.log").open("ab") as log:
            self._processes[port] = start_child([find_server(), *words], log=log)

    def _kill(self, port: int) -> None:
        process = self._processes.pop(port, None)
        if process is not None:
            process.kill()
            process.wait()

    def _is_ready(self) -> bool:
        try:
            return all(self._knows_all(port) for port in self._sentinels)
        except redis.RedisError:
            return False

    def _knows_all(self, port: int) -> bool:
        with self._client(port, SENTINEL_PASSWORD) as sentinel:
            state = sentinel.sentinel_masters()[SERVICE]
            (replica,) = sentinel.sentinel_slaves(SERVICE) or [{}]
        return state["num-other-sentinels"] == 2 and replica.get("master-link-status") == "ok"

    def _client(self, port: int, password: str) -> redis.Redis:
        return redis.Redis(port=port, password=password, socket_timeout=2)
