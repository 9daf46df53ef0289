"""The implementation "xla": the algorithm in plain JAX, one scan over the summed axis for each product.

Many rows at once against one span of the summed axis, so memory is O(T); a span is what a kernel's tile holds, so the
numbers are those of the kernels. Runs on CPU, TPU and anything else.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import steps
from pallas_kernels.attention import to_16_bits
from sagebwd_jax import _quantize, _segments, _sharding
from sagebwd_jax._config import CallSpec
from sagebwd_jax._residuals import Residuals
from sagebwd_jax._xla_masks import cut as cut_masks
from sagebwd_jax._xla_masks import join_bias, seen_and_bias, split_spans, sum_to_bias

# Queries of O and dQ, keys of dK and dV, whose scores of one span are in memory at a time. A multiple of every block.
_ROWS = 2048


def forward(query, key, value, visibility=None, mean=None, *, spec: CallSpec, keep: bool):
    """O [B, T, N, H], log-sum-exp in base 2 [B, N, T], and the residuals if `keep`; all in canonical form.

    `visibility` (_masks.py) is None for a plain call. A query that sees no key has O = 0 and NO_QUERY. `mean` [B, K, H]
    is what smoothing takes from K, if it is not the mean of these keys.
    """
    config = spec.config
    q_int8 = q_scale = k_int8 = k_scale = k_smooth_16 = None
    if spec.uses_int8("qk") or (keep and spec.uses_int8("dk")):
        block = 1 if config.query_scale == "token" else config.block_q
        factor = spec.scale * steps.LOG2_E
        q_int8, q_scale = _quantize.quantize_tokens(query, block=block, length=spec.query_length, factor=factor)
        q_scale = jnp.repeat(q_scale, block, axis=2)
    if spec.uses_int8("qk") or keep:
        k_smooth = key.astype(jnp.float32)
        if config.smooth_k:
            k_smooth = k_smooth - (_key_mean(key, visibility, spec) if mean is None else mean[:, None])
        k_smooth = _quantize.clear_padding(k_smooth, spec.key_length)
        block = 1 if config.key_scale == "token" else config.block_k
        k_int8, k_scale = _quantize.quantize_tokens(k_smooth, block=block, length=spec.key_length)
        k_smooth_16 = k_smooth.swapaxes(1, 2).astype(jnp.bfloat16) if spec.keeps_16_bits("dq") else None
    q_16, k_16, value_16 = to_16_bits(query), to_16_bits(key), to_16_bits(value)

    if spec.uses_int8("qk"):
        q, k = q_int8, k_int8
    else:
        q, k = q_16.swapaxes(1, 2), k_16.swapaxes(1, 2)
    out, kept, lse = _softmax_scan(q, k, value, q_scale, k_scale, visibility, spec, keep)
    if not keep:
        return out, lse, None
    residuals = Residuals(
        q_int8=q_int8,
        q_scale=q_scale,
        q_16=q_16 if spec.keeps_16_bits("qk", "dk") else None,
        k_int8=k_int8 if spec.uses_int8("qk", "dq") else None,
        k_scale=k_scale if spec.uses_int8("qk", "dq") else None,
        k_raw_16=k_16 if spec.keeps_16_bits("qk") else None,
        k_smooth_16=k_smooth_16,
        value_16=value_16,
        out_int16=kept[0].swapaxes(1, 2),
        out_scale=kept[1],
        lse=lse,
    )
    return out, lse, residuals


def mean_logits(query, key, visibility=None, *, spec: CallSpec):
    """What smoothing takes from the logits, scale * q . mean(k) [B, N, T], and mean(k) [B, K, H].

    Where there are segments, mean(k) is that of each query's segment, [B, T, K, H].
    """
    if visibility is not None and visibility.key_segments is not None:
        mean = _segments.of_queries(_key_mean(key, visibility, spec), visibility.query_segments)
        repeated = jnp.repeat(mean, query.shape[2] // key.shape[2], axis=2)
    else:
        mean = _quantize.key_mean(key, spec.key_length)
        repeated = jnp.repeat(mean, query.shape[2] // key.shape[2], axis=1)[:, None]
    # Not a matrix product: a library's choice of kernel, and with it the order of the sum, may depend on the batch.
    return spec.scale * jnp.sum(query.astype(jnp.float32) * repeated, axis=-1).swapaxes(1, 2), mean


def _key_mean(key, visibility, spec):
    """What smoothing takes from each key, [B, S, K, H] or, where it is the same for all of a head, [B, 1, K, H]."""
    if visibility is not None and visibility.key_segments is not None:
        return _segments.key_means(key, visibility.key_segments)
    return _quantize.key_mean(key, spec.key_length)[:, None]


def backward(residuals: Residuals, dout, dlse, visibility=None, *, spec: CallSpec, want_dbias: bool = False):
    """dQ, dK and dV of the cotangents of O and, unless None, of the log-sum-exp in base 2; with `want_dbias` dbias too.

    dbias is float32 in the shape of visibility.bias.
    """
    r = residuals
    # A cotangent that is known to be 0 (a loss of the log-sum-exp alone) must not become a constant of the scans: XLA's
    # products with one are garbage on a CPU at times (JAX 0.10 to 0.12).
    dtype, dout = dout.dtype, lax.optimization_barrier(dout.swapaxes(1, 2))
    delta, do_int8, do_scale = _quantize_dout(r, dout, spec)
    if dlse is not None:
        delta = delta - dlse * steps.LOG2_E
    do_16 = to_16_bits(dout)
    dq, dbias = _grad_q_scan(r, do_16, delta, visibility, spec, want_dbias, dtype)
    dk, dv = _grad_kv_scan(r, do_16, do_int8, do_scale, delta, visibility, spec, dtype)
    grads = tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))
    return (*grads, dbias) if want_dbias else grads


def _quantize_dout(r, dout, spec):
    """delta = rowsum(dO * O) [B, N, T] of dO [B, N, T, H], and dO as INT8 with a scale a query, or None."""
    block = 1 if spec.config.dout_scale == "token" else spec.config.block_q

    def quantize(first_row, rows):
        dout, out_int16, out_scale = rows
        dout = dout.astype(jnp.float32)
        # The scale inside of the sum: after it, XLA mixes up rows on a CPU under a vmap of 12 (JAX 0.10.2).
        delta = jnp.sum(out_int16.astype(jnp.float32) * out_scale[..., None] * dout, -1)
        if not spec.uses_int8("dv"):
            return delta, None, None
        counts = first_row + jnp.arange(dout.shape[2]) < spec.query_length
        do_int8, do_scale = _quantize.round_blocks(jnp.where(counts[:, None], dout, 0.0), block)
        return delta, do_int8, jnp.repeat(do_scale, block, axis=2)

    return _over_rows(quantize, 2, (dout, r.out_int16.swapaxes(1, 2), r.out_scale))


def _dot(axes, a, b):
    """One matrix product of INT8 or 16-bit values, in float32.

    INT8 values are multiplied as bfloat16 with float32 sums, which gives the same integers: factors have 7 bits and
    sums stay below 2^24. XLA's own INT8 products are slow on a CPU, and with them in these scans dK came out doubled on
    an H200 (JAX 0.11.2).
    """
    a, b = (x.astype(jnp.bfloat16) if x.dtype == jnp.int8 else x for x in (a, b))
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)


def _scan(step, start, operands, *read):
    """lax.scan whose start has the type of what the step makes of it and of `read`, also in a `shard_map`."""
    return lax.scan(step, _sharding.vary_alike(start, operands, read)[0], operands)


def _over_rows(function, axis, operands, *, at_once=_ROWS) -> Any:
    """function(first, operands), whose results have rows along `axis` too, of `at_once` rows at a time, joined."""
    rows = operands[0].shape[axis]
    if rows <= at_once:
        return function(0, operands)
    # The last rows come with some that come before too, and are the same again.
    firsts = jnp.minimum(jnp.arange(0, rows, at_once), rows - at_once)

    def cut(x, first):
        return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, first, at_once, axis)

    def block(first):
        return function(first, jax.tree.map(lambda x: cut(x, first), operands))

    def step(joined, first):
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, axis), joined, block(first)), None

    shapes = jax.eval_shape(block, firsts[0])
    start = jax.tree.map(lambda x: jnp.zeros((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype), shapes)
    return _scan(step, start, firsts, operands)[0]


def _group(arrays, kv_heads):
    """[B, N, ...] -> [B, K, N / K, ...]: the query heads of each key head; of each array or None."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]), arrays)


