"""A worker process whose engine hangs, or takes the process along, at the letter "m".

It is the real worker on the fake model, which continues "a" with "bcd…".
"""

from __future__ import annotations

import os
import signal
import time

import redis
from faults.processes import end_with_parent
from worker_harness import SuccessorModel, batch_worker

from headrace.shared.errors import HeadraceError


def hang() -> None:
    """What a device does whose driver has lost it."""
    while True:
        time.sleep(60)


def die() -> None:
    """What a segmentation fault does."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_faulty_worker(url: str, fault: str) -> None:
    """Be a worker until told to stop, or until the fault ends it."""
    end_with_parent()
    model = SuccessorModel()

    def at_m(last_ids: list[int]) -> None:
        if ord("m") in last_ids:
            {"hang": hang, "die": die}[fault]()

    model.before_pass = at_m
    with redis.Redis.from_url(url, socket_timeout=10) as connection:
        worker = batch_worker(connection, model, lease_s=2.0, step_timeout_s=1.0, checkpoint_interval_s=0.05)
        worker.install_signal_handlers()
        try:
            worker.run()
        except HeadraceError as error:
            os._exit(error.exit_code)
