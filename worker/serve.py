"""One worker process: connect, load, work until told to stop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import redis

from headrace.shared.connection import connect, open_client, server_error
from headrace.worker.batch_worker import BatchWorker
from headrace.worker.loading import Loaded, load
from headrace.worker.settings import EngineSettings, QueueSettings

_SOCKET_TIMEOUT_S = 10.0


def serve(
    engine_settings: EngineSettings, queue_settings: QueueSettings, redis_url: str, report: Path | None = None
) -> None:
    """Run a worker in this process's main thread; with `report`, measure its engine and write that there at the end.

    Raises ServerUnavailable, ModelError or SettingsError.
    """
    connect(redis_url).close()  # a wrong address should not wait for the model to load
    loaded = load(engine_settings)
    connection = open_client(redis_url, socket_timeout_s=_SOCKET_TIMEOUT_S)
    with connection, _measuring(loaded, report):
        worker = BatchWorker(connection, loaded.engine, loaded.runner, queue_settings)
        worker.install_signal_handlers()
        try:
            worker.run()
        except redis.RedisError as error:
            raise server_error(redis_url, error) from error


def _measuring(loaded: Loaded, report: Path | None) -> AbstractContextManager[None]:
    if report is None:
        return nullcontext()
    from headrace.worker.bench.report import reporting

    return reporting(loaded, report)
