"""The vector loops of attention against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from headrace.worker.engine.cpu_numbers import Array
from headrace.worker.engine.cpu_vectors import LANES, dot_columns, weigh_rows

STORED = pytest.mark.parametrize("stored", ["float32", "bfloat16"])
UNTOUCHED = np.float32(-77)
UNIT = 2.0**-24  # what a rounding to float32 is off by at most, of the sum of the terms' sizes


def compiled_dots(count: int, size: int, block: int) -> Callable[..., None]:
    @numba.njit  # type: ignore[untyped-decorator]
    def run(vectors: Array, stride: int, columns: Array, at: int, sums: Array, to: int, to_stride: int) -> None:
        dot_columns(vectors, stride, columns, at, sums, to, to_stride, count, size, block)

    return run  # type: ignore[no-any-return]


def compiled_weighing(count: int, size: int, tiles: int) -> Callable[..., None]:
    @numba.njit  # type: ignore[untyped-decorator]
    def run(weights: Array, start: int, stride: int, rows: Array, at: int, length: int, sums: Array, to: int) -> None:
        weigh_rows(weights, start, stride, rows, at, length, sums, to, count, size, tiles)

    return run  # type: ignore[no-any-return]


def random_stored(generator: np.random.Generator, count: int, stored: str) -> tuple[Array, Array]:
    """Random numbers as they are stored, and as float64."""
    values = generator.standard_normal(count).astype(np.float32)
    if stored == "float32":
        return values, values.astype(np.float64)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@STORED
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    ("count", "size"), [(1, 16), (2, 32), (3, 64), (4, 48), (5, 80), (6, 112), (7, 128), (1, 128), (7, 16)]
)
def test_dots_are_those_of_numpy(stored: str, count: int, size: int, block: int) -> None:
    generator = np.random.default_rng(1)
    stride, at, to, to_stride = size + 3, 5, 7, block + 9
    vectors = generator.standard_normal(count * stride).astype(np.float32)
    columns, exact_columns = random_stored(generator, at + size * block, stored)
    sums = np.full(to + count * to_stride + block, UNTOUCHED)
    compiled_dots(count, size, block)(vectors, stride, columns, at, sums, to, to_stride)
    matrix = exact_columns[at:].reshape(size, block)
    expected = np.full(len(sums), np.float64(UNTOUCHED))
    allowed = np.zeros(len(sums))
    for g in range(count):
        vector, place = vectors[g * stride : g * stride + size].astype(np.float64), to + g * to_stride
        expected[place : place + block] = vector @ matrix
        allowed[place : place + block] = size * UNIT * (np.abs(vector) @ np.abs(matrix))
    assert (np.abs(sums - expected) <= allowed).all()


@STORED
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
def test_weighted_sums_are_those_of_numpy(stored: str, count: int, size: int, tiles: int, length: int) -> None:
    generator = np.random.default_rng(2)
    start, stride, at, to, width = 3, length + 5, 11, 2, tiles * LANES
    weights = generator.standard_normal(start + count * stride).astype(np.float32)
    rows, exact_rows = random_stored(generator, at + (length + 1) * size, stored)
    sums = np.full(to + count * size, UNTOUCHED)
    compiled_weighing(count, size, tiles)(weights, start, stride, rows, at, length, sums, to)
    matrix = exact_rows[at : at + length * size].reshape(length, size)[:, :width]
    expected = np.full(len(sums), np.float64(UNTOUCHED))
    allowed = np.zeros(len(sums))
    for g in range(count):
        weight, place = weights[start + g * stride :][:length].astype(np.float64), to + g * size
        expected[place : place + width] = weight @ matrix
        allowed[place : place + width] = length * UNIT * (np.abs(weight) @ np.abs(matrix))
    assert (np.abs(sums - expected) <= allowed).all()


@STORED
def test_a_sum_is_the_same_to_the_bit_however_many_are_taken_together(stored: str) -> None:
    generator = np.random.default_rng(3)
    vectors = generator.standard_normal(7 * 64).astype(np.float32)
    stored_numbers, _ = random_stored(generator, 64 * 64, stored)
    dots, weighed = (np.zeros(7 * 64, np.float32) for _ in range(2))
    compiled_dots(7, 64, 64)(vectors, 64, stored_numbers, 0, dots, 0, 64)
    compiled_weighing(7, 64, 4)(vectors, 0, 64, stored_numbers, 0, 64, weighed, 0)
    for count in (1, 2, 3, 4, 5, 6):
        part = np.zeros(count * 64, np.float32)
        compiled_dots(count, 64, 64)(vectors, 64, stored_numbers, 0, part, 0, 64)
        assert np.array_equal(part, dots[: len(part)])
        for tiles in (1, 2, 4):
            for d in range(0, 64, tiles * LANES):
                compiled_weighing(count, 64, tiles)(vectors, 0, 64, stored_numbers, d, 64, part, d)
            assert np.array_equal(part, weighed[: len(part)])
