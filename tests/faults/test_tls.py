"""rediss://: a server that is reached only through TLS, with a certificate of our own making."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from faults.loop_thread import LoopThread
from worker_harness import MODEL, running_worker

from headrace.producer import AsyncProducer, Producer
from headrace.shared.connection import connect
from headrace.shared.errors import ServerUnavailable


class Authority:
    """A certificate authority, and certificates that it has signed, made with the openssl program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._openssl("req", "-x509", *self._new_key("ca"), "-subj", "/CN=test CA", "-out", str(self.certificate))

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 and its key."""
        extensions, request, signed = (self._folder / f"{name}.{kind}" for kind in ("ext", "csr", "pem"))
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        self._openssl("req", *self._new_key(name), "-subj", f"/CN={name}", "-out", str(request))
        authority = ("-CA", str(self.certificate), "-CAkey", str(self._folder / "ca.key"), "-CAcreateserial")
        self._openssl("x509", "-req", "-in", str(request), *authority, "-extfile", str(extensions), "-out", str(signed))
        return signed, self._folder / f"{name}.key"

    def _new_key(self, name: str) -> tuple[str, ...]:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        return (*curve, "-keyout", str(self._folder / f"{name}.key"))

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)


class TlsProxy:
    """Ends TLS on a port of 127.0.0.1 and passes what comes to a unix socket; an event loop in a thread."""

    def __init__(self, context: ssl.SSLContext, target: str) -> None:
        self._target = target
        self._thread = LoopThread()
        self._server = self._thread.run(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context))
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._thread.run(self._stop_listening())
        self._thread.close()

    async def _stop_listening(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(self._target)
        try:
            await asyncio.gather(self._pass(reader, to_server), self._pass(from_server, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, to_server):
                each.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(2**16):
            target.write(data)
            await target.drain()
        raise ConnectionResetError  # one side has closed: so does the other


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def proxy(authority: Authority, redis_url: str) -> Iterator[TlsProxy]:
    """It asks its clients for certificates of the same authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    made = TlsProxy(context, redis_url.removeprefix("unix://"))
    yield made
    made.close()


@pytest.fixture
def url(proxy: TlsProxy, authority: Authority) -> str:
    certificate, key = authority.issue("client")
    arguments = f"ssl_ca_certs={authority.certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"
    return f"rediss://127.0.0.1:{proxy.port}/0?{arguments}"


async def test_jobs_and_results_travel_through_tls(url: str) -> None:
    with redis.Redis.from_url(url) as connection, running_worker(connection), Producer(url, model=MODEL) as producer:
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        async with AsyncProducer(url, model=MODEL) as asynchronous:
            job = await asynchronous.submit("b", max_tokens=3)
            assert (await job.result(timeout=20)).text == "cde"


def test_a_server_whose_certificate_nobody_vouches_for_is_refused(url: str) -> None:
    with pytest.raises(ServerUnavailable, match="certificate verify failed"):
        connect(url.partition("?")[0])


def test_a_client_without_its_certificate_is_refused(url: str, authority: Authority) -> None:
    with pytest.raises(ServerUnavailable):
        connect(f"{url.partition('?')[0]}?ssl_ca_certs={authority.certificate}")
    connect(url).close()


def test_a_client_without_tls_is_refused(url: str) -> None:
    with pytest.raises(ServerUnavailable):
        connect(url.partition("?")[0].replace("rediss", "redis"))
