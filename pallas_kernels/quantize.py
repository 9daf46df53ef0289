"""Kernels that turn 16- or 32-bit tensors [B, time, N, H] into INT8 [B, N, time, H], its scales and its other order.

One pass each: mean, maximum, rounding and layout together. What is turned ([B, N, H, time], swizzled) is the right
operand of a sum over time. `length` is how many tokens count; the others are written as zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import ptx, steps
from pallas_kernels.launch import call, own_columns, own_rows, whole_head

# Rows of one program. A multiple of every span and block; the work is bound by memory.
ROWS = 128


def compiled(depth):
    """How these kernels are compiled: more warps where a tile of `ROWS` wide heads would not fit their registers."""
    return dict(num_warps=4 if depth <= 128 else 8, num_stages=1)


def _clear_padding(x, length):
    """Zero the rows of this program's tile at and past `length`."""
    rows = pl.program_id(0) * ROWS + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(rows < length, x, 0.0)


def _round_blocks(x, block):
    """INT8 values of a tile with one scale per `block` rows, and that scale for each row."""
    rows, blocks = x.shape[0], x.shape[0] // block
    absmax = jnp.max(steps.magnitude(x), axis=1)
    scale, inverse = steps.scale_and_inverse(jnp.max(absmax.reshape(blocks, block), axis=1))
    inverse = jnp.broadcast_to(inverse[:, None], (blocks, block)).reshape(rows)
    return ptx.round_to_int8(x * inverse[:, None]), scale


