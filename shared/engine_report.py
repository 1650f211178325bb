"""What a worker that was asked to measure itself says at its end, and what the tools that measure engines say.

Both sides know these forms: `headrace worker --report` writes the first, `headrace bench` reads them all.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Measured(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Seconds(_Measured):
    """Where an engine's time went while it had rows. Nothing is counted twice.

    Prompts and new tokens go through the model together; a pass's time is shared out by their numbers of tokens, and
    `prefill` is the prompts' share of all parts but sampling.
    """

    prefill: float
    attention: float
    matrix_products: float
    sampling: float
    other: float

    @property
    def busy(self) -> float:
        return self.prefill + self.attention + self.matrix_products + self.sampling + self.other


class Steps(_Measured):
    """What the steps were spent on. A row-step is one row's, or one empty slot's, share of one step."""

    steps: int
    row_steps: int
    empty_row_steps: int  # of slots without a token, in steps before the last job came
    prompt_tokens: int  # computed
    reused_tokens: int  # of prompts, copied from other rows


class Memory(_Measured):
    """Resident bytes of the worker's process: with the model loaded, at most from then on, and at the end."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int


class EngineReport(_Measured):
    """One worker's engine, from when it was ready until its end. `matmul_weights` are those that a token meets."""

    model: str
    device: str
    dtype: str
    num_threads: int
    num_slots: int
    max_context: int
    matmul_weights: int
    kv_cache_bytes: int
    kv_cache_formula_bytes: int  # 2 x L x K x positions x D x bytes
    seconds: Seconds
    steps: Steps
    memory: Memory


class MatmulLimit(_Measured):
    """The fastest that a device was seen to multiply, and the size of the square matrices that it did so with."""

    device: str
    dtype: str
    size: int
    flops_per_s: float


class CurvePoint(_Measured):
    """One measured time; `at` is what it was measured at: rows, or tokens."""

    at: int
    seconds: float


class StepCurves(_Measured):
    """What a decode step and the next token cost. `rows` and `cached_tokens` say what was held fixed."""

    cached_tokens: int
    by_rows: list[CurvePoint]
    rows: int
    by_cached_tokens: list[CurvePoint]
    next_token_cached: list[CurvePoint]  # one row, by the tokens before it
    next_token_recomputed: list[CurvePoint]
