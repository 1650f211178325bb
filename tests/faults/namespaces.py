"""Two hosts: network namespaces with a cable between them, made with iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid

_CLONE_NEWNET = 0x40000000
_NAMES = "/var/run/netns"


class NotAllowed(Exception):
    """No namespaces can be made here; the text says why."""


class TwoHosts:
    """`server` and `worker` are the namespaces' names; `server_ip` is the one's address, which the other can reach.

    Raises NotAllowed.
    """

    server_ip = "10.231.77.1"
    _worker_ip = "10.231.77.2"

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise NotAllowed("needs the ip program of iproute2")
        tag = uuid.uuid4().hex[:6]
        self.server, self.worker = f"headrace-s-{tag}", f"headrace-w-{tag}"
        self._cable = f"hr{tag}"
        try:
            for name in (self.server, self.worker):
                _ip("netns", "add", name)
            peer = ("peer", "name", "eth", "netns", self.worker)
            _ip("-n", self.server, "link", "add", self._cable, "type", "veth", *peer)
            for name, device, address in self._ends():
                _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
                _ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise NotAllowed(f"network namespaces can't be made here: {error.stderr.strip()}") from None

    def cut(self) -> None:
        """Pull the cable out: what is sent vanishes, and nobody is told."""
        _ip("-n", self.server, "link", "set", self._cable, "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("-n", self.server, "link", "set", self._cable, "up")

    def close(self) -> None:
        for name in (self.server, self.worker):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _ends(self) -> list[tuple[str, str, str]]:
        return [(self.server, self._cable, self.server_ip), (self.worker, "eth", self._worker_ip)]


def enter_namespace(name: str) -> None:
    """Move this thread, and those that it starts, to a network namespace. Raises OSError."""
    with open(f"{_NAMES}/{name}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)
