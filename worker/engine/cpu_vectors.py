"""The inner loops of attention, as vectors of LANES float32 in registers.

Numba vectorizes plain loops well, but keeps no sums in registers across them; these two loops are where attention
spends its time, so they are written as LLVM instructions. The vectors are LLVM's own, of one width on every processor:
it splits them where the registers are narrower. Each sum is taken in the order of its terms.

Their arrays hold float32, or pairs of bfloat16 as one uint32: the first of the two in the lower half. A term of pairs
is first x first + second x second, for which some processors have one instruction.

While one array is read, what is read after it is fetched from memory, from `ahead[ahead_at]` on, as much as of the one.
Streams of a row's size are too short for the processor to find out by itself: each would begin with waiting.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _PAIRS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
# AVX-512's VDPBF16PS: two products and their sum in each lane, in the time of one fused multiply-add.
_MULTIPLIES_PAIRS = not config.CPU_NAME and get_host_cpu_features().get("avx512bf16", False)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_columns(
    typing: Any, vectors: Any, start: Any, stride: Any, columns: Any, at: Any, sums: Any, to: Any, to_stride: Any,
    ahead: Any, ahead_at: Any, count: Any, size: Any, block: Any,
) -> Any:  # fmt: skip
    """sums[to + g x to_stride + p] = sum over d of vectors[start + g x stride + d] x columns[at + d x block + p].

    For g below `count` and p below `block`, d below `size`, which are constants; `block` is a multiple of LANES. The
    arrays are flat; `vectors` and `columns` hold the same kind of elements, the sums are float32.
    """
    num, length, width = (literal.literal_value for literal in (count, size, block))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a = _Arguments(context, builder, signature, arguments)
        totals = _weighed_sums(
            builder, (a.pointer(0, 1), arguments[2]), a.pointer(3, 4), a.pointer(8, 9), _I64(length), width,
            num, width // LANES,
        )  # fmt: skip
        output = a.pointer(5, 6)
        for g in range(num):
            for tile, total in enumerate(totals[g]):
                place = builder.add(builder.mul(arguments[7], _I64(g)), _I64(tile * LANES))
                total.store(builder.gep(output, [place]))
        return context.get_dummy_value()

    arguments = (vectors, start, stride, columns, at, sums, to, to_stride, ahead, ahead_at, count, size, block)
    return types.void(*arguments), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh_rows(
    typing: Any, weights: Any, start: Any, stride: Any, rows: Any, at: Any, length: Any, sums: Any, to: Any,
    ahead: Any, ahead_at: Any, count: Any, size: Any, tiles: Any,
) -> Any:  # fmt: skip
    """sums[to + g x size + d] = sum over p of weights[start + g x stride + p] x rows[at + p x size + d].

    For g below `count` and d below `tiles` x LANES, p below `length`; `count`, `size` and `tiles` are constants. The
    arrays are flat; `weights` and `rows` hold the same kind of elements, the sums are float32.
    """
    num, width, wide = (literal.literal_value for literal in (count, size, tiles))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a = _Arguments(context, builder, signature, arguments)
        totals = _weighed_sums(
            builder, (a.pointer(0, 1), arguments[2]), a.pointer(3, 4), a.pointer(8, 9), arguments[5], width, num, wide
        )
        output = a.pointer(6, 7)
        for g in range(num):
            for tile, total in enumerate(totals[g]):
                total.store(builder.gep(output, [_I64(g * width + tile * LANES)]))
        return context.get_dummy_value()

    arguments = (weights, start, stride, rows, at, length, sums, to, ahead, ahead_at, count, size, tiles)
    return types.void(*arguments), emit


@intrinsic  # type: ignore[untyped-decorator]
def sum_lanes(typing: Any, values: Any, count: Any) -> Any:
    """The sum of the first `count` of a flat float32 array, `count` a multiple of LANES; always in the same order."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _reduced(_Arguments(context, builder, signature, arguments), 0.0, builder.fadd)

    return types.float32(values, count), emit


