"""The task that jobs name. A headrace worker never calls it; a stock `rq worker` does, and runs the job alone."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from rq import get_current_job

from headrace.shared import environment
from headrace.shared.errors import InvalidRequest
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import ErrorCode, ErrorInfo, Result, parse_request
from headrace.worker.loading import Loaded, load
from headrace.worker.runner import Rejected, deadline, error_of, timing, usage
from headrace.worker.settings import EngineSettings


class GenerationFailed(Exception):
    """Makes RQ record the job as failed; the text is the code and message of the job's result."""


def generate(request: Any, batch: str | None = None) -> dict[str, Any]:
    """Generate for one request, in a batch of one, and store its result as a headrace worker would.

    HEADRACE_MODEL, HEADRACE_DTYPE, HEADRACE_DEVICE, HEADRACE_QUANTIZATION and HEADRACE_MAX_CONTEXT decide the model.
    Raises GenerationFailed if the request can't be run.
    """
    job = get_current_job()
    if job is None:
        raise RuntimeError("headrace.worker.tasks.generate runs inside an RQ job only")
    result = _run(request, batch, str(job.id), str(job.worker_name or "rq"), _queued_s(job.enqueued_at))
    ttl_s = environment.whole_number(environment.RESULT_TTL) or environment.DEFAULT_RESULT_TTL_S
    with job.connection.pipeline() as pipeline:
        for command in outcome_commands(result, ttl_s):
            pipeline.execute_command(*command)
        pipeline.execute()
    if result.error is not None:
        raise GenerationFailed(f"{result.error.code.value}: {result.error.message}")
    return {"finish_reasons": [output.finish_reason.value for output in result.outputs]}


def _run(body: Any, batch: str | None, job_id: str, worker: str, queued_s: float) -> Result:
    request_id = body.get("id") if isinstance(body, dict) else None
    result = Result(id=request_id if isinstance(request_id, str) else None, job_id=job_id, batch=batch, worker=worker)
    loaded = _loaded()
    try:
        request = parse_request(body)
        row = loaded.runner.row(request, job_id, deadline_s=deadline(request, None))
    except Rejected as rejection:
        return result.model_copy(update={"model": loaded.name, "error": rejection.error})
    except InvalidRequest as invalid:
        error = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=str(invalid), param=invalid.param)
        return result.model_copy(update={"model": loaded.name, "error": error})
    loaded.engine.submit(row)
    while loaded.engine.num_rows:
        loaded.engine.step()
    return result.model_copy(
        update={
            "model": loaded.name,
            "outputs": [] if row.error else [loaded.runner.output(row)],
            "usage": usage(row),
            "timing": timing(row, queued_s),
            "metadata": request.metadata,
            "error": error_of(row),
        }
    )


@lru_cache(maxsize=1)
def _loaded() -> Loaded:
    """The model, loaded once a process."""
    return load(
        EngineSettings(
            model=os.environ.get(environment.MODEL, environment.DEFAULT_MODEL),
            slots=1,
            dtype=os.environ.get(environment.DTYPE, "auto"),
            device=os.environ.get(environment.DEVICE, "auto"),
            quantization=os.environ.get(environment.QUANTIZATION, "none"),
            max_context=environment.whole_number(environment.MAX_CONTEXT),
        )
    )


def _queued_s(enqueued_at: datetime | None) -> float:
    return (datetime.now(UTC) - enqueued_at).total_seconds() if enqueued_at else 0.0
