"""What a warp group of the Hopper kernels computes with: tiles in registers, products of tensor cores, rounding, masks.

This file and launch.py alone know Pallas' Mosaic GPU backend.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import steps
from pallas_kernels.hopper.tiles import GROUP

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
TILE, ROWS, COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def load_vector(ref, layout):
    """A vector, in the layout of a tile's rows or columns."""
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def across(x, shape):
    """A value a row, as a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def down(x, shape):
    """A value a column, as a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def filled(shape, value, layout: Any = TILE):
    """A float32 array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def product(a, b) -> Any:
    """a b, summed in int32."""
    return pl.run_state(lambda total: plgpu.wgmma(total, a, b))(ACC.init(_zeros(a, b)))


def _zeros(a, b):
    """The start of the sums of a b.

    Each is an instruction of its own. As constants they are all one, which the compiler does not know to be 0 where a
    branch lies between two products: it copies it to every register instead of leaving out the addition. It does so
    too where a wait lies between these and the product.
    """
    shape, dtype = (a.shape[0], b.shape[1]), jnp.int32 if a.dtype == jnp.int8 else jnp.float32

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=TILE))
    def zeros(_):
        i32 = ir.IntegerType.get_signless(32)
        kind, signed = (i32, True) if dtype == jnp.int32 else (ir.F32Type.get(), None)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for index in np.ndindex(registers.shape):
            register = llvm.mlir_undef(ir.VectorType.get((2,), i32))
            for i in range(2):
                zero = _instruction(i32, [], "mov.b32 $0, 0;", "=r", unique=True)
                register = vector.insert(zero, register, [], [i])
            registers[index] = llvm.bitcast(ir.VectorType.get((2,), kind), register)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=signed)

    return zeros()  # pyright: ignore[reportCallIssue]


def two_products(first, second, between) -> Any:
    """between(a b of `first`, INT8), done while that of `second` still runs; and the latter. All operands are ready."""

    def run(refs):
        one, two, result = refs
        plgpu.wgmma(one, *first)
        plgpu.wgmma(two, *second)
        result[...] = lax.optimization_barrier(between(plgpu.wgmma_accumulator_load(one, wait_n=1)))

    result = filled((first[0].shape[0], first[1].shape[1]), 0.0)
    start = ACC.init(_zeros(*first)), ACC.init(_zeros(*second)), result
    _, product, result = pl.run_state(run)(start)
    return result, product


def add_product(total, a, b):
    """total + a b, all of it on the tensor cores, waited for."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(ACC.init(total))


def add_two_products(totals, first, second):
    """totals with a b of `first` and of what `second` returns, which is called while the first runs."""

    def run(refs):
        plgpu.wgmma(refs[0], *first)
        plgpu.wgmma(refs[1], *second())

    return pl.run_state(run)(tuple(ACC.init(total) for total in totals))


def load(ref):
    """A 16-bit matrix buffer as a float32 tile."""
    return plgpu.load(ref, layout=TILE).astype(jnp.float32)  # pyright: ignore[reportCallIssue]


def load_turned(ref):
    """The transpose of a 16-bit matrix buffer, as a float32 tile."""
    tile = plgpu.load(turned(ref), layout=plgpu.Layout.WGMMA_TRANSPOSED)  # pyright: ignore[reportCallIssue]
    return plgpu.layout_cast(tile, TILE).astype(jnp.float32)


def add_int8_product(total, left, scale, right):
    """total + left right^T times a scale a row."""
    tile = product(left, turned(right)).astype(jnp.float32)
    return total + tile * across(scale, total.shape)


def turned(ref):
    """The transpose of a matrix buffer: tensor cores read INT8 right operands in no other order."""
    return ref.transpose((1, 0))


def _instruction(kind, values, code, constraints, *, unique=False) -> ir.Value:
    """Inline PTX that computes a value of others; a `unique` one is not merged with its equals."""
    result = llvm.inline_asm(kind, values, code, constraints, has_side_effects=unique)
    assert isinstance(result, ir.Value)
    return result