@intrinsic  # type: ignore[untyped-decorator]
def max_lanes(typing: Any, values: Any, count: Any) -> Any:
    """The largest of the first `count` of a flat float32 array, NaN left out, at least -3e38; as `sum_lanes`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", other, one), other, one)

        return _reduced(_Arguments(context, builder, signature, arguments), -3e38, larger)

    return types.float32(values, count), emit


def _reduced(a: _Arguments, start: float, combine: Any) -> Any:
    """All vectors into one, lane by lane, and then its halves, quarters and so on."""
    builder, values = a.builder, a.pointer(0, None)
    place = cgutils.alloca_once(builder, _VECTOR)
    builder.store(ir.Constant(_VECTOR, [start] * LANES), place)
    with cgutils.for_range(builder, builder.sdiv(a.values[1], _I64(LANES))) as loop:
        vector = _load(builder, builder.gep(values, [builder.mul(loop.index, _I64(LANES))]))
        builder.store(combine(builder.load(place), vector), place)
    whole, width = builder.load(place), LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))))
            for at in (0, width)
        )
        whole = combine(low, high)
    return builder.extract_element(whole, _I32(0))


def _weighed_sums(
    builder: Any, factors: tuple[Any, Any], rows: Any, ahead: Any, length: Any, width: int, num: int, wide: int
) -> list[list[_Total]]:
    """Sums of the first `wide` vectors of rows of `width` elements, each row times a factor of its own, for each of
    `num` sets of factors, which lie a stride apart.
    """
    factor_at, stride = factors
    totals = [[_Total(builder) for _ in range(wide)] for _ in range(num)]
    with cgutils.for_range(builder, length) as loop:
        row, next_row = (builder.gep(each, [builder.mul(loop.index, _I64(width))]) for each in (rows, ahead))
        loaded = []
        for tile in range(wide):
            loaded.append(_load(builder, builder.gep(row, [_I64(tile * LANES)])))
            _prefetch(builder, builder.gep(next_row, [_I64(tile * LANES)]))
        for g in range(num):
            place = builder.add(builder.mul(stride, _I64(g)), loop.index)
            factor = _spread(builder, builder.load(builder.gep(factor_at, [place])))
            for tile in range(wide):
                totals[g][tile].add(factor, loaded[tile])
    return totals


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


class _Arguments:
    """The arguments of a call, as pointers."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self._context, self.builder, self._types, self.values = context, builder, signature.args, values

    def pointer(self, array: int, offset: int | None) -> Any:
        """To an element of the flat array that is argument `array`; argument `offset` says which, None: the first."""
        data = self._context.make_array(self._types[array])(self._context, self.builder, self.values[array]).data
        return data if offset is None else self.builder.gep(data, [self.values[offset]])


class _Total:
    """A vector of running sums; LLVM keeps it in a register."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._place = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_ZERO, self._place)

    def add(self, factor: Any, values: Any) -> None:
        """Add factor x values."""
        total = self._builder.load(self._place)
        if values.type == _VECTOR:
            total = _multiply_add(self._builder, factor, values, total)
        elif _MULTIPLIES_PAIRS:
            total = _multiply_pairs(self._builder, factor, values, total)
        else:
            for half in (_first_of_pairs, _second_of_pairs):
                total = _multiply_add(self._builder, half(self._builder, factor), half(self._builder, values), total)
        self._builder.store(total, self._place)

    def store(self, pointer: Any) -> None:
        """Write the sums to where a float32 pointer shows."""
        target = self._builder.bitcast(pointer, _VECTOR.as_pointer())
        self._builder.store(self._builder.load(self._place), target, align=4)


def _multiply_add(builder: Any, factor: Any, values: Any, total: Any) -> Any:
    """factor x values + total, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [factor, values, total]
    )


def _multiply_pairs(builder: Any, factor: Any, values: Any, total: Any) -> Any:
    """The same of pairs, as this processor rounds it."""
    numbers = ir.VectorType(_Bfloat16(), 2 * LANES)
    kind = ir.FunctionType(_VECTOR, [_VECTOR, numbers, numbers])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, builder.bitcast(factor, numbers), builder.bitcast(values, numbers)])


def _first_of_pairs(builder: Any, pairs: Any) -> Any:
    """bfloat16 as float32, whose upper half it is."""
    return builder.bitcast(builder.shl(pairs, ir.Constant(_PAIRS, [16] * LANES)), _VECTOR)


def _second_of_pairs(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(pairs, ir.Constant(_PAIRS, [0xFFFF0000] * LANES)), _VECTOR)


def _load(builder: Any, pointer: Any) -> Any:
    """LANES elements."""
    kind = ir.VectorType(pointer.type.pointee, LANES)
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)


def _prefetch(builder: Any, place: Any) -> None:
    """Have LANES elements on their way into the second-level cache."""
    byte = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(place, byte), _I32(0), _I32(2), _I32(1)])


def _spread(builder: Any, value: Any) -> Any:
    """One element in all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
