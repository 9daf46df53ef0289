"""The inline PTX, one function an instruction; in interpret mode each is the jnp operation that it stands for.

XLA's Triton path contracts no multiplication and addition into an fma, and its exp2 and division carry fix-ups for
denormals: without these functions the loops issue half as many instructions again.
"""

import jax.numpy as jnp

from pallas_kernels.launch import inline_ptx, is_interpreted


def fma(a, b, c, shape):
    """a * b + c, each broadcast to `shape`."""
    a, b, c = (jnp.broadcast_to(x, shape) for x in (a, b, c))
    if is_interpreted():
        return a * b + c
    return inline_ptx("fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], jnp.float32)


def exp2(x):
    """2^x to 2 units in the last place."""
    return jnp.exp2(x) if is_interpreted() else inline_ptx("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], jnp.float32)


def reciprocal(x):
    """1 / x to 1 unit in the last place."""
    return 1.0 / x if is_interpreted() else inline_ptx("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], jnp.float32)


def round_to_int8(x):
    """The nearest integer, ties to even, as int8; NaN becomes 0."""
    if is_interpreted():
        return jnp.nan_to_num(jnp.round(x), nan=0.0).astype(jnp.int8)
    # cvt.pack takes two integers and two packed bytes; ptxas fuses it with the conversions before it into two F2IP.
    convert = " ".join(f"cvt.rni.s32.f32 r{i}, ${i + 1};" for i in range(4))
    pack = "cvt.pack.sat.s8.s32.b32 t, r3, r2, 0; cvt.pack.sat.s8.s32.b32 $0, r1, r0, t;"
    return inline_ptx(f"{{ .reg .s32 r<4>, t; {convert} {pack} }}", "=r,r,r,r,r", [x], jnp.int8, pack=4)


def round_to_int16(x):
    """The nearest integer, ties to even, as int16; NaN becomes 0."""
    if is_interpreted():
        return jnp.nan_to_num(jnp.round(x), nan=0.0).astype(jnp.int16)
    return inline_ptx("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], jnp.int32).astype(jnp.int16)
