"""The Redis commands that make a job's result known: the result itself, its batch's stream and its batch's counts.

Whoever settles a job runs them in one transaction with whatever else ends the job.
"""

from __future__ import annotations

from enum import StrEnum

from headrace.shared import keys
from headrace.shared.schema import ErrorCode, Result

Command = tuple[str | bytes | int | float, ...]


class Outcome(StrEnum):
    """How a job ended: the name of its count in the batch's hash, and the status in the batch's stream."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def outcome_of(result: Result) -> Outcome:
    """Completed without an error, cancelled on request, failed otherwise."""
    if result.error is None:
        return Outcome.COMPLETED
    return Outcome.CANCELLED if result.error.code is ErrorCode.CANCELLED else Outcome.FAILED


def outcome_commands(result: Result, ttl_s: int) -> list[Command]:
    """SET the result and, if it belongs to a batch, add it to the batch's stream and counts. All live `ttl_s`.

    Whatever the job's checkpoint held is in the result, or of no more use.
    """
    commands: list[Command] = [
        ("SET", keys.result(result.job_id), result.to_json(), "EX", ttl_s),
        ("DEL", keys.checkpoint(result.job_id)),
    ]
    if result.batch is None:
        return commands
    batch, done, outcome = keys.batch(result.batch), keys.batch_done(result.batch), outcome_of(result)
    commands.append(("XADD", done, "*", "job_id", result.job_id, "status", outcome.value))
    commands.append(("HINCRBY", batch, outcome.value, 1))
    if result.usage is not None:
        commands.append(("HINCRBY", batch, "prompt_tokens", result.usage.prompt_tokens))
        commands.append(("HINCRBY", batch, "completion_tokens", result.usage.completion_tokens))
    commands.extend(("EXPIRE", key, ttl_s) for key in (batch, done, keys.batch_jobs(result.batch)))
    return commands
