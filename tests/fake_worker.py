"""A stand-in for a worker: settles queued jobs in Redis as the real one does, without a model.

As a program it takes the worker's options. The models "missing" and "crash" fail as their names say.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable

import redis

from headrace.shared import keys
from headrace.shared.job import decode_payload
from headrace.shared.schema import ErrorCode, ErrorInfo, FinishReason, Output, Result, Usage

Answer = Callable[[dict[str, object]], str | ErrorInfo]


def echo(request: dict[str, object]) -> str | ErrorInfo:
    """Answers with the prompt; a prompt that begins with "fail" fails."""
    prompt = str(request.get("prompt") or json.dumps(request.get("messages")))
    if prompt.startswith("fail"):
        return ErrorInfo(code=ErrorCode.PROMPT_TOO_LONG, message="prompt has 9,001 tokens; the context holds 8,192")
    return f"<{prompt}>"


def settle_next(client: redis.Redis, queue: str, answer: Answer = echo) -> str | None:
    """Run the next job of a queue; returns its id, or None if none waits."""
    popped = client.lpop(keys.rq_queue(queue))
    if popped is None:
        return None
    job_id = popped.decode()  # type: ignore[union-attr]
    if client.hget(keys.rq_job(job_id), "status") == b"queued":
        settle(client, job_id, answer)
    return job_id


def settle_all(client: redis.Redis, queue: str, answer: Answer = echo) -> int:
    """Run all waiting jobs; returns how many there were."""
    count = 0
    while settle_next(client, queue, answer) is not None:
        count += 1
    return count


def settle(client: redis.Redis, job_id: str, answer: Answer = echo) -> None:
    payload = decode_payload(client.hget(keys.rq_job(job_id), "data"))  # type: ignore[arg-type]
    found = answer(payload.request)
    common = {"id": payload.request.get("id"), "job_id": job_id, "batch": payload.batch, "model": "fake"}
    if isinstance(found, str):
        output = Output(text=found, token_ids=[1, 2], finish_reason=FinishReason.STOP)
        result = Result(**common, outputs=[output], usage=Usage(prompt_tokens=3, completion_tokens=2))
        status = "completed"
    else:
        result, status = Result(**common, error=found), "failed"
    with client.pipeline(transaction=True) as pipeline:
        pipeline.set(keys.result(job_id), result.to_json(), ex=600)
        pipeline.hset(keys.rq_job(job_id), "status", "finished")
        pipeline.xadd(keys.rq_results(job_id), {"type": 1, "worker_name": "fake"})
        if payload.batch is not None:
            key = keys.batch(payload.batch)
            pipeline.xadd(keys.batch_done(payload.batch), {"job_id": job_id, "status": status})
            pipeline.hincrby(key, status, 1)
            if status == "completed":
                pipeline.hincrby(key, "prompt_tokens", 3)
                pipeline.hincrby(key, "completion_tokens", 2)
        pipeline.execute()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--queue")
    parser.add_argument("--model")
    options, _ = parser.parse_known_args()
    if options.model == "missing":
        print("loading\nheadrace: error: no model 'missing'", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    client = redis.Redis.from_url(os.environ["HEADRACE_REDIS_URL"])
    count = 0
    while True:
        if client.blmove(keys.rq_queue(options.queue), keys.rq_queue(options.queue), 1, "LEFT", "LEFT") is None:
            continue
        settle_next(client, options.queue)
        count += 1
        if options.model == "crash" and count == 3:
            os._exit(3)


if __name__ == "__main__":
    main()
