"""The two oracles: exact attention in float32, and the quantised algorithm written out densely.

Nothing here is fast or blockwise, and nothing here is shared with the implementations but the config: every score is in
memory, so that each line can be checked against the paper (arXiv 2603.02170, algorithms 1 and 2) by eye.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sagebwd_jax._config import SageConfig

LOG2_E = math.log2(math.e)


class Attended(NamedTuple):
    """Everything that one forward and backward pass makes, in float32."""

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    dq: Float[Array, "B T N H"]
    dk: Float[Array, "B S K H"]
    dv: Float[Array, "B S K H"]


def exact_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """softmax(scale Q K^T) V and its log-sum-exp, in float32 whatever the inputs are.

    Causal is top-left: query i sees keys 0..i. A query that sees no key gets 0. `jax.vjp` of this is the oracle of the
    gradients.
    """
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    visible = _visible(q.shape[1], k.shape[1], is_causal)
    lse = jax.nn.logsumexp(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
    p = jnp.where(visible, jnp.exp(logits - lse), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), lse[..., 0].swapaxes(1, 2)


def exact_attention_and_grads(query, key, value, dout, *, is_causal=False, scale=None) -> Attended:
    """`exact_attention` and the gradients of sum(dout * out)."""
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    (out, lse), vjp = jax.vjp(lambda *x: exact_attention(*x, is_causal=is_causal, scale=scale), q, k, v)
    return Attended(out, lse, *vjp((dout.astype(jnp.float32), jnp.zeros_like(lse))))


def quantized_attention_and_grads(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    config: SageConfig | None = None,
) -> Attended:
    """What SageBwd computes: every value that an INT8 product reads is rounded to its grid, the sums are in float32.

    Differs from the paper where `SageConfig` says so, and in delta, which uses O before it is rounded to 16 bits.
    """
    config = SageConfig() if config is None else config
    groups = query.shape[2] // key.shape[2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # [B, N, time, H] from here on.
    q, k, v, do = (x.astype(jnp.float32).swapaxes(1, 2) for x in (query, key, value, dout))
    q16, k16, v16, do16 = (_round_to_16_bits(x, query.dtype) for x in (q, k, v, do))
    k, v, k16, v16 = (jnp.repeat(x, groups, axis=1) for x in (k, v, k16, v16))
    k_smooth = k - k.mean(2, keepdims=True) if config.smooth_k else k

    # Q takes the logits' scale in base 2 before it is rounded; dK gives log2(e) back.
    q_int8, q_scale = _quantize_rows(q * (scale * LOG2_E), config.query_scale, config.block_q)
    k_int8, k_scale = _quantize_rows(k_smooth, config.key_scale, config.block_k)
    if "qk" in config.sixteen_bit:
        s = _product("bnth,bnsh->bnts", q16, k16) * (scale * LOG2_E)
    else:
        s = _product("bnth,bnsh->bnts", q_int8, k_int8) * q_scale * k_scale.swapaxes(2, 3)
    visible = _visible(q.shape[2], k.shape[2], is_causal)
    s = jnp.where(visible, s, -jnp.inf)
    lse = _logsumexp2(s)
    p = jnp.exp2(s - lse)

    out = _product("bnts,bnsh->bnth", *_operands_of_out(p, v, v16, query.dtype, config))
    delta = jnp.sum(do * out, axis=-1, keepdims=True)
    ds = p * (_product("bnth,bnsh->bnts", do16, v16) - delta)

    if "dv" in config.sixteen_bit:
        dv = _product("bnts,bnth->bnsh", _round_to_16_bits(p, query.dtype), do16)
    else:
        # A scale that varies along the sum is folded into the other operand before that is rounded.
        do_int8, do_scale = _quantize_rows(do, config.dout_scale, config.block_q)
        p_rounded = _round_rows((p * do_scale).swapaxes(2, 3), config.dv_span, _tile_rows(config, config.block_k))
        dv = _product("bnst,bnth->bnsh", p_rounded, do_int8)
    if "dq" in config.sixteen_bit:
        dq = scale * _product("bnts,bnsh->bnth", _round_to_bfloat16(ds), _round_to_bfloat16(k_smooth))
    else:
        ds_rounded = _round_rows(ds * k_scale.swapaxes(2, 3), config.dq_span, _tile_rows(config, config.block_q))
        dq = scale * _product("bnts,bnsh->bnth", ds_rounded, k_int8)
    if "dk" in config.sixteen_bit:
        dk = scale * _product("bnts,bnth->bnsh", _round_to_bfloat16(ds), _round_to_bfloat16(q16))
    else:
        ds_rounded = _round_rows((ds * q_scale).swapaxes(2, 3), config.dk_span, _tile_rows(config, config.block_k))
        dk = _product("bnst,bnth->bnsh", ds_rounded, q_int8) / LOG2_E

    lse = lse / LOG2_E
    if config.smooth_k and "qk" not in config.sixteen_bit:
        lse = lse + scale * _product("bnth,bnsh->bnts", q, k.mean(2, keepdims=True))
    dk, dv = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    return Attended(*(x.swapaxes(1, 2) for x in (out, lse[..., 0], dq, dk, dv)))


def _operands_of_out(p, v, v16, dtype, config):
    """P and V as the product P V reads them."""
    if "pv" in config.sixteen_bit:
        # The kernel rounds P relative to the row's largest entry in the tile, as in INT8; only the grid is finer.
        tiles = _tiles(p, 3, config.pv_span)
        top = jnp.maximum(tiles.max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        return _untile(_round_to_16_bits(tiles / top, dtype) * top, 3, p.shape[3]), v16
    if config.value_scale == "block":
        return _round_rows(p, config.pv_span), _round_blocks(v, config.pv_span)
    v_int8, v_scale = _quantize(v, axis=2)
    return _round_rows(p, config.pv_span), v_int8 * v_scale


def _visible(query_length, key_length, is_causal):
    """[T, S]: whether query t sees key s."""
    rows, cols = jnp.arange(query_length)[:, None], jnp.arange(key_length)[None, :]
    return rows >= cols if is_causal else jnp.ones((query_length, key_length), bool)


def _product(axes, a, b):
    """One matrix product with float32 sums."""
    return jnp.einsum(axes, a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def _logsumexp2(s):
    """log2(sum(2^s)) over the last axis, kept."""
    top = s.max(-1, keepdims=True)
    return top + jnp.log2(jnp.exp2(s - top).sum(-1, keepdims=True))


def _round_to_16_bits(x, dtype):
    """float32 values as a 16-bit product reads them: as bfloat16, or as float16 where that is the inputs' dtype."""
    # Not astype and back, which XLA may leave out.
    return jax.lax.reduce_precision(x, 5, 10) if dtype == jnp.float16 else _round_to_bfloat16(x)


