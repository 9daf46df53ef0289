"""The two oracles: exact attention in float32, and the quantised algorithm written out densely.

Nothing here is fast or blockwise, and nothing here is shared with the implementations but the config: every score is in
memory, so that each line can be checked against the paper (arXiv 2603.02170, algorithms 1 and 2) by eye.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sagebwd_jax._config import SageConfig

LOG2_E = math.log2(math.e)


class Attended(NamedTuple):
    """Everything that one forward and backward pass makes, in float32."""

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    dq: Float[Array, "B T N H"]
    dk: Float[Array, "B S K H"]
    dv: Float[Array, "B S K H"]
    # In the shape of the bias, None without one.
    dbias: Float[Array, "..."] | None = None


def exact_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
    **masks: Any,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """softmax(scale Q K^T + bias) V and its log-sum-exp, in float32 whatever the inputs are.

    `masks` are the arguments of `visible_scores`. A query that sees no key gets 0 and -inf. `jax.vjp` of this is the
    oracle of the gradients.
    """
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    visible = visible_scores(q, k, bias=bias, **masks)
    if bias is not None:
        logits = logits + _added(bias)
    sees = visible.any(-1, keepdims=True)
    logits = jnp.where(visible, logits, jnp.where(sees, -jnp.inf, 0.0))
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.where(visible, jnp.exp(logits - lse), 0.0)
    lse = jnp.where(sees, lse, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), lse[..., 0].swapaxes(1, 2)


def exact_attention_and_grads(query, key, value, dout, *, bias=None, scale=None, **masks) -> Attended:
    """`exact_attention` and the gradients of sum(dout * out)."""
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))

    def attend(q, k, v, bias):
        return exact_attention(q, k, v, bias=bias, scale=scale, **masks)

    (out, lse), vjp = jax.vjp(attend, q, k, v, bias)
    return Attended(out, lse, *vjp((dout.astype(jnp.float32), jnp.zeros_like(lse))))


def visible_scores(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    is_causal: bool = False,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
) -> Bool[Array, "b n T S"]:
    """Which scores count. All conditions hold at once:

    causal: j <= i; window (left, right): i - left <= j <= i + right; lengths: i and j are below theirs; segments: equal
    ids; mask: True; bias: above -1e20, and above its type's least number.
    """
    queries, keys = query.shape[1], key.shape[1]
    i, j = jnp.arange(queries)[None, None, :, None], jnp.arange(keys)[None, None, None, :]
    seen = jnp.ones((1, 1, queries, keys), bool)
    if is_causal:
        seen = seen & (j <= i)
    if local_window_size is not None:
        pair = isinstance(local_window_size, tuple)
        left, right = local_window_size if pair else (local_window_size, local_window_size)
        seen = seen & (j >= i - left) & (j <= i + right)
    if query_seq_lengths is not None:
        seen = seen & (i < query_seq_lengths[:, None, None, None])
    if key_value_seq_lengths is not None:
        seen = seen & (j < key_value_seq_lengths[:, None, None, None])
    if query_segment_ids is not None and key_value_segment_ids is not None:
        seen = seen & (query_segment_ids[:, None, :, None] == key_value_segment_ids[:, None, None, :])
    if mask is not None:
        seen = seen & _four_axes(mask)
    return seen if bias is None else seen & ~_hides(_four_axes(bias))


def _four_axes(x):
    """Mask or bias with the axes [b, n, t, s] that broadcasting would add."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _added(bias):
    """What a bias adds to the logits that it does not hide, float32."""
    bias = _four_axes(bias)
    return jnp.where(_hides(bias), 0.0, bias.astype(jnp.float32))


def _hides(bias):
    """Where a bias stands for a mask."""
    # In float32, as float16 has no -1e20.
    return (bias.astype(jnp.float32) <= -1e20) | (bias == jnp.finfo(bias.dtype).min)


def mean_keys(k: Float[Array, "B S K H"], together: Bool[Array, "B S S"]) -> Float[Array, "B S K H"]:
    """What smoothing takes from each key: the mean of the keys it is together with; 0 for padding."""
    count = jnp.maximum(together.sum(-1, dtype=jnp.float32), 1)
    return _product("bst,btnh->bsnh", together, k) / count[..., None, None]


def keys_together(query, key, masks) -> Bool[Array, "B S S"]:
    """Which keys are smoothed by one mean: those of a segment that are not padding.

    Padding is what lengths, segments, or a mask that is the same for all heads and queries (or keys), show to nobody.
    """
    mask, batch = masks.get("mask"), key.shape[0]
    kept = {name: x for name, x in masks.items() if name not in ("is_causal", "local_window_size", "mask", "bias")}
    if mask is not None:
        mask = _four_axes(mask)
        kept |= dict(mask=mask) if mask.shape[1] == 1 and 1 in mask.shape[2:] else {}
    if not any(x is not None for x in kept.values()):
        return jnp.ones((batch, key.shape[1], key.shape[1]), bool)
    counts = jnp.broadcast_to(visible_scores(query, key, **kept).any(2)[:, 0], key.shape[:2])
    ids = masks.get("key_value_segment_ids")
    same = True if ids is None else ids[:, :, None] == ids[:, None, :]
    return counts[:, :, None] & counts[:, None, :] & same


