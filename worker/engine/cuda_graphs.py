"""Decode steps on CUDA as captured graphs: one launch a pass instead of hundreds, which take longer than their work.

A graph's shapes and addresses are fixed. So there is one for each of a few numbers of rows and of positions, captured
when it is first needed; rows up to the next of these numbers are filled with tokens of a spare slot that nobody reads.
Passes with parts of prompts are of every size, and long enough to run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.model import Decoder
from headrace.worker.engine.packing import PackedTokens

Pass = Callable[[], Tensor]
_LEAST_POSITIONS = 256
_ROWS_STEP = 32  # from there on, multiples of it; below, powers of two


class GraphedDecoder:
    """A model whose decode steps are captured; as the `Decoder` that it is made of, within rounding.

    `capture` turns a pass into one that, called again, computes the same from what its inputs' memory then holds. The
    cache needs a spare slot.
    """

    def __init__(self, decoder: Decoder, capture: Callable[[Pass], Pass] | None = None) -> None:
        self.decoder = decoder
        self._capture = capture or CudaCapture()
        self._steps: dict[tuple[int, int], _Step] = {}

    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        """As `Decoder.forward`. The logits of a decode step are valid until the next one."""
        num_rows = len(tokens.last)
        if num_rows < len(tokens.token_ids):
            return self.decoder.forward(tokens, cache)
        size = min(padded_rows(num_rows), cache.num_slots)
        longest = min(padded_positions(tokens.longest), cache.max_context)
        step = self._steps.get((size, longest))
        if step is None:
            inputs = _inputs(size, longest, cache)
            step = _Step(inputs, self._capture(lambda: self.decoder.forward(inputs, cache)))
            self._steps[size, longest] = step
        for static, given in (
            (step.inputs.token_ids, tokens.token_ids),
            (step.inputs.slots, tokens.slots),
            (step.inputs.positions, tokens.positions),
        ):
            static[:num_rows] = given
        step.inputs.slots[num_rows:] = cache.num_slots
        step.inputs.positions[num_rows:] = 0
        return step.run()[:num_rows]


@dataclass(frozen=True)
class _Step:
    inputs: PackedTokens
    run: Pass


class CudaCapture:
    """Captures passes; all share the memory in which they compute, for they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Pass) -> Pass:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):  # libraries set themselves up at the first use, which can't be captured
            run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def padded_rows(count: int) -> int:
    """The number of rows of the graph that so many rows take."""
    return -(-count // _ROWS_STEP) * _ROWS_STEP if count > _ROWS_STEP // 2 else 1 << (count - 1).bit_length()


def padded_positions(count: int) -> int:
    """The number of positions that the graph for rows of up to `count` positions looks at."""
    return max(_LEAST_POSITIONS, 1 << (count - 1).bit_length())


def _inputs(size: int, longest: int, cache: KVCache) -> PackedTokens:
    """Memory for the tokens of `size` rows, for now all of the spare slot."""
    return PackedTokens(
        token_ids=torch.zeros(size, dtype=torch.int64, device=cache.device),
        slots=torch.full((size,), cache.num_slots, device=cache.device),
        positions=torch.zeros(size, dtype=torch.int64, device=cache.device),
        last=torch.arange(size, device=cache.device),
        longest=longest,
    )
