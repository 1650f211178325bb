"""What decode steps cost by rows and cached tokens, and what the KV cache saves, measured through the engine alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from itertools import count

from headrace.shared.engine_report import CurvePoint, StepCurves
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.rows import Row
from headrace.worker.engine.sampling import SamplingParams
from headrace.worker.engine.stopping import StopParams

SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
_CACHED_TOKENS = 64
_ROWS = 8
_WARM_UP_STEPS = 4
_TIMED_STEPS = 8
_REPEATS = 3
_numbers = count()


def step_curves(engine: Engine) -> StepCurves:
    """All curves, for as many rows and tokens as the engine has room for. Takes a minute for a small model."""
    warm_up(engine)
    most_tokens = max(1, engine.max_context - _WARM_UP_STEPS - _TIMED_STEPS - _ROWS)  # rows come in over some steps
    cached_tokens = min(_CACHED_TOKENS, most_tokens)
    rows = min(_ROWS, engine.num_slots)
    lengths = list(doublings(min(16, most_tokens), most_tokens))
    return StepCurves(
        cached_tokens=cached_tokens,
        by_rows=[
            CurvePoint(at=number, seconds=decode_step_s(engine, number, cached_tokens))
            for number in doublings(1, engine.num_slots)
        ],
        rows=rows,
        by_cached_tokens=[CurvePoint(at=length, seconds=decode_step_s(engine, rows, length)) for length in lengths],
        next_token_cached=[CurvePoint(at=length, seconds=decode_step_s(engine, 1, length)) for length in lengths],
        next_token_recomputed=[CurvePoint(at=length, seconds=recomputed_s(engine, length)) for length in lengths],
    )


def doublings(first: int, last: int) -> Iterable[int]:
    """first, twice that, … and `last`."""
    while first < last:
        yield first
        first *= 2
    yield last


def decode_step_s(engine: Engine, num_rows: int, cached_tokens: int) -> float:
    """The median time of a decode step of so many rows, each with about so many tokens before it."""
    num_steps = _WARM_UP_STEPS + _TIMED_STEPS
    for _ in range(num_rows):
        engine.submit(_row(cached_tokens, engine.max_context - cached_tokens))
    before = engine.counts.prompt_tokens
    while engine.counts.prompt_tokens - before < num_rows * cached_tokens:
        engine.step()
    times = [_step_s(engine) for _ in range(num_steps)]
    engine.drop_all()
    return statistics.median(times[_WARM_UP_STEPS:])


def recomputed_s(engine: Engine, num_tokens: int) -> float:
    """The median time for one token of a row whose `num_tokens` tokens are run as a whole, as without a KV cache."""
    times = []
    for _ in range(_REPEATS):
        engine.submit(_row(num_tokens, 1))
        times.append(_step_s(engine))
    assert not engine.num_rows
    return statistics.median(times)


def warm_up(engine: Engine) -> None:
    """Run the engine once, so that what is compiled or allocated at the first use is there."""
    for _ in range(min(2, engine.num_slots)):
        engine.submit(_row(min(8, engine.max_context - 1), 4))
    while engine.num_rows:
        engine.step()


def _step_s(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def _row(num_tokens: int, max_tokens: int) -> Row:
    """A row with a prompt that begins like no other, so that nothing of it can be copied."""
    number = next(_numbers)
    prompt_ids = [1 + number // 50**digit % 50 for digit in range(4)] + [1] * num_tokens
    stopping = StopParams(max_tokens=max_tokens)
    return Row(row_id=str(number), prompt_ids=prompt_ids[:num_tokens], sampling=SAMPLING, stopping=stopping)
