from __future__ import annotations

import threading

from headrace.worker.watchdog import Watchdog


def test_what_takes_too_long_is_noticed_while_it_lasts_and_what_ended_in_time_is_not() -> None:
    noticed = threading.Event()
    dog = Watchdog(0.05, noticed.set)
    with dog.watching():
        pass
    dog.start()
    with dog.watching():
        assert noticed.wait(10)
    dog.leave()