def _round_tokens(x, block, repeat_scale):
    """INT8 values of a tile with one scale a row (block=1) or per `block` rows, which may be repeated for each row."""
    if block == 1:
        scale, inverse = steps.scale_and_inverse(jnp.max(steps.magnitude(x), axis=1))
        return ptx.round_to_int8(x * inverse[:, None]), scale
    x_int8, scale = _round_blocks(x, block)
    if not repeat_scale:
        return x_int8, scale
    return x_int8, jnp.broadcast_to(scale[:, None], (x.shape[0] // block, block)).reshape(x.shape[0])


def quantize_tokens(x, mean=None, *, block, length, repeat_scale, factor=1.0, keep_16_bits=False):
    """Q or K as INT8 [B, N, time, H] with one scale a token (block=1), or one per `block` tokens.

    Scales are [B, N, time] with `repeat_scale`, else [B, N, time / block]. Quantises
    factor * (x - mean); mean is [B, N, H]. `keep_16_bits` adds that difference in bfloat16, [B, N, time, H].
    """
    batch, time, heads, depth = x.shape

    def kernel(x_ref, *refs):
        refs = list(refs)
        tile = x_ref[...].astype(jnp.float32)
        if mean is not None:
            tile = tile - refs.pop(0)[...][None, :]
        if length < time:
            tile = _clear_padding(tile, length)
        tile = tile * factor
        int8_ref, scale_ref = refs[:2]
        int8_ref[...], scale_ref[...] = _round_tokens(tile, block, repeat_scale)
        if keep_16_bits:
            refs[2][...] = tile.astype(jnp.bfloat16)

    means = [] if mean is None else [mean]
    repeats = 1 if repeat_scale else block
    shapes = [
        jax.ShapeDtypeStruct((batch, heads, time, depth), jnp.int8),
        jax.ShapeDtypeStruct((batch, heads, time // repeats), jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, time, depth), jnp.bfloat16),
    ]
    specs = [own_rows(ROWS, depth), own_rows(ROWS // repeats), own_rows(ROWS, depth)]
    outputs = 3 if keep_16_bits else 2
    return call(
        kernel,
        "sagebwd_quantize_tokens",
        (time // ROWS, heads, batch),
        [x, *means],
        [own_rows(ROWS, depth, heads_last=True), *map(whole_head, means)],
        shapes[:outputs],
        specs[:outputs],
        **compiled(depth),
    )


def quantize_channels(x, absmax):
    """V as turned INT8 [B, N, H, time] with the scale of its channel's `absmax` [B, N, H]."""
    batch, time, heads, depth = x.shape

    def kernel(x_ref, absmax_ref, int8_ref):
        _, inverse = steps.scale_and_inverse(absmax_ref[...])
        tile = ptx.round_to_int8(x_ref[...].astype(jnp.float32) * inverse[None, :])
        int8_ref[...] = steps.swizzle16(tile.swapaxes(0, 1))

    return call(
        kernel,
        "sagebwd_quantize_channels",
        (time // ROWS, heads, batch),
        [x, absmax],
        [own_rows(ROWS, depth, heads_last=True), whole_head(absmax)],
        jax.ShapeDtypeStruct((batch, heads, depth, time), jnp.int8),
        own_columns(depth, ROWS),
        **compiled(depth),
    )


def quantize_blocks(x, *, block):
    """V as turned INT8 [B, N, H, time] with one scale per `block` tokens, [B, N, time / block]."""
    batch, time, heads, depth = x.shape

    def kernel(x_ref, int8_ref, scale_ref):
        x_int8, scale_ref[...] = _round_blocks(x_ref[...].astype(jnp.float32), block)
        int8_ref[...] = steps.swizzle16(x_int8.swapaxes(0, 1))

    return call(
        kernel,
        "sagebwd_quantize_blocks",
        (time // ROWS, heads, batch),
        [x],
        [own_rows(ROWS, depth, heads_last=True)],
        [
            jax.ShapeDtypeStruct((batch, heads, depth, time), jnp.int8),
            jax.ShapeDtypeStruct((batch, heads, time // block), jnp.float32),
        ],
        [own_columns(depth, ROWS), own_rows(ROWS // block)],
        **compiled(depth),
    )


def turn(x_int8):
    """[B, N, time, H] -> [B, N, H, time], swizzled: the order in which a sum over time reads its right operand."""
    batch, heads, time, depth = x_int8.shape

    def kernel(x_ref, turned_ref):
        turned_ref[...] = steps.swizzle16(x_ref[...].swapaxes(0, 1))

    return call(
        kernel,
        "sagebwd_turn",
        (time // ROWS, heads, batch),
        [x_int8],
        [own_rows(ROWS, depth)],
        jax.ShapeDtypeStruct((batch, heads, depth, time), jnp.int8),
        own_columns(depth, ROWS),
        **compiled(depth),
    )


def quantize_dout(dout, out_int16, out_scale, *, block, int8):
    """delta = rowsum(dO * O) [B, N, time] and, if `int8`, dO as turned INT8 with scales [B, N, time].

    dO has one scale a token (block=1), or one per `block` tokens.

    O is what the forward pass kept of it before it was rounded to 16 bits: int16 [B, time, N, H] with a scale a row.
    """
    batch, time, heads, depth = dout.shape

    def kernel(dout_ref, out_ref, out_scale_ref, delta_ref, *int8_refs):
        tile = dout_ref[...].astype(jnp.float32)
        delta_ref[...] = jnp.sum(tile * out_ref[...].astype(jnp.float32), axis=1) * out_scale_ref[...]
        if int8_refs:
            dout_int8, int8_refs[1][...] = _round_tokens(tile, block, True)
            int8_refs[0][...] = steps.swizzle16(dout_int8.swapaxes(0, 1))

    shapes = [
        jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, depth, time), jnp.int8),
        jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
    ]
    specs = [own_rows(ROWS), own_columns(depth, ROWS), own_rows(ROWS)]
    outputs = 3 if int8 else 1
    return call(
        kernel,
        "sagebwd_quantize_dout",
        (time // ROWS, heads, batch),
        [dout, out_int16, out_scale],
        [own_rows(ROWS, depth, heads_last=True), own_rows(ROWS, depth, heads_last=True), own_rows(ROWS)],
        shapes[:outputs],
        specs[:outputs],
        **compiled(depth),
    )
