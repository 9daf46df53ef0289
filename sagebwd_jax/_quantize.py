"""Smoothing and symmetric INT8 quantisation in plain JAX: what pallas_kernels/quantize.py does, for other platforms.

Tensors are in canonical form: [B, time, N, H] comes in, INT8 [B, N, time, H] goes out, time a multiple of every block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels import steps
from sagebwd_jax import _segments


def key_mean(key: Float[Array, "B S K H"], length: int) -> Float32[Array, "B K H"]:
    """The mean key of each head over its first `length` keys; what follows them is zero."""
    return key.astype(jnp.float32).sum(1) / length


def quantize_tokens(
    x: Float[Array, "B time N H"], *, block: int, length: int, factor: float = 1.0
) -> tuple[Int8[Array, "B N time H"], Float32[Array, "B N scales"]]:
    """factor * x as INT8 with one scale a token (block=1) or per `block` tokens; zeros past `length`."""
    x = factor * clear_padding(x.astype(jnp.float32), length).swapaxes(1, 2)
    x_int8, scale = round_blocks(x, block)
    return x_int8, scale


def clear_padding(x, length):
    """Zero the tokens of [B, time, N, H] at and past `length`."""
    return x if length == x.shape[1] else x.at[:, length:].set(0)


def round_blocks(x, block):
    """[B, N, time, H] as INT8, and one scale per `block` tokens [B, N, time / block]."""
    blocks = x.reshape(*x.shape[:2], x.shape[2] // block, block, x.shape[3])
    scale, inverse = steps.scale_and_inverse(steps.magnitude(blocks).max((3, 4)))
    return round_to_int8(blocks * inverse[..., None, None]).reshape(x.shape), scale


def round_channels(x):
    """[B, N, time, H] as INT8, and one scale a channel [B, N, H]."""
    scale, inverse = steps.scale_and_inverse(steps.magnitude(x).max(2))
    return round_to_int8(x * inverse[:, :, None]), scale


def round_documents(value, query_segments, key_segments):
    """V as INT8 [B, K, S, H], each channel by its document's largest value, and each query's scales [B, T, K, H]."""
    scale, inverse = steps.scale_and_inverse(_segments.largest_values(value, key_segments))
    v_int8 = round_to_int8(value.astype(jnp.float32) * inverse).swapaxes(1, 2)
    return v_int8, _segments.of_queries(scale, query_segments)


def round_rows(x, rows: int):
    """A tile of P or dS [..., rows, span] as INT8, and its scale [..., rows]: one a row, or one per `rows` rows."""
    top = jnp.maximum(steps.magnitude(x).max(-1), steps.TINIEST)
    if rows > 1:
        blocks = top.reshape(*top.shape[:-1], top.shape[-1] // rows, rows)
        top = jnp.repeat(blocks.max(-1), rows, axis=-1)
    return round_to_int8(x * (steps.INT8_MAX / top)[..., None]), top * (1 / steps.INT8_MAX)


def round_to_int8(x):
    """The nearest integer, ties to even; NaN becomes 0, its scale is NaN."""
    return jnp.nan_to_num(jnp.round(x), nan=0.0).astype(jnp.int8)


def round_to_int16_rows(x):
    """[..., H] as int16, and one scale a row: O for the backward pass."""
    scale, inverse = steps.scale_and_inverse(steps.magnitude(x).max(-1), steps.INT16_MAX)
    return jnp.nan_to_num(jnp.round(x * inverse[..., None]), nan=0.0).astype(jnp.int16), scale
