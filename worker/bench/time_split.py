"""Where an engine's time goes, and how full its steps are, measured by wrapping what it calls.

The only module that knows the engine's insides by name. A worker that is not measured runs none of this.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol

import torch

from headrace.shared.engine_report import Seconds, Steps
from headrace.worker.engine import generate
from headrace.worker.engine.cuda_graphs import GraphedDecoder
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.linear import Linear
from headrace.worker.engine.model import Decoder
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.engine.rows import Row

_PREFILL = "prefill"
_ATTENTION = "attention"
_MATRIX_PRODUCTS = "matrix_products"
_SAMPLING = "sampling"


def decoder_of(engine: Engine) -> Decoder:
    """The model that an engine runs."""
    model = engine._model
    if isinstance(model, GraphedDecoder):
        return model.decoder
    assert isinstance(model, Decoder)
    return model


def cache_of(engine: Engine) -> KVCache:
    """The engine's KV cache."""
    return engine._cache


class _Clock(Protocol):
    def mark(self) -> Any:
        """A moment in what the device does."""

    def settle(self) -> None:
        """Wait until all moments have passed."""

    def between_s(self, start: Any, end: Any) -> float: ...


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def between_s(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    """Events in the device's own stream, so that measuring does not make the host wait within a step."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def between_s(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000


class SplitEngine:
    """Splits an engine's time, as a context manager; on leaving it the engine is as it was.

    Counted is the time in which the engine has rows: its steps, and what its caller does between them. Of a captured
    graph there is no inside: the time of its attention and products is that of `other`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._clock: _Clock = _CudaClock() if cache_of(engine).keys.device.type == "cuda" else _HostClock()
        self._spans: list[tuple[str, Any, Any]] = []  # of the step that runs
        self._pass_tokens = 0
        self._parts: Counter[str] = Counter()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._empty = 0
        self._empty_since_last_job = 0
        self._undo = ExitStack()

    def __enter__(self) -> SplitEngine:
        model, cache = self._engine._model, cache_of(self._engine)
        self._engine.counts = generate.StepCounts()
        self._replace(self._engine, "step", self._step)
        self._replace(self._engine, "submit", self._submit)
        self._replace(model, "forward", self._passing)
        self._replace(generate, "sample", self._timed(_SAMPLING))
        if isinstance(model, Decoder):
            self._replace(cache, "attend", self._timed(_ATTENTION))
            for module in model.modules():
                if isinstance(module, Linear):
                    self._replace(module, "forward", self._timed(_MATRIX_PRODUCTS))
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    @property
    def seconds(self) -> Seconds:
        """The split so far."""
        parts = {name: self._parts[name] for name in (_PREFILL, _ATTENTION, _MATRIX_PRODUCTS, _SAMPLING)}
        return Seconds(**parts, other=max(0.0, self._busy_s - sum(parts.values())))

    @property
    def steps(self) -> Steps:
        """The counts so far."""
        counts = self._engine.counts
        return Steps(
            steps=counts.steps,
            row_steps=counts.row_steps,
            empty_row_steps=self._empty,
            prompt_tokens=counts.prompt_tokens,
            reused_tokens=counts.reused_tokens,
        )

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        own = vars(owner).get(name)
        setattr(owner, name, wrap(getattr(owner, name)))
        self._undo.callback(delattr, owner, name) if own is None else self._undo.callback(setattr, owner, name, own)

    def _timed(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(call)
            def timed(*arguments: Any, **options: Any) -> Any:
                start = self._clock.mark()
                try:
                    return call(*arguments, **options)
                finally:
                    self._spans.append((part, start, self._clock.mark()))

            return timed

        return wrap

    def _passing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(_PREFILL)(forward)

        @wraps(forward)
        def passed(tokens: PackedTokens, cache: KVCache) -> Any:
            self._pass_tokens = len(tokens.token_ids)
            return timed(tokens, cache)

        return passed

    def _step(self, step: Callable[[], list[Row]]) -> Callable[[], list[Row]]:
        def stepped() -> list[Row]:
            counts = self._engine.counts
            start_s = time.perf_counter() if self._busy_since is None else self._busy_since
            steps, rows, prompt_tokens = counts.steps, counts.row_steps, counts.prompt_tokens
            self._pass_tokens = 0
            done = step()
            self._clock.settle()
            end_s = time.perf_counter()
            self._share_out(counts.prompt_tokens - prompt_tokens)
            self._busy_s += end_s - start_s
            self._busy_since = end_s if self._engine.num_rows else None
            slots = (counts.steps - steps) * self._engine.num_slots
            self._empty_since_last_job += slots - (counts.row_steps - rows)
            return done

        return stepped

    def _share_out(self, prompt_tokens: int) -> None:
        """Add the step's times: of those within the pass, prefill has the prompts' share and the parts the rest."""
        prefill = prompt_tokens / self._pass_tokens if self._pass_tokens else 0.0
        shares = {_PREFILL: prefill, _ATTENTION: 1 - prefill, _MATRIX_PRODUCTS: 1 - prefill, _SAMPLING: 1.0}
        for part, start, end in self._spans:
            self._parts[part] += shares[part] * self._clock.between_s(start, end)  # type: ignore[assignment]
        self._spans.clear()

    def _submit(self, submit: Callable[[Row], None]) -> Callable[[Row], None]:
        def submitted(row: Row) -> None:
            # A job came after those steps: it is one that their empty slots could have taken.
            self._empty += self._empty_since_last_job
            self._empty_since_last_job = 0
            submit(row)

        return submitted
