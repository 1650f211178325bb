"""The vector loops of attention against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from headrace.worker.engine import cpu_vectors
from headrace.worker.engine.cpu_numbers import Array
from headrace.worker.engine.cpu_vectors import LANES, dot_columns, weigh_rows

UNTOUCHED = np.float32(-77)
UNIT = 2.0**-24  # what a rounding to float32 is off by at most, of the sum of the terms' sizes


@pytest.fixture(params=["float32", "pairs", "pairs without an instruction for them"])
def elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of elements."""
    kind = str(request.param)
    if kind == "pairs" and not cpu_vectors._MULTIPLIES_PAIRS:
        pytest.skip("this processor has no instruction for pairs")
    if kind.endswith("them"):
        monkeypatch.setattr(cpu_vectors, "_MULTIPLIES_PAIRS", False)
    return kind


def compiled_dots(count: int, size: int, block: int) -> Callable[..., None]:
    @numba.njit  # type: ignore[untyped-decorator]
    def run(
        vectors: Array, start: int, stride: int, columns: Array, at: int, sums: Array, to: int, to_stride: int
    ) -> None:
        dot_columns(vectors, start, stride, columns, at, sums, to, to_stride, columns, at, count, size, block)

    return run  # type: ignore[no-any-return]


def compiled_weighing(count: int, size: int, tiles: int) -> Callable[..., None]:
    @numba.njit  # type: ignore[untyped-decorator]
    def run(weights: Array, start: int, stride: int, rows: Array, at: int, length: int, sums: Array, to: int) -> None:
        weigh_rows(weights, start, stride, rows, at, length, sums, to, rows, at, count, size, tiles)

    return run  # type: ignore[no-any-return]


def random_elements(generator: np.random.Generator, count: int, kind: str) -> tuple[Array, Array]:
    """Random elements, and the numbers in them as float64: (count, numbers of an element)."""
    if kind == "float32":
        values = generator.standard_normal(count).astype(np.float32)
        return values, values.astype(np.float64)[:, None]
    bits = (generator.standard_normal((count, 2)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.uint32)[:, 0], exact


def product(left: Array, right: Array) -> tuple[Array, Array]:
    """(G, n, E) and (n, C, E) -> sums of products over n and E (G, C), and of their sizes."""
    return np.einsum("gne,nce->gc", left, right), np.einsum("gne,nce->gc", np.abs(left), np.abs(right))


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(
    ("count", "size"), [(1, 16), (2, 32), (3, 64), (4, 48), (5, 80), (6, 112), (7, 128), (1, 128), (7, 8)]
)
def test_dots_are_those_of_numpy(elements: str, count: int, size: int, block: int) -> None:
    generator = np.random.default_rng(1)
    start, stride, at, to, to_stride = 2, size + 3, 5, 7, block + 9
    vectors, exact_vectors = random_elements(generator, start + count * stride, elements)
    columns, exact_columns = random_elements(generator, at + size * block, elements)
    sums = np.full(to + count * to_stride + block, UNTOUCHED)
    compiled_dots(count, size, block)(vectors, start, stride, columns, at, sums, to, to_stride)
    left = np.stack([exact_vectors[start + g * stride :][:size] for g in range(count)])
    exact, sizes = product(left, exact_columns[at:].reshape(size, block, -1))
    for g in range(count):
        place = slice(to + g * to_stride, to + g * to_stride + block)
        assert (np.abs(sums[place] - exact[g]) <= 2 * size * UNIT * sizes[g]).all()
        sums[place] = UNTOUCHED
    assert (sums == UNTOUCHED).all()


@pytest.mark.parametrize("length", [0, 1, 2, 63, 200])
@pytest.mark.parametrize(
    ("count", "size", "tiles"),
    [
        (1, 16, 1),
        (2, 32, 2),
        (3, 64, 4),
        (4, 48, 3),
        (5, 80, 1),
        (6, 96, 3),
        (7, 128, 4),
        (1, 128, 4),
        (7, 16, 1),
        (2, 64, 1),
    ],
)
def test_weighted_sums_are_those_of_numpy(elements: str, count: int, size: int, tiles: int, length: int) -> None:
    generator = np.random.default_rng(2)
    start, stride, at, to, width = 3, length + 5, 11, 2, tiles * LANES
    weights, exact_weights = random_elements(generator, start + count * stride, elements)
    rows, exact_rows = random_elements(generator, at + (length + 1) * size, elements)
    sums = np.full(to + count * size, UNTOUCHED)
    compiled_weighing(count, size, tiles)(weights, start, stride, rows, at, length, sums, to)
    left = np.stack([exact_weights[start + g * stride :][:length] for g in range(count)])
    exact, sizes = product(
        left, exact_rows[at : at + length * size].reshape(length, size, exact_rows.shape[1])[:, :width]
    )
    for g in range(count):
        place = slice(to + g * size, to + g * size + width)
        assert (np.abs(sums[place] - exact[g]) <= 2 * length * UNIT * sizes[g]).all()
        sums[place] = UNTOUCHED
    assert (sums == UNTOUCHED).all()


def test_a_sum_is_the_same_to_the_bit_however_many_are_taken_together(elements: str) -> None:
    generator = np.random.default_rng(3)
    vectors, _ = random_elements(generator, 7 * 64, elements)
    stored, _ = random_elements(generator, 64 * 64, elements)
    dots, weighed = (np.zeros(7 * 64, np.float32) for _ in range(2))
    compiled_dots(7, 64, 64)(vectors, 0, 64, stored, 0, dots, 0, 64)
    compiled_weighing(7, 64, 4)(vectors, 0, 64, stored, 0, 64, weighed, 0)
    for count in (1, 2, 3, 4, 5, 6):
        part = np.zeros(count * 64, np.float32)
        compiled_dots(count, 64, 64)(vectors, 0, 64, stored, 0, part, 0, 64)
        assert np.array_equal(part, dots[: len(part)])
        for tiles in (1, 2, 4):
            for d in range(0, 64, tiles * LANES):
                compiled_weighing(count, 64, tiles)(vectors, 0, 64, stored, d, 64, part, d)
            assert np.array_equal(part, weighed[: len(part)])
