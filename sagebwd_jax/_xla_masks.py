"""Masks and bias in plain JAX: cut along the axis that a scan sums over, and what they are for one span of scores."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels import masking, steps
from sagebwd_jax._masks import Visibility


def cut(visibility: Visibility | None, kv_heads: int, span: int, *, along_keys: bool):
    """(what a scan over spans of keys, or else of queries, takes apart, what it leaves whole), heads grouped.

    Every field is in one of the two, so that memory stays that of the arguments.
    """
    if visibility is None:
        return None, None
    scanned, whole = {}, {}
    for name in ("query_segments", "key_segments"):
        x = getattr(visibility, name)
        if x is not None:
            is_summed = (name == "key_segments") == along_keys
            (scanned if is_summed else whole)[name] = split_spans(x, 1, span) if is_summed else x
    for name in ("mask", "bias"):
        x = getattr(visibility, name)
        if x is not None:
            heads = (1, 1) if x.shape[1] == 1 else (kv_heads, x.shape[1] // kv_heads)
            x = x.reshape(x.shape[0], *heads, *x.shape[2:])
            axis = 4 if along_keys else 3
            is_summed = x.shape[axis] > 1
            (scanned if is_summed else whole)[name] = split_spans(x, axis, span) if is_summed else x
    return Visibility(**scanned), Visibility(**whole)


def seen_and_bias(scanned: Visibility | None, whole: Visibility | None, queries, keys, spec):
    """Which scores [b, k, g, t, s] of neighbouring queries and keys count, and the bias in base 2 or None."""
    seen = seen_by_position(queries, keys, spec)
    if scanned is None or whole is None:
        return seen, None
    fields = {f.name: getattr(scanned, f.name) for f in dataclasses.fields(Visibility)}
    v = Visibility(**{name: getattr(whole, name) if x is None else x for name, x in fields.items()})
    v = _of_positions(v, queries, keys)
    seen = seen[None, None, None]
    if v.query_segments is not None and v.key_segments is not None:
        seen = seen & (v.query_segments[:, :, None] == v.key_segments[:, None, :])[:, None, None]
    if v.mask is not None:
        seen = seen & (v.mask != 0)
    if v.bias is None:
        return seen, None
    return seen & ~masking.hides(v.bias), v.bias.astype(jnp.float32) * steps.LOG2_E


def _of_positions(v: Visibility, queries, keys):
    """What of each field is for these queries and keys."""

    def slice_to(x, axis, positions):
        if x is None or x.shape[axis] in (1, positions.size):
            return x
        return lax.dynamic_slice_in_dim(x, positions[0], positions.size, axis)

    both = [slice_to(slice_to(x, 3, queries), 4, keys) for x in (v.mask, v.bias)]
    segments = slice_to(v.query_segments, 1, queries), slice_to(v.key_segments, 1, keys)
    return Visibility(mask=both[0], bias=both[1], query_segments=segments[0], key_segments=segments[1])


def seen_by_position(queries, keys, spec):
    """[T, S]: which scores count, from the positions of queries and keys."""
    counts = (keys < spec.key_length)[None, :] & (queries >= 0)[:, None]
    left, right = spec.reach
    if left is not None:
        counts = counts & (keys[None, :] >= queries[:, None] - left)
    if right is not None:
        counts = counts & (keys[None, :] <= queries[:, None] + right)
    return counts


def sum_to_bias(ds, bias, kv_heads):
    """The sum of dS [B, K, G, T, span] over the axes of heads, batch, queries and keys that `bias` does not have."""
    heads = (1, 1) if bias.shape[1] == 1 else (kv_heads, bias.shape[1] // kv_heads)
    shape = bias.shape[0], *heads, *bias.shape[2:]
    return ds.sum([axis for axis in range(5) if shape[axis] == 1], keepdims=True)


def join_bias(spans, bias):
    """The gradient of `bias` from `sum_to_bias` of each span of keys [spans, ...]."""
    if bias.shape[3] == 1:
        return spans.sum(0).reshape(bias.shape)
    return jnp.moveaxis(spans, 0, 4).reshape(bias.shape)


def split_spans(x, axis, span):
    """Cut `axis` into spans and move them to the front, for a scan."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // span, span, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
