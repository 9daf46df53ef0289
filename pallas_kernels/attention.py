"""Forward and backward pass in terms of the kernels: the implementation "triton"."""

import dataclasses
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import steps, tiles
from pallas_kernels.forward import forward as forward_kernel
from pallas_kernels.grad_kv import grad_kv
from pallas_kernels.grad_q import grad_q
from pallas_kernels.hopper import tiles as hopper_tiles
from pallas_kernels.quantize import (
    quantize_blocks,
    quantize_channels,
    quantize_dout,
    quantize_tokens,
    turn,
)
from pallas_kernels.statistics import channel_statistics
from pallas_kernels.statistics import mean_logits as mean_logits_kernel
from sagebwd_jax import _quantize, _segments
from sagebwd_jax._config import CallSpec
from sagebwd_jax._residuals import Residuals


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardOperands:
    """What the products of the backward pass read, in the order and type they read; None what none of them reads."""

    q: jax.Array | None
    k: jax.Array | None
    v: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    # [B, K, 1]: 0, or NaN where a query of the group of heads is not finite.
    poison: jax.Array
    q_scale: jax.Array | None
    k_scale: jax.Array | None
    # What to add to S for P = 2^(S + shift): -lse. Q and dO have scales that vary along the sums of dK and dV; added as
    # logarithms to the shift of a kernel that makes one of these, they cost nothing.
    shift: jax.Array
    shift_dk: jax.Array | None
    shift_dv: jax.Array | None
    dout_scale: jax.Array | None
    q_turned: jax.Array | None
    k_turned: jax.Array | None
    q_16: jax.Array | None
    k_16: jax.Array | None
    dout_turned: jax.Array | None


def _hopper(kernel):
    """A kernel of pallas_kernels/hopper, imported where it runs: not every jaxlib has its backend."""
    return getattr(importlib.import_module(f"pallas_kernels.hopper.{kernel}"), kernel)


def to_16_bits(x):
    """The 16-bit values that 16-bit products read: float32 becomes bfloat16."""
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x


def forward(query, key, value, visibility=None, mean=None, *, spec: CallSpec, keep: bool):
    """O [B, T, N, H], log-sum-exp in base 2 [B, N, T], and the residuals if `keep`; all in canonical form.

    `visibility` (sagebwd_jax/_masks.py) is None for a plain call. A query that sees no key has O = 0 and NO_QUERY.
    `mean` [B, K, H] is what smoothing takes from K, if it is not the mean of these keys; without segments only.
    """
    if mean is None and hopper_tiles.takes_inputs(spec, visibility, query, key):
        keep_16_bits = keep and spec.keeps_16_bits("dq")
        rounded = _Quantized(*_hopper("quantize_inputs")(query, key, value, spec=spec, keep_16_bits=keep_16_bits))
    else:
        rounded = _quantize_inputs(query, key, value, visibility, mean, spec=spec, keep=keep)
    value_16, q_16, k_16 = to_16_bits(value), to_16_bits(query), to_16_bits(key)
    v, v_scale = (rounded.v, rounded.v_scale) if spec.uses_int8("pv") else (value_16, None)
    int8_scores = spec.uses_int8("qk")
    scores = (rounded.q, rounded.k, v, rounded.q_scale, rounded.k_scale) if int8_scores else (q_16, k_16, v, None, None)
    layout = hopper_tiles.find("forward", spec, visibility, query.dtype, query)
    if layout is not None:
        results = _hopper("forward")(*scores, v_scale, spec=spec, layout=layout, out_dtype=query.dtype, keep_out=keep)
    else:
        tile = tiles.forward_tile(spec, query.shape[-1], visibility)
        results = forward_kernel(
            *scores, v_scale, spec=spec, tile=tile, out_dtype=query.dtype, keep_out=keep, visibility=visibility
        )
    out, lse, *kept = results
    if not keep:
        return out, lse, None
    residuals = Residuals(
        q_int8=rounded.q,
        q_scale=rounded.q_scale,
        q_16=q_16 if spec.keeps_16_bits("qk", "dk") else None,
        k_int8=rounded.k if spec.uses_int8("qk", "dq") else None,
        k_scale=rounded.k_scale if spec.uses_int8("qk", "dq") else None,
        k_raw_16=k_16 if spec.keeps_16_bits("qk") else None,
        k_smooth_16=rounded.k_smooth_16,
        value_16=value_16,
        out_int16=kept[0],
        out_scale=kept[1],
        lse=lse,
    )
    return out, lse, residuals