def _scores(q, k, q_scale, k_scale, spec, bias):
    """S in base 2, [B, K, G, T, S], of q [B, K, G, T, H], k [B, K, S, H] and a bias in base 2 or None."""
    s = _dot("bkgth,bksh->bkgts", q, k)
    s = (
        s * (spec.scale * steps.LOG2_E)
        if spec.keeps_16_bits("qk")
        else s * q_scale[..., None] * k_scale[:, :, None, None]
    )
    return s if bias is None else s + bias


def _softmax_scan(q, k, value, q_scale, k_scale, visibility, spec, keep):
    """O [B, T, N, H], with `keep` O [B, N, T, H] as int16 and its scales, and its log-sum-exp in base 2 [B, N, T]."""
    span, kv_heads, shape = spec.config.pv_span, k.shape[1], q.shape
    q, q_scale = _group((q, q_scale), kv_heads)
    int8_values = spec.uses_int8("pv")
    span_scales = channel_scale = None
    by_head = value.swapaxes(1, 2)
    if not int8_values:
        v = to_16_bits(by_head)
    elif visibility is not None and spec.packed:
        v, channel_scale = _quantize.round_documents(value, visibility.query_segments, visibility.key_segments)
        channel_scale = channel_scale.swapaxes(1, 2)[:, :, None]
    elif spec.config.value_scale == "block":
        v, v_scale = _quantize.round_blocks(by_head.astype(jnp.float32), span)
        span_scales = jnp.moveaxis(v_scale, 2, 0)
    else:
        v, channel_scale = _quantize.round_channels(by_head.astype(jnp.float32))
        channel_scale = channel_scale[:, :, None, None]

    firsts = jnp.arange(0, k.shape[2], span)
    k_scale_spans = None if k_scale is None else split_spans(_scale_a_key(k_scale, k), 2, span)
    cut, uncut = cut_masks(visibility, kv_heads, span, along_keys=True)
    spans = firsts, split_spans(k, 2, span), k_scale_spans, split_spans(v, 2, span), span_scales, cut

    def attend(first_row, rows):
        q, q_scale, channel_scale = rows
        queries = first_row + jnp.arange(q.shape[3])

        def step(carry, operands):
            out, peak, shift, total = carry
            first, k, k_scale, v, v_scale, cut = operands
            seen, bias = seen_and_bias(cut, uncut, queries, first + jnp.arange(span), spec)
            s = jnp.where(seen, _scores(q, k, q_scale, k_scale, spec, bias), -jnp.inf)
            peak, new_shift, keep = steps.advance_shift(peak, shift, s.max(-1))
            offset = steps.LOG2_INT8_MAX if int8_values else 0.0
            p = jnp.exp2(s + (offset - new_shift)[..., None])
            p_rounded = _quantize.round_to_int8(p) if int8_values else p.astype(v.dtype)
            product = _dot("bkgts,bksh->bkgth", p_rounded, v)
            if v_scale is not None:
                product = product * v_scale[:, :, None, None, None]
            return (out * keep[..., None] + product, peak, new_shift, total * keep + p.sum(-1)), None

        nothing = jnp.full(q.shape[:-1], steps.NO_SCORE, jnp.float32)
        start = jnp.zeros(q.shape, jnp.float32), nothing, nothing, jnp.zeros(q.shape[:-1], jnp.float32)
        (out, _, shift, total), _ = _scan(step, start, spans)
        counts = queries < spec.query_length
        if visibility is not None:
            counts = counts[(None,) * 3] & (total != 0)
            total = jnp.where(total == 0, 1.0, total)
        out = out / total[..., None]
        if channel_scale is not None:
            out = out * channel_scale
        lse = shift + jnp.log2(total) - (steps.LOG2_INT8_MAX if int8_values else 0.0)
        kept = _quantize.round_to_int16_rows(out) if keep else None
        return out.astype(value.dtype), kept, jnp.where(counts, lse, steps.NO_QUERY)

    out, kept, lse = _over_rows(attend, 3, (q, q_scale, channel_scale))
    out, kept, lse = jax.tree.map(lambda x: x.reshape(*shape[:3], *x.shape[4:]), (out, kept, lse))
    return out.swapaxes(1, 2), kept, lse


