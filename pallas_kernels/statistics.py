"""Kernels that reduce K and V over time, and Q against K's mean: what quantisation and the log-sum-exp need of a head.

Sums are made here, not by XLA, whose order may change with the batch size: a head's result must not.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import steps
from pallas_kernels.launch import call, load_rows, own_rows, whole_head
from pallas_kernels.quantize import ROWS, compiled

# Partial results that the second kernel reads at a time.
PARTIALS = 32


def channel_statistics(key, value, *, length):
    """K's mean over the first `length` tokens, and V's largest magnitude, each channel's, float32 [B, K, H].

    key and value are [B, S, K, H] with zeros from `length` on; None for one of them skips it and gives None.
    """
    inputs = [x for x in (key, value) if x is not None]
    batch, time, heads, depth = inputs[0].shape
    tiles = time // ROWS
    reductions = [jnp.sum] * (key is not None) + [jnp.max] * (value is not None)

    def partial_kernel(*refs):
        for x_ref, out_ref, reduce in zip(refs[: len(inputs)], refs[len(inputs) :], reductions, strict=True):
            tile = x_ref[...].astype(jnp.float32)
            out_ref[...] = reduce(steps.magnitude(tile) if reduce is jnp.max else tile, axis=0)

    partials = call(
        partial_kernel,
        "sagebwd_partial_statistics",
        (tiles, heads, batch),
        inputs,
        [own_rows(ROWS, depth, heads_last=True)] * len(inputs),
        [jax.ShapeDtypeStruct((batch, heads, tiles, depth), jnp.float32)] * len(inputs),
        [pl.BlockSpec((None, None, None, depth), lambda i, n, b: (b, n, i, 0))] * len(inputs),
        **compiled(depth),
    )

    def kernel(*refs):
        for x_ref, out_ref, reduce in zip(refs[: len(inputs)], refs[len(inputs) :], reductions, strict=True):

            def add(i, total, x_ref=x_ref, reduce=reduce):
                some = reduce(load_rows(x_ref, i * PARTIALS, PARTIALS), axis=0)
                return total + some if reduce is jnp.sum else jnp.maximum(total, some)

            total = lax.fori_loop(0, pl.cdiv(tiles, PARTIALS), add, jnp.zeros(depth, jnp.float32))
            out_ref[...] = total / length if reduce is jnp.sum else total

    whole = pl.BlockSpec((None, None, depth), lambda n, b: (b, n, 0))
    results = call(
        kernel,
        "sagebwd_statistics",
        (heads, batch),
        partials,
        [pl.BlockSpec((None, None, tiles, depth), lambda n, b: (b, n, 0, 0))] * len(inputs),
        [jax.ShapeDtypeStruct((batch, heads, depth), jnp.float32)] * len(inputs),
        [whole] * len(inputs),
        **compiled(depth),
    )
    results = list(results)
    return results.pop(0) if key is not None else None, results.pop(0) if value is not None else None


def mean_logits(query, mean, *, scale):
    """scale * q . mean, float32 [B, N, T], of query [B, T, N, H] and each key head's mean.

    That is [B, K, H], or one for each query [B, T, K, H].
    """
    batch, time, heads, depth = query.shape
    a_query = mean.ndim == 4

    def kernel(query_ref, mean_ref, out_ref):
        rows = query_ref[...].astype(jnp.float32)
        out_ref[...] = jnp.sum(rows * (mean_ref[...] if a_query else mean_ref[...][None, :]), axis=1) * scale

    group = heads // mean.shape[-2]
    a_query_block = own_rows(ROWS, depth, heads_last=True, group=group)
    return call(
        kernel,
        "sagebwd_mean_logits",
        (time // ROWS, heads, batch),
        [query, mean],
        [own_rows(ROWS, depth, heads_last=True), a_query_block if a_query else whole_head(mean, group=group)],
        jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
        own_rows(ROWS),
        **compiled(depth),
    )