class _Quantized(NamedTuple):
    """Q, K and V in INT8 with their scales, and K less its mean in 16 bits; None for what no product reads."""

    q: jax.Array | None
    q_scale: jax.Array | None
    k: jax.Array | None
    k_scale: jax.Array | None
    v: jax.Array | None
    v_scale: jax.Array | None
    k_smooth_16: jax.Array | None = None


def _quantize_inputs(query, key, value, visibility, mean, *, spec: CallSpec, keep: bool) -> _Quantized:
    """Q, K and V as `forward` and, if `keep`, the backward pass read them, by a kernel for each."""
    config = spec.config
    q_int8 = q_scale = k_int8 = k_scale = v = v_scale = k_smooth_16 = None
    if spec.uses_int8("qk") or (keep and spec.uses_int8("dk")):
        block = 1 if config.query_scale == "token" else config.block_q
        factor = spec.scale * steps.LOG2_E
        q_int8, q_scale = quantize_tokens(
            query, block=block, length=spec.query_length, repeat_scale=True, factor=factor
        )
    uses_smooth = spec.uses_int8("qk") or keep
    by_channel = spec.uses_int8("pv") and config.value_scale == "channel" and not spec.packed
    needs_mean, absmax = uses_smooth and config.smooth_k and mean is None, None
    smooth_key = key
    if needs_mean and visibility is not None and visibility.key_segments is not None:
        means = _segments.key_means(key, visibility.key_segments)
        smooth_key, needs_mean = key.astype(jnp.float32) - means, False
    if needs_mean or by_channel:
        own_mean, absmax = channel_statistics(
            key if needs_mean else None, value if by_channel else None, length=spec.key_length
        )
        mean = own_mean if mean is None else mean
    if uses_smooth:
        block = 1 if config.key_scale == "token" else config.block_k
        k_int8, k_scale, *rest = quantize_tokens(
            smooth_key,
            mean,
            block=block,
            length=spec.key_length,
            repeat_scale=False,
            keep_16_bits=keep and spec.keeps_16_bits("dq"),
        )
        k_smooth_16 = rest[0] if rest else None
    if spec.uses_int8("pv") and visibility is not None and spec.packed:
        v_int8, v_scale = _quantize.round_documents(value, visibility.query_segments, visibility.key_segments)
        v = turn(v_int8)
    elif by_channel:
        v, v_scale = quantize_channels(value, absmax), steps.scale_and_inverse(absmax)[0]
    elif spec.uses_int8("pv"):
        v, v_scale = quantize_blocks(value, block=config.pv_span)
    return _Quantized(q_int8, q_scale, k_int8, k_scale, v, v_scale, k_smooth_16)


def mean_logits(query, key, visibility=None, *, spec: CallSpec):
    """What smoothing takes from the logits, scale * q . mean(k) [B, N, T], and mean(k) [B, K, H].

    Where there are segments, mean(k) is that of each query's segment, [B, T, K, H].
    """
    if visibility is not None and visibility.key_segments is not None:
        means = _segments.key_means(key, visibility.key_segments)
        mean = _segments.of_queries(means, visibility.query_segments)
    else:
        mean, _ = channel_statistics(key, None, length=spec.key_length)
    return mean_logits_kernel(query, mean, scale=spec.scale), mean


