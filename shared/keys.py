"""Every Redis key that headrace owns, and those of RQ that its clients write.

key                                type    writer              lives
headrace:result:{job_id}           string  worker or producer  result TTL
headrace:batch:{name}              hash    producer, worker    result TTL after the last write
headrace:batch:{name}:done         stream  worker or producer  as the batch
headrace:batch:{name}:jobs         list    producer            as the batch
headrace:batches                   zset    producer            always; names by creation time, the newest 10,000
headrace:batches:{tenant}          zset    producer            as above, of one tenant
headrace:checkpoint:{job_id}       string  worker              until the job's result, at most the result TTL
headrace:workers                   set     worker              while any worker is known
headrace:lease:{worker}            string  worker              the lease
headrace:cancels:{worker}          set     producer            an hour; ids of running jobs that are to be cancelled
headrace:claims:{worker}           list    worker              while jobs are claimed and not yet started

Of queues with lanes (headrace.shared.lanes, headrace.worker.lanes):

headrace:arrivals:{queue}          set     producer, worker    until the next claim; lanes that may have got jobs
headrace:waiting:{queue}~{class}   zset    worker              lanes of a priority with waiting jobs, by virtual time
headrace:idle:{queue}~{class}      zset    worker              those without, by virtual time; the latest 10,000
headrace:lanes:{queue}             hash    worker              always; clocks, turns, the lanes' jobs and tokens so far
headrace:receipts:{worker}         hash    worker              while the worker is; what lanes were charged for its jobs

RQ's own (rq:queue:…, rq:job:…, rq:queues, rq:results:…) keep RQ's types and lifetimes.
"""

from __future__ import annotations

import re

PREFIX = "headrace:"
WORKERS = f"{PREFIX}workers"
BATCHES = f"{PREFIX}batches"
RQ_QUEUES = "rq:queues"
RQ_SUSPENDED = "rq:suspended"


# The name is a part of keys: with a colon in it, a batch could write over another's stream.
_BATCH_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
BATCH_NAME_RULE = "use 1 to 128 letters, digits, '.', '_' or '-'"


def is_batch_name(name: str) -> bool:
    """True if a batch may be called so."""
    return _BATCH_NAME.fullmatch(name) is not None


def batches(tenant: str | None) -> str:
    return BATCHES if tenant is None else f"{BATCHES}:{tenant}"


def result(job_id: str) -> str:
    return f"{PREFIX}result:{job_id}"


def batch(name: str) -> str:
    return f"{PREFIX}batch:{name}"


def batch_done(name: str) -> str:
    return f"{PREFIX}batch:{name}:done"


def batch_jobs(name: str) -> str:
    return f"{PREFIX}batch:{name}:jobs"


def checkpoint(job_id: str) -> str:
    return f"{PREFIX}checkpoint:{job_id}"


def lease(worker: str) -> str:
    return f"{PREFIX}lease:{worker}"


def cancels(worker: str) -> str:
    return f"{PREFIX}cancels:{worker}"


def claims(worker: str) -> str:
    return f"{PREFIX}claims:{worker}"


def arrivals(queue: str) -> str:
    return f"{PREFIX}arrivals:{queue}"


def waiting_lanes(queue: str, priority: str) -> str:
    return f"{PREFIX}waiting:{queue}~{priority}"


def idle_lanes(queue: str, priority: str) -> str:
    return f"{PREFIX}idle:{queue}~{priority}"


def lanes(queue: str) -> str:
    return f"{PREFIX}lanes:{queue}"


def receipts(worker: str) -> str:
    return f"{PREFIX}receipts:{worker}"


def rq_queue(queue: str) -> str:
    return f"rq:queue:{queue}"


def rq_job(job_id: str) -> str:
    return f"rq:job:{job_id}"


def rq_results(job_id: str) -> str:
    """RQ's stream of a job's outcomes; it gets its entry in the same transaction as our result."""
    return f"rq:results:{job_id}"


def queue_name(model: str) -> str:
    """The RQ queue that serves a model: one queue a model, with a name that is safe in URLs and on command lines."""
    return "headrace-" + re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-").lower()
