"""Exact float32 attention and gradients of one head, in blocks of queries, so that any length fits in memory.

`sagebwd_jax.reference` holds all scores at once, 4 GiB of them at length 32768; the tests hold this against it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 512


@functools.partial(jax.jit, static_argnames=("is_causal", "window"))
def exact_head(
    query, key, value, dout, *, is_causal, window=None, segments=None, key_length=None, mask=None, bias=None
):
    """(O, dQ, dK, dV), float32, of one head: all arrays are [length, depth], the scale is 1/sqrt(depth).

    Queries see so many keys before them (`window`), keys of their own segment [length], keys before `key_length`, and
    where a mask [length, length] says so; a bias of that shape is added. Each must see one.
    """
    q, k, v, do = (x.astype(jnp.float32) for x in (query, key, value, dout))
    length, depth = q.shape
    block, scale = min(_BLOCK, length), depth**-0.5
    dot = functools.partial(jnp.dot, precision="highest")

    def step(sums, rows):
        first, q, do = rows
        s, queries, keys = scale * dot(q, k.T), first + jnp.arange(block)[:, None], jnp.arange(length)[None, :]
        if bias is not None:
            s = s + lax.dynamic_slice_in_dim(bias, first, block).astype(jnp.float32)
        seen = [] if key_length is None else [keys < key_length]
        seen += [queries >= keys] if is_causal else []
        seen += [] if window is None else [keys >= queries - window]
        seen += [] if segments is None else [segments[queries] == segments[keys]]
        seen += [] if mask is None else [lax.dynamic_slice_in_dim(mask, first, block)]
        for visible in seen:
            s = jnp.where(visible, s, -jnp.inf)
        p = jax.nn.softmax(s, axis=-1)
        out = dot(p, v)
        ds = p * (dot(do, v.T) - jnp.sum(do * out, axis=-1, keepdims=True))
        dk, dv = sums
        return (dk + scale * dot(ds.T, q), dv + dot(p.T, do)), (out, scale * dot(ds, k))

    def blocks(x):
        return x.reshape(length // block, block, depth)

    start = jnp.zeros_like(k), jnp.zeros_like(v)
    (dk, dv), (out, dq) = lax.scan(step, start, (jnp.arange(0, length, block), blocks(q), blocks(do)))
    return out.reshape(length, depth), dq.reshape(length, depth), dk, dv


def relative_error(got, wanted) -> float:
    """Relative l2 error, NaN if anything is not finite."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))


def max_error(results, wanted) -> float:
    """The worst relative error of a method's results [B, T, N, H] against the oracle's, on the head that it knows."""
    errors = [relative_error(got[0, :, 0], want) for got, want in zip(results, wanted, strict=True)]
    # max() would lose a NaN.
    return max(errors) if all(e == e for e in errors) else float("nan")
