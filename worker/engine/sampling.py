"""Choosing the next token of every row at once, each row by its own parameters.

Order: temperature, top_k, top_p (over what top_k left), min_p; then one draw. Exactly k tokens survive top_k: among
equal logits the lower token ids do. A draw is the largest of log-probability plus Gumbel noise (the Gumbel-max trick,
Gumbel 1954; see Maddison et al. 2014), where the noise is a function of (seed, position, token) alone: neither the
row's place, nor its neighbours, nor the order of sums over the vocabulary has a part in it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.worker.engine.largest import block_maxima, largest, likeliest

_NUCLEUS_WIDTH = 128  # candidates that nearly always hold a nucleus; a row that needs more gets a full sort
_COLDEST = 1e-6  # below this temperature the quotient overflows; the draw is as good as greedy long before
_HOTTEST = 1e30  # an infinite temperature would make NaN of -inf; the draw is as good as uniform long before


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one row chooses. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise_key: int = 0  # 64 bits, signed; see `noise_key`


def noise_key(seed: int | str, sample_index: int = 0) -> int:
    """The 64-bit key of one row's noise. Equal seeds and sample indexes give equal keys, on any machine."""
    digest = hashlib.blake2b(f"{seed}\0{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class BatchSampling:
    """The parameters of all rows of a batch as tensors, and which rows take which way through `sample`."""

    def __init__(self, rows: list[SamplingParams], device: torch.device) -> None:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        # All (B, 1).
        self.temperature = column([min(max(row.temperature, _COLDEST), _HOTTEST) for row in rows], torch.float32)
        self.top_k = column([row.top_k or 2**62 for row in rows], torch.int64)
        self.top_p = column([row.top_p for row in rows], torch.float64)
        self.min_p = column([row.min_p for row in rows], torch.float64)
        self.noise_key = column([row.noise_key for row in rows], torch.int64)
        self.ranked = [i for i, row in enumerate(rows) if row.temperature > 0 and 0 < row.top_k]
        self.nucleus = [i for i, row in enumerate(rows) if row.temperature > 0 and not row.top_k and row.top_p < 1]
        self.whole = [i for i, row in enumerate(rows) if row.temperature > 0 and not row.top_k and row.top_p >= 1]
        self.widest_k = max((rows[i].top_k for i in self.ranked), default=0)

    def pick(self, rows: Tensor, best: Tensor, maxima: Tensor) -> _Columns:
        """The parameters of some rows, with the largest logit of each of all rows and those rows' maxima of blocks."""
        return _Columns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.noise_key[rows],
            best[rows],
            maxima,
        )