def _round_to_bfloat16(x):
    """float32 values rounded to bfloat16."""
    return jax.lax.reduce_precision(x, 8, 7)


def _quantize(x, axis) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """Symmetric INT8 with scale absmax/127 over `axis`, both as float32; zeros have scale 0."""
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)), scale


def _tiles(x, axis, span):
    """Cut `axis` into [tiles, span]; the last tile is filled up with zeros."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % span)
    x = jnp.pad(x, pad)
    return x.reshape(*x.shape[:axis], x.shape[axis] // span, span, *x.shape[axis + 1 :])


def _untile(x, axis, length):
    """Undo `_tiles`."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _quantize_rows(x, granularity, block):
    """Q or K [B, N, time, H] to INT8 and its scale [B, N, time, 1]."""
    if granularity == "token":
        return _quantize(x, axis=3)
    x_int8, scale = _quantize(_tiles(x, 2, block), axis=(3, 4))
    scale = jnp.broadcast_to(scale, (*x_int8.shape[:4], 1))
    return _untile(x_int8, 2, x.shape[2]), _untile(scale, 2, x.shape[2])


def _round_blocks(x, block):
    """[B, N, time, H] rounded to INT8 with one scale per `block` tokens."""
    x_int8, scale = _quantize(_tiles(x, 2, block), axis=(3, 4))
    return _untile(x_int8 * scale, 2, x.shape[2])


def _tile_rows(config, block):
    """Rows of P or dS that share a scale."""
    return block if config.grad_scale == "tile" else 1


def _round_rows(x, span, rows=1):
    """[B, N, rows, cols] rounded to INT8 with one scale per `rows` x `span`."""
    tiles = _tiles(_tiles(x, 3, span), 2, rows)
    x_int8, scale = _quantize(tiles, axis=(3, 5))
    return _untile(_untile(x_int8 * scale, 2, x.shape[2]), 3, x.shape[3])