def round_to_int8(x):
    """The nearest integers as a left operand of INT8 products, swizzled (steps.swizzle16): none leaves its thread."""
    rows, columns = x.shape
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.int8, layout=plgpu.Layout.WGMMA_8BIT)
    convert = " ".join(f"cvt.rni.s32.f32 r{i}, ${i + 1};" for i in range(4))
    pack = "cvt.pack.sat.s8.s32.b32 t, r3, r2, 0; cvt.pack.sat.s8.s32.b32 $0, r1, r0, t;"
    code = f"{{ .reg .s32 r<4>, t; {convert} {pack} }}"

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=kind)
    def pack_quads(_, x):
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        pairs = x.registers.reshape(rows // GROUP, columns // 8, 2)
        quads = np.empty((rows // GROUP, columns // 16, 2), dtype=object)
        for a, b, c in np.ndindex(quads.shape):
            both = pairs[a, 2 * b, c], pairs[a, 2 * b + 1, c]
            values = [vector.extract(pair, [], [i]) for pair in both for i in range(2)]
            word = _instruction(i32, values, code, "=r,f,f,f,f")
            quads[a, b, c] = llvm.bitcast(ir.VectorType.get((4,), i8), word)
        layout = mgpu.WGMMA_LAYOUT_8BIT
        registers = quads.reshape(layout.registers_shape((rows, columns)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return pack_quads(x)  # pyright: ignore[reportCallIssue]


def round_pairs_to_int8(x):
    """The nearest integers as int8, in the order that they are in; NaN becomes 0."""
    code = "{ .reg .s32 a, b, t; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; "
    return _pack_pairs(x, jnp.int8, 16, code + "cvt.pack.sat.s8.s32.b32 t, b, a, 0; cvt.u16.u32 $0, t; }", "=h,f,f")


def round_to_int16(x):
    """The nearest integers, ties to even."""
    code = "{ .reg .s32 a, b; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; cvt.pack.sat.s16.s32 $0, b, a; }"
    return _pack_pairs(x, jnp.int16, 32, code, "=r,f,f")


def _pack_pairs(x, dtype, bits, code, constraints):
    """A tile of two neighbours each made one word of so many bits by inline PTX."""

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=TILE))
    def pack(_, x):
        of_pair, word = ir.IntegerType.get_signless(bits // 2), ir.IntegerType.get_signless(bits)
        registers = np.empty_like(x.registers)
        for index in np.ndindex(registers.shape):
            values = [vector.extract(x.registers[index], [], [i]) for i in range(2)]
            packed = _instruction(word, values, code, constraints)
            registers[index] = llvm.bitcast(ir.VectorType.get((2,), of_pair), packed)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)

    return pack(x)  # pyright: ignore[reportCallIssue]


def first_half(x):
    """The first half of the columns of a tile of GROUP rows, which are registers of their own."""
    rows, columns = x.shape
    kind = plgpu.ShapeDtypeStruct((rows, columns // 2), x.dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=kind)
    def take(_, x):
        shape = mgpu.WGMMA_LAYOUT.registers_shape(kind.shape)
        registers = x.registers.reshape(-1)[: np.prod(shape)].reshape(shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return take(x)  # pyright: ignore[reportCallIssue]


def with_zeros(x):
    """A left operand of INT8 products of GROUP rows, with as many columns of zeros after its own."""
    rows, columns = x.shape
    kind = plgpu.ShapeDtypeStruct((rows, 2 * columns), x.dtype, layout=plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_8BIT,), return_type=kind)
    def append(_, x):
        zero = llvm.mlir_zero(x.registers.flat[0].type)
        registers = np.concatenate([x.registers.reshape(-1), np.full(x.registers.size, zero, dtype=object)])
        registers = registers.reshape(mgpu.WGMMA_LAYOUT_8BIT.registers_shape(kind.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)

    return append(x)  # pyright: ignore[reportCallIssue]


def row_numbers():
    """0 to GROUP - 1, in the layout of a tile's rows."""
    return plgpu.broadcasted_iota(jnp.int32, (GROUP,), 0, layout=ROWS)


def quantize_row(x):
    """A tile of P or dS as int8, and the scale of its rows."""
    top = jnp.maximum(jnp.abs(x).max(axis=1), steps.TINIEST)
    return round_to_int8(x * across(steps.INT8_MAX / top, x.shape)), top * (1 / steps.INT8_MAX)


def hide(x, limit, hidden, *, before=False):
    """x, but `hidden` in the columns past each row's `limit` int32 [rows], or with `before` in those before it.

    Columns are compared as constants with the limit less the thread's own offset. A mask of their numbers would be
    hoisted out of the loop, a register a column, and spill.
    """
    columns = x.shape[1]

    @plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE))
    def select(_, x, limit):
        i32 = ir.IntegerType.get_signless(32)

        def constant(value):
            return arith.constant(i32, ir.IntegerAttr.get(i32, value))

        lane = arith.muli(arith.andi(mgpu.utils.thread_idx(), constant(3)), constant(2))
        limits = [arith.subi(_scalar(register), lane) for register in limit.registers.flat]
        other = arith.constant(x.mlir_dtype, ir.FloatAttr.get(x.mlir_dtype, hidden))
        registers = x.registers.reshape(columns // 8, 2).copy()
        for tile, half in np.ndindex(registers.shape):
            register = registers[tile, half]
            for i in range(2):
                order = arith.CmpIPredicate.sge if before else arith.CmpIPredicate.sle
                counts = arith.cmpi(order, constant(8 * tile + i), limits[half])
                value = arith.select(counts, vector.extract(register, [], [i]), other)
                register = vector.insert(value, register, [], [i])
            registers[tile, half] = register
        return mgpu.FragmentedArray(_registers=registers.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)

    return select(x, limit)  # pyright: ignore[reportCallIssue]


def hide_if(edge, x, limit, hidden, *, before=False):
    """`hide` for tiles where `edge`, which is not known."""
    return lax.cond(edge, lambda x: hide(x, limit, hidden, before=before), lambda x: x, x)


def _scalar(register):
    """The one element of a register."""
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