def quantized_attention_and_grads(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    *,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
    config: SageConfig | None = None,
    **masks: Any,
) -> Attended:
    """What SageBwd computes: every value that an INT8 product reads is rounded to its grid, the sums are in float32.

    `masks` are the arguments of `visible_scores`. What is padding (`keys_together`) is zero before anything else.
    Differs from the paper where `SageConfig` says so, and in delta, which uses O before it is rounded to 16 bits.
    """
    config = (SageConfig() if config is None else config).at_depth(query.shape[-1])
    packed = masks.get("query_segment_ids") is not None
    config = config.for_documents() if packed else config
    groups = query.shape[2] // key.shape[2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    visible = visible_scores(query, key, bias=bias, **masks)
    sees = visible.any(-1, keepdims=True)
    together = keys_together(query, key, masks)
    padding = ~together.any(-1)[:, :, None, None]
    key, value = (jnp.where(padding, jnp.zeros((), x.dtype), x) for x in (key, value))
    mean = mean_keys(key, together)
    # Of each channel, over the keys that a key is with; the same for all of a head unless documents are packed.
    largest = jnp.abs(value).max(1, keepdims=True)
    if packed:
        largest = jnp.where(together[..., None, None], jnp.abs(value)[:, None], 0).max(2)
    seen_by_a_head = jnp.broadcast_to(visible, (key.shape[0], *visible.shape[1:])).any(1)
    # [B, N, time, H] from here on.
    q, k, v, do, mean, largest = (
        x.astype(jnp.float32).swapaxes(1, 2) for x in (query, key, value, dout, mean, largest)
    )
    q16, k16, v16, do16 = (_round_to_16_bits(x, query.dtype) for x in (q, k, v, do))
    k, v, k16, v16, mean, largest = (jnp.repeat(x, groups, axis=1) for x in (k, v, k16, v16, mean, largest))
    k_smooth = k - mean if config.smooth_k else k

    # Q takes the logits' scale in base 2 before it is rounded; dK gives log2(e) back.
    q_int8, q_scale = _quantize_rows(q * (scale * LOG2_E), config.query_scale, config.block_q)
    k_int8, k_scale = _quantize_rows(k_smooth, config.key_scale, config.block_k)
    if "qk" in config.sixteen_bit:
        s = _product("bnth,bnsh->bnts", q16, k16) * (scale * LOG2_E)
    else:
        s = _product("bnth,bnsh->bnts", q_int8, k_int8) * q_scale * k_scale.swapaxes(2, 3)
    if bias is not None:
        s = s + _added(bias) * LOG2_E
    # A row that sees nothing has any finite log-sum-exp here, and P = 0.
    s = jnp.where(visible, s, jnp.where(sees, -jnp.inf, 0.0))
    lse = _logsumexp2(s)
    p = jnp.where(visible, jnp.exp2(s - lse), 0.0)

    out = _product("bnts,bnsh->bnth", *_operands_of_out(p, v, v16, largest, query.dtype, config))
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
        # All keys that a query sees have one mean.
        any_key = jnp.argmax(seen_by_a_head, axis=-1)
        lse = lse + scale * (q * jnp.take_along_axis(mean, any_key[:, None, :, None], axis=2)).sum(-1, keepdims=True)
    lse = jnp.where(sees, lse, -jnp.inf)
    dbias = None if bias is None else _sum_to(ds, bias.shape)
    dk, dv = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    out, lse, dq, dk, dv = (x.swapaxes(1, 2) for x in (out, lse[..., 0], dq, dk, dv))
    return Attended(out, lse, dq, dk, dv, dbias)


def _sum_to(x, shape):
    """The sum of [B, N, T, S] over the axes that broadcasting added to `shape`."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    return x.sum([axis for axis in range(4) if full[axis] == 1], keepdims=True).reshape(shape)


def _operands_of_out(p, v, v16, largest, dtype, config):
    """P and V as the product P V reads them."""
    if "pv" in config.sixteen_bit:
        # The kernel rounds P relative to the row's largest entry in the tile, as in INT8; only the grid is finer.
        tiles = _tiles(p, 3, config.pv_span)
        top = jnp.maximum(tiles.max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        return _untile(_round_to_16_bits(tiles / top, dtype) * top, 3, p.shape[3]), v16
    if config.value_scale == "block":
        return _round_rows(p, config.pv_span), _round_blocks(v, config.pv_span)
    v_int8, v_scale = _round_by(v, largest)
    return _round_rows(p, config.pv_span), v_int8 * v_scale


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
    return _round_by(x, jnp.max(jnp.abs(x), axis=axis, keepdims=True))


def _round_by(x, largest):
    """The same with the largest magnitude of those that share a scale."""
    scale = largest / 127
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
