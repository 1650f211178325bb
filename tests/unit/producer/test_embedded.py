"""The embedded server."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from headrace.producer import embedded
from headrace.producer.embedded import EmbeddedServer
from headrace.shared.errors import ServerUnavailable


def test_it_listens_on_a_private_socket_only_and_leaves_nothing_behind() -> None:
    with EmbeddedServer() as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        with redis.Redis.from_url(server.url) as client:
            settings = client.config_get("port", "save", "appendonly", "stream-node-max-bytes")
        assert settings == {"port": "0", "save": "", "appendonly": "no", "stream-node-max-bytes": "512"}
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    with pytest.raises(ServerUnavailable, match="not running"):
        _ = server.url


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho 'no luck today'\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: str(program))
    with pytest.raises(ServerUnavailable, match=r"ended with code 7; its log ends with:\nno luck today"):
        EmbeddedServer().__enter__()