def backward(residuals: Residuals, dout, dlse, visibility=None, *, spec: CallSpec, want_dbias: bool = False):
    """dQ, dK and dV of the cotangents of O and, unless None, of the log-sum-exp in base 2; with `want_dbias` dbias too.

    dbias, float32 in the shape of visibility.bias, costs the float32 scores [B, N, T, S].
    """
    r = residuals
    int8_dv = spec.uses_int8("dv")
    block = 1 if spec.config.dout_scale == "token" else spec.config.block_q
    delta, *quantized = quantize_dout(dout, r.out_int16, r.out_scale, block=block, int8=int8_dv)
    if dlse is not None:
        delta = delta - dlse * steps.LOG2_E
    kv_heads = r.value_16.shape[2]
    finite = (delta * 0 + r.lse * 0).reshape(delta.shape[0], kv_heads, -1)
    int8_scores, int8_dk, int8_dq = (spec.uses_int8(x) for x in ("qk", "dk", "dq"))

    def shift(scale):
        return jnp.where(scale == 0, -steps.NO_QUERY, jnp.log2(scale) - r.lse)

    ops = BackwardOperands(
        q=r.q_int8 if int8_scores else r.q_16,
        k=r.k_int8 if int8_scores else r.k_raw_16,
        v=r.value_16,
        dout=to_16_bits(dout),
        lse=r.lse,
        delta=delta,
        poison=finite.sum(-1, keepdims=True),
        q_scale=r.q_scale,
        k_scale=r.k_scale,
        shift=-r.lse,
        shift_dk=shift(r.q_scale) if int8_dk else None,
        shift_dv=shift(quantized[1]) if int8_dv else None,
        dout_scale=quantized[1] if int8_dv else None,
        q_turned=turn(r.q_int8) if int8_dk else None,
        k_turned=turn(r.k_int8) if int8_dq else None,
        q_16=r.q_16,
        k_16=r.k_smooth_16,
        dout_turned=quantized[0] if int8_dv else None,
    )
    layout = hopper_tiles.find("grad_qkv", spec, visibility, dout.dtype, ops.v, ops.dout)
    if layout is not None:
        return _hopper("grad_qkv")(ops, spec=spec, layout=layout, out_dtype=dout.dtype)
    dk, dv = _grad_kv(ops, visibility, spec=spec, dtype=dout.dtype)
    results = _grad_q(ops, visibility, spec=spec, dtype=dout.dtype, keep_ds=want_dbias)
    if visibility is None or not want_dbias:
        return results, dk, dv
    dq, ds = results
    return dq, dk, dv, _sum_to(ds, visibility.bias.shape)


def _grad_kv(ops: BackwardOperands, visibility, *, spec: CallSpec, dtype):
    """dK and dV, by one kernel or two."""

    def run(kernel, tile, **want):
        layout = hopper_tiles.find(kernel, spec, visibility, dtype, ops.v, ops.dout)
        if layout is not None:
            return _hopper("grad_kv")(ops, spec=spec, layout=layout, out_dtype=dtype, **want)
        return grad_kv(ops, spec=spec, tile=tile, out_dtype=dtype, visibility=visibility, **want)

    joint, tile_k, tile_v = tiles.grad_kv_tiles(spec, ops.v.shape[-1], visibility)
    if joint:
        return run("grad_kv_16", tile_k, want_dk=True, want_dv=True)
    [dv] = run("grad_v", tile_v, want_dk=False, want_dv=True)
    [dk] = run("grad_k", tile_k, want_dk=True, want_dv=False)
    return dk, dv


def _grad_q(ops: BackwardOperands, visibility, *, spec: CallSpec, dtype, keep_ds):
    """dQ, and with `keep_ds` dS."""
    kernel = "grad_q" if spec.uses_int8("dq") else "grad_q_16"
    layout = hopper_tiles.find(kernel, spec, visibility, dtype, ops.v, ops.dout)
    if layout is not None:
        return _hopper("grad_q")(ops, spec=spec, layout=layout, out_dtype=dtype)
    tile = tiles.grad_q_tile(spec, ops.v.shape[-1], visibility)
    return grad_q(ops, spec=spec, tile=tile, out_dtype=dtype, visibility=visibility, keep_ds=keep_ds)


def _sum_to(x, shape):
    """The sum over the axes that are 1 in `shape`."""
    axes = [axis for axis, (size, wanted) in enumerate(zip(x.shape, shape, strict=True)) if size != wanted]
    return x.sum(axes, keepdims=True)
