"""The inner loops of attention, as vectors of LANES float32 in registers.

Numba vectorizes plain loops well, but keeps no sums in registers across them; these two loops are where attention
spends its time, so they are written as LLVM instructions. The vectors are LLVM's own, of one width on every processor:
it splits them where the registers are narrower. Each sum is taken in the order of its terms, one fused multiply-add
a term.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_columns(
    typing: Any, vectors: Any, stride: Any, columns: Any, at: Any, sums: Any, to: Any, to_stride: Any,
    count: Any, size: Any, block: Any,
) -> Any:  # fmt: skip
    """sums[to + g x to_stride + p] = sum over d of vectors[g x stride + d] x columns[at + d x block + p].

    For g below `count` and p below `block`, d below `size`, which are constants; `block` is a multiple of LANES. The
    arrays are flat.
    """
    num, length, width = (literal.literal_value for literal in (count, size, block))
    wide = width // LANES

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a = _Arguments(context, builder, signature, arguments)
        vector, column, output = a.pointer(0, None), a.pointer(2, 3), a.pointer(4, 5)
        totals = [[_Total(builder) for _ in range(wide)] for _ in range(num)]
        with cgutils.for_range(builder, _I64(length)) as loop:
            row = builder.gep(column, [builder.mul(loop.index, _I64(width))])
            loaded = [_load(builder, builder.gep(row, [_I64(tile * LANES)])) for tile in range(wide)]
            for g in range(num):
                place = builder.add(builder.mul(arguments[1], _I64(g)), loop.index)
                factor = _spread(builder, builder.load(builder.gep(vector, [place])))
                for tile in range(wide):
                    totals[g][tile].add(factor, loaded[tile])
        for g in range(num):
            for tile in range(wide):
                place = builder.add(builder.mul(arguments[6], _I64(g)), _I64(tile * LANES))
                totals[g][tile].store(builder.gep(output, [place]))
        return context.get_dummy_value()

    arguments = (vectors, stride, columns, at, sums, to, to_stride, count, size, block)
    return types.void(*arguments), emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh_rows(
    typing: Any, weights: Any, start: Any, stride: Any, rows: Any, at: Any, length: Any, sums: Any, to: Any,
    count: Any, size: Any, tiles: Any,
) -> Any:  # fmt: skip
    """sums[to + g x size + d] = sum over p of weights[start + g x stride + p] x rows[at + p x size + d].

    For g below `count` and d below `tiles` x LANES, p below `length`; `count`, `size` and `tiles` are constants. The
    arrays are flat.
    """
    num, width, wide = (literal.literal_value for literal in (count, size, tiles))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a = _Arguments(context, builder, signature, arguments)
        weight, values, output = a.pointer(0, 1), a.pointer(3, 4), a.pointer(6, 7)
        totals = [[_Total(builder) for _ in range(wide)] for _ in range(num)]
        with cgutils.for_range(builder, arguments[5]) as loop:
            row = builder.gep(values, [builder.mul(loop.index, _I64(width))])
            loaded = [_load(builder, builder.gep(row, [_I64(tile * LANES)])) for tile in range(wide)]
            for g in range(num):
                place = builder.add(builder.mul(arguments[2], _I64(g)), loop.index)
                factor = _spread(builder, builder.load(builder.gep(weight, [place])))
                for tile in range(wide):
                    totals[g][tile].add(factor, loaded[tile])
        for g in range(num):
            for tile in range(wide):
                totals[g][tile].store(builder.gep(output, [_I64(g * width + tile * LANES)]))
        return context.get_dummy_value()

    arguments = (weights, start, stride, rows, at, length, sums, to, count, size, tiles)
    return types.void(*arguments), emit


class _Arguments:
    """The arguments of a call, as pointers."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self._context, self._builder, self._types, self._values = context, builder, signature.args, values

    def pointer(self, array: int, offset: int | None) -> Any:
        """To an element of the flat array that is argument `array`; `offset` is the argument that says which."""
        kind = self._types[array]
        data = self._context.make_array(kind)(self._context, self._builder, value=self._values[array]).data
        return data if offset is None else self._builder.gep(data, [self._values[offset]])


class _Total:
    """A vector of running sums; LLVM keeps it in a register."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._place = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_ZERO, self._place)

    def add(self, factor: Any, values: Any) -> None:
        """Add factor x values, rounded once."""
        function = cgutils.get_or_insert_function(
            self._builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )
        total = self._builder.load(self._place)
        self._builder.store(self._builder.call(function, [factor, values, total]), self._place)

    def store(self, pointer: Any) -> None:
        """Write the sums to where a float32 pointer shows."""
        target = self._builder.bitcast(pointer, _VECTOR.as_pointer())
        self._builder.store(self._builder.load(self._place), target, align=4)


def _load(builder: Any, pointer: Any) -> Any:
    """LANES stored numbers as float32: bfloat16 is stored as its bits, the upper half of a float32's."""
    if pointer.type.pointee == _F32:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    bits = builder.load(builder.bitcast(pointer, ir.VectorType(_I16, LANES).as_pointer()), align=2)
    wide = ir.VectorType(_I32, LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * LANES)), _VECTOR)


def _spread(builder: Any, value: Any) -> Any:
    """One float32 in all lanes."""
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