@dataclass(frozen=True)
class _Columns:
    """What is needed of each row, as (B, 1) columns: `best` is its largest logit. `maxima` (B, blocks)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise_key: Tensor
    best: Tensor
    maxima: Tensor

    def scale(self, logits: Tensor) -> Tensor:
        """Logits over temperature, 0 for the largest: (B, C) -> (B, C) float32. Zeros for a row that has failed."""
        return torch.where(self.best.isfinite(), logits.float() - self.best, 0.0) / self.temperature

    def pick(self, rows: Tensor) -> _Columns:
        return _Columns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.noise_key[rows],
            self.best[rows],
            self.maxima[rows],
        )


def sample(logits: Tensor, batch: BatchSampling, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a token for each row: (B, V), (B,) -> token ids (B,), failed (B,).

    `positions` counts the tokens of each row so far, prompt included. A row without a finite maximum (NaN, or nothing
    but -inf) has failed; its token means nothing. The logits are left as they were.
    """
    maxima = block_maxima(logits)
    tokens, best = likeliest(logits, maxima)
    for way, rows in ((_among_top_k, batch.ranked), (_in_nucleus, batch.nucleus), (_in_whole, batch.whole)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            all_rows = len(rows) == len(logits)
            picked = logits if all_rows else logits[index]
            columns = batch.pick(index, best, maxima if all_rows else maxima[index])
            tokens[index] = way(picked, columns, positions[index][:, None], batch.widest_k)
    return tokens, ~best.isfinite()[:, 0]


def _among_top_k(logits: Tensor, columns: _Columns, positions: Tensor, widest_k: int) -> Tensor:
    """Rows with a top_k: (B, V) -> (B,)."""
    values, ids = largest(logits, min(widest_k, logits.shape[-1]), columns.maxima)
    ranks = torch.arange(values.shape[-1], device=values.device)
    scores = columns.scale(values).masked_fill(ranks >= columns.top_k, -math.inf)
    return _draw(_nucleus(scores.double().log_softmax(dim=-1), columns), ids, columns, positions)


def _in_nucleus(logits: Tensor, columns: _Columns, positions: Tensor, _: int) -> Tensor:
    """Rows with a top_p but no top_k: look among a few candidates first, then, where their mass is short, among all."""
    # Not logsumexp: torch sums a single row in another order than many.
    of_all = columns.scale(logits).double().log_softmax(dim=-1)
    ids = largest(logits, min(_NUCLEUS_WIDTH, logits.shape[-1]), columns.maxima)[1]
    log_probs = of_all.gather(-1, ids)
    tokens = _draw(_nucleus(log_probs, columns), ids, columns, positions)
    short = (log_probs.exp().sum(dim=-1) < columns.top_p[:, 0]).nonzero()[:, 0]
    if len(short) and ids.shape[-1] < logits.shape[-1]:
        rest = columns.pick(short)
        ids = largest(logits[short], logits.shape[-1], rest.maxima)[1]
        tokens[short] = _draw(_nucleus(of_all[short].gather(-1, ids), rest), ids, rest, positions[short])
    return tokens


def _in_whole(logits: Tensor, columns: _Columns, positions: Tensor, _: int) -> Tensor:
    """Rows that draw from the whole vocabulary: min_p needs no order."""
    log_probs = columns.scale(logits).double().log_softmax(dim=-1)
    ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    return _draw(_above_min_p(log_probs, columns), ids, columns, positions)


def _nucleus(log_probs: Tensor, columns: _Columns) -> Tensor:
    """Drop what lies beyond top_p or below min_p: ordered (B, C) -> (B, C) with -inf for the dropped.

    A token stays while the tokens before it hold less than top_p, so the first always does.
    """
    probs = log_probs.exp()
    before = probs.cumsum(dim=-1) - probs
    beyond = (before >= columns.top_p) & (columns.top_p < 1)
    beyond[:, 0] = False
    return _above_min_p(log_probs.masked_fill(beyond, -math.inf), columns)


def _above_min_p(log_probs: Tensor, columns: _Columns) -> Tensor:
    """Drop what is less likely than min_p times the likeliest."""
    floor = log_probs.amax(dim=-1, keepdim=True) + columns.min_p.log()
    return log_probs.masked_fill(log_probs < floor, -math.inf)


def _draw(log_probs: Tensor, ids: Tensor, columns: _Columns, positions: Tensor) -> Tensor:
    """One token a row by its log-probabilities; they need not be normalized: (B, C), (B, C) -> (B,)."""
    choice = (log_probs + gumbel_noise(columns.noise_key, positions, ids)).argmax(dim=-1, keepdim=True)
    return ids.gather(-1, choice)[:, 0]


def gumbel_noise(noise_key: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each token: (B, 1), (B, 1), (B, C) -> (B, C) float64.

    The bits come from SplitMix64 (Steele, Lea & Flood 2014) as a counter-based generator: a state mixed from key and
    position, then the state's output number `id`.
    """
    state = _mix(_mix(noise_key) + positions * _GOLDEN)
    bits = _mix(state + (ids + 1) * _GOLDEN)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # exact, and in (0, 1) with both ends excluded
    return -torch.log(-torch.log(uniform))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer; int64 products wrap around, as they should."""
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)