def _score_operands(r, spec):
    """What S reads in the backward pass: q, k [B, N, time, H] and their scales."""
    if spec.uses_int8("qk"):
        q, k = r.q_int8, r.k_int8
    else:
        q, k = r.q_16.swapaxes(1, 2), r.k_raw_16.swapaxes(1, 2)
    return q, k, r.q_scale, None if r.k_scale is None else _scale_a_key(r.k_scale, k)


def _scale_a_key(k_scale, k):
    """K's scales repeated for each key [B, K, S]."""
    return jnp.repeat(k_scale, k.shape[2] // k_scale.shape[2], axis=2)


def _grad_q_scan(r, do, delta, visibility, spec, want_dbias, dtype):
    """dQ [B, N, T, H], and dbias or None: a scan over spans of keys."""
    config, kv_heads = spec.config, r.value_16.shape[2]
    q, k, q_scale, k_scale = _score_operands(r, spec)
    shape = q.shape
    rows = _group((q, do, q_scale, r.lse, delta), kv_heads)
    int8 = spec.uses_int8("dq")
    tile_rows = config.block_q if config.grad_scale == "tile" else 1

    def span(x):
        return None if x is None else split_spans(x, 2, config.dq_span)

    k_right = r.k_int8 if int8 else r.k_smooth_16
    firsts = jnp.arange(0, k.shape[2], config.dq_span)
    cut, uncut = cut_masks(visibility, kv_heads, config.dq_span, along_keys=True)
    spans = firsts, span(k), span(k_scale), span(r.value_16.swapaxes(1, 2)), span(k_right), cut

    def grad(first_row, rows):
        q, do, q_scale, lse, delta = rows
        queries = first_row + jnp.arange(q.shape[3])

        def step(dq, operands):
            first, k, k_scale, v, k_right, cut = operands
            seen, bias = seen_and_bias(cut, uncut, queries, first + jnp.arange(config.dq_span), spec)
            p = jnp.where(seen, jnp.exp2(_scores(q, k, q_scale, k_scale, spec, bias) - lse[..., None]), 0.0)
            ds = p * (_dot("bkgth,bksh->bkgts", do, v) - delta[..., None])
            dbias = sum_to_bias(ds, visibility.bias, kv_heads) if want_dbias else None
            if not int8:
                return dq + _dot("bkgts,bksh->bkgth", ds.astype(jnp.bfloat16), k_right), dbias
            # A scale that varies along the sum goes into dS before dS is rounded.
            if config.key_scale == "token":
                ds = ds * k_scale[:, :, None, None]
            ds_int8, ds_scale = _quantize.round_rows(ds, tile_rows)
            if config.key_scale == "block":
                ds_scale = ds_scale * k_scale[:, :, :1, None]
            return dq + _dot("bkgts,bksh->bkgth", ds_int8, k_right) * ds_scale[..., None], dbias

        dq, dbias = _scan(step, jnp.zeros(q.shape, jnp.float32), spans)
        return (dq * spec.scale).astype(dtype), dbias

    # dbias may be a sum over rows.
    at_once = q.shape[2] if want_dbias else _ROWS
    dq, dbias = _over_rows(grad, 3, rows, at_once=at_once)
    return dq.reshape(shape), join_bias(dbias, visibility.bias) if want_dbias else None


def _grad_kv_scan(r, do_16, do_int8, do_scale, delta, visibility, spec, dtype):
    """dK and dV [B, K, S, H]: a scan over spans of queries for each of them."""
    config, kv_heads = spec.config, r.value_16.shape[2]
    q, k, q_scale, k_scale = _score_operands(r, spec)
    v = r.value_16.swapaxes(1, 2)
    tile_rows = config.block_k if config.grad_scale == "tile" else 1
    cut_dv, uncut_dv = cut_masks(visibility, kv_heads, config.dv_span, along_keys=False)
    cut_dk, uncut_dk = cut_masks(visibility, kv_heads, config.dk_span, along_keys=False)

    def starts(length):
        return jnp.arange(0, q.shape[2], length)

    def reader(length, *more):
        """What a step reads of `length` queries from `first` on: q, its scale, its log-sum-exp, and more."""
        # Cut out there: spans of tensors that are transposed for the scan would be copies of all of them.
        whole = _group((q, q_scale, r.lse, *more), kv_heads)
        return lambda first: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, length, 3), whole)

    def probabilities(first, cut, uncut, span, keys, k, k_scale, q, q_scale, lse):
        """P^T [B, K, G, S, span]."""
        seen, bias = seen_and_bias(cut, uncut, first + jnp.arange(span), keys, spec)
        p = jnp.where(seen, jnp.exp2(_scores(q, k, q_scale, k_scale, spec, bias) - lse[..., None]), 0.0)
        return p.swapaxes(3, 4)

    def grad_v(first_row, rows):
        k, k_scale = rows
        keys = first_row + jnp.arange(k.shape[2])

        def step(dv, operands):
            first, cut = operands
            q, q_scale, lse, do, do_scale = read_dv(first)
            p = probabilities(first, cut, uncut_dv, config.dv_span, keys, k, k_scale, q, q_scale, lse)
            if do.dtype != jnp.int8:
                return dv + _dot("bkgst,bkgth->bksh", p.astype(do.dtype), do), None
            p_int8, p_scale = _quantize.round_rows(p * do_scale[..., None, :], tile_rows)
            return dv + (_dot("bkgst,bkgth->bkgsh", p_int8, do) * p_scale[..., None]).sum(2), None

        dv, _ = _scan(step, jnp.zeros(k.shape, jnp.float32), (starts(config.dv_span), cut_dv), k)
        return dv.astype(dtype)

    def grad_k(first_row, rows):
        k, k_scale, v = rows
        keys = first_row + jnp.arange(v.shape[2])

        def step(dk, operands):
            first, cut = operands
            q, q_scale, lse, do, delta, q_right = read_dk(first)
            p = probabilities(first, cut, uncut_dk, config.dk_span, keys, k, k_scale, q, q_scale, lse)
            ds = p * (_dot("bksh,bkgth->bkgst", v, do) - delta[..., None, :])
            if q_right.dtype != jnp.int8:
                return dk + _dot("bkgst,bkgth->bksh", ds.astype(jnp.bfloat16), q_right.astype(jnp.bfloat16)), None
            ds_int8, ds_scale = _quantize.round_rows(ds * q_scale[..., None, :], tile_rows)
            return dk + (_dot("bkgst,bkgth->bkgsh", ds_int8, q_right) * ds_scale[..., None]).sum(2), None

        dk, _ = _scan(step, jnp.zeros(v.shape, jnp.float32), (starts(config.dk_span), cut_dk), k)
        return (dk * (1 / steps.LOG2_E if spec.uses_int8("dk") else spec.scale)).astype(dtype)

    q_right = r.q_int8 if spec.uses_int8("dk") else r.q_16.swapaxes(1, 2)
    read_dv = reader(config.dv_span, do_16 if do_int8 is None else do_int8, do_scale)
    read_dk = reader(config.dk_span, do_16, delta, q_right)
    return _over_rows(grad_k, 2, (k, k_scale, v)), _over_rows(grad_v, 2, (k, k_scale))
