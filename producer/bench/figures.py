"""From what was measured to what is reported. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.shared.engine_report import EngineReport, MatmulLimit, Seconds, Steps

_FLOPS_PER_WEIGHT = 2  # a multiplication and an addition


@dataclass(frozen=True, kw_only=True)
class RunCounts:
    """What the producer saw, from the first job's submission to the last result. Tokens are those of good results."""

    jobs: int
    failed: int
    wall_s: float
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Seconds; they add up to the wall's."""

    prefill_s: float
    attention_s: float
    matrix_products_s: float
    sampling_s: float
    other_s: float
    waiting_s: float  # the engine had no rows: before the first job, after the last, and whenever none was at hand


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Work that is in no answer. The share is of all row-steps."""

    empty_row_steps: int
    all_row_steps: int
    row_step_share: float


@dataclass(frozen=True, kw_only=True)
class LimitShare:
    """The products that the tokens need, a second, against the fastest that the machine was seen to multiply."""

    needed_flops: int
    flops_per_s: float
    limit_flops_per_s: float
    limit_matrix_size: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All of it."""

    run: RunCounts
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    time: TimeSplit
    padding: Padding
    limit: LimitShare | None
    engine: EngineReport


def figures_of(run: RunCounts, engine: EngineReport, limit: MatmulLimit | None) -> Figures:
    """Without `limit` there is no share of it."""
    return Figures(
        run=run,
        generated_tokens_per_s=_ratio(run.generated_tokens, run.wall_s),
        prompt_tokens_per_s=_ratio(run.prompt_tokens, run.wall_s),
        time=_time_split(run.wall_s, engine.seconds),
        padding=_padding(engine.steps),
        limit=None if limit is None else _limit_share(run, engine.matmul_weights, limit),
        engine=engine,
    )


def needed_flops(num_tokens: int, matmul_weights: int) -> int:
    """What the products of so many tokens take, each weight multiplied and added once a token."""
    return num_tokens * _FLOPS_PER_WEIGHT * matmul_weights


def _time_split(wall_s: float, seconds: Seconds) -> TimeSplit:
    return TimeSplit(
        prefill_s=seconds.prefill,
        attention_s=seconds.attention,
        matrix_products_s=seconds.matrix_products,
        sampling_s=seconds.sampling,
        other_s=seconds.other,
        waiting_s=max(0.0, wall_s - seconds.busy),
    )


def _padding(steps: Steps) -> Padding:
    all_row_steps = steps.row_steps + steps.empty_row_steps
    return Padding(
        empty_row_steps=steps.empty_row_steps,
        all_row_steps=all_row_steps,
        row_step_share=_ratio(steps.empty_row_steps, all_row_steps),
    )


def _limit_share(run: RunCounts, matmul_weights: int, limit: MatmulLimit) -> LimitShare:
    needed = needed_flops(run.prompt_tokens + run.generated_tokens, matmul_weights)
    flops_per_s = _ratio(needed, run.wall_s)
    return LimitShare(
        needed_flops=needed,
        flops_per_s=flops_per_s,
        limit_flops_per_s=limit.flops_per_s,
        limit_matrix_size=limit.size,
        share=_ratio(flops_per_s, limit.flops_per_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
