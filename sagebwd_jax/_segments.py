"""Segments of packed sequences: which key belongs to which, the mean key and the largest values of each.

A canonical segment id is the index of the segment's first key, so that ids are unique, grow along packed documents
whatever the user's ids are, and lead to a key of the segment. A negative id is shared with nothing: LONE_QUERY is a
query's, LONE_KEY a key's.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pallas_kernels import steps

# Unequal, so that neither sees the other.
LONE_QUERY = -1
LONE_KEY = -2


def in_one_dtype(query_ids, key_ids):
    """Ids of any integer dtypes, of JAX or NumPy, in one signed dtype, and which of them count, None where all do.

    Ids are equal where the given ones are. One that the other side's dtype does not hold is none of the other side's,
    so its token counts for nothing, and those that are left fit in either dtype.
    """
    ids = [_narrow_by_value(x) for x in (query_ids, key_ids)]
    limits, int32 = [jnp.iinfo(x.dtype) for x in ids], jnp.iinfo(jnp.int32)
    if all(int32.min <= limit.min and limit.max <= int32.max for limit in limits):
        return [jnp.asarray(x.astype(jnp.int32)) for x in ids], (None, None)
    shared = None, None
    if ids[0].dtype != ids[1].dtype:
        low, high = max(limit.min for limit in limits), min(limit.max for limit in limits)
        shared = [jnp.asarray((x >= np.asarray(low, x.dtype)) & (x <= np.asarray(high, x.dtype))) for x in ids]
    dtype = min((x.dtype for x in ids), key=lambda dtype: jnp.iinfo(dtype).max)
    ids = [x.astype(dtype) for x in ids]
    if all(isinstance(x, np.ndarray) for x in ids):
        # Their ranks, as JAX may not have 64 bits.
        _, ranks = np.unique(np.concatenate([x.ravel() for x in ids]), return_inverse=True)
        parts = np.split(ranks.astype(np.int32), [ids[0].size])
        return [jnp.asarray(part.reshape(x.shape)) for part, x in zip(parts, ids, strict=True)], shared
    if jnp.iinfo(dtype).max <= int32.max:
        return [jnp.asarray(x).astype(jnp.int32) for x in ids], shared
    # The same bits: it only matters which are equal.
    return [jnp.asarray(x).view(f"int{8 * dtype.itemsize}") for x in ids], shared


def _narrow_by_value(ids):
    """NumPy's ids as int32 where they fit."""
    int32 = np.iinfo(np.int32)
    fit = isinstance(ids, np.ndarray) and ids.size and ids.min() >= int32.min and ids.max() <= int32.max
    return ids.astype(np.int32) if fit else ids


def canonical_segments(
    query_ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
    query_counts: Bool[Array, "B T"],
    key_counts: Bool[Array, "B S"],
) -> tuple[Int32[Array, "B T"], Int32[Array, "B S"]]:
    """Canonical ids of queries and keys, of any user's ids (None: one segment) and of what counts at all.

    A query whose segment has no key that counts, and a key whose segment has no such query, get a negative id.
    """
    if query_ids is None or key_ids is None:
        first = jnp.argmax(key_counts, axis=1, keepdims=True).astype(jnp.int32)
        queries = jnp.where(query_counts & key_counts.any(1, keepdims=True), first, LONE_QUERY)
        return queries, jnp.where(key_counts & query_counts.any(1, keepdims=True), first, LONE_KEY)
    find = jax.vmap(_find)
    first_key, has_key = find(key_ids, key_counts, query_ids)
    own_first, _ = find(key_ids, key_counts, key_ids)
    _, has_query = find(query_ids, query_counts, key_ids)
    queries = jnp.where(query_counts & has_key, first_key, LONE_QUERY)
    return queries, jnp.where(key_counts & has_query, own_first, LONE_KEY)


def _find(ids, counts, wanted):
    """Of each wanted id: the first index at which `ids` [time] has it and counts, and whether there is one."""
    hidden, ids, order = lax.sort((~counts, ids, jnp.arange(ids.shape[0], dtype=jnp.int32)), num_keys=2)
    # Those that do not count come last, and no search may stop at them.
    ids = jnp.where(hidden, jnp.iinfo(ids.dtype).max, ids)
    place = jnp.minimum(jnp.searchsorted(ids, wanted), ids.shape[0] - 1)
    return order[place], (ids[place] == wanted) & ~hidden[place]


def key_means(key: Float[Array, "B S K H"], segments: Int32[Array, "B S"]) -> Float32[Array, "B S K H"]:
    """The mean key of each key's segment; 0 for a key without one."""
    total, count = _over_segments(jnp.add, key.astype(jnp.float32), segments)
    return jnp.where((segments >= 0)[..., None, None], total / count, 0.0)


def largest_values(value: Float[Array, "B S K H"], segments: Int32[Array, "B S"]) -> Float32[Array, "B S K H"]:
    """The largest magnitude of each channel in each value's segment; 0 for a value without one."""
    largest, _ = _over_segments(jnp.maximum, steps.magnitude(value.astype(jnp.float32)), segments)
    return jnp.where((segments >= 0)[..., None, None], largest, 0.0)


def _over_segments(combine, x, segments):
    """What `combine` makes of each token's segment, in the shape of x [B, S, K, H], and its tokens [B, S, 1, 1].

    Not by adding at computed places: the order of such a sum varies on a GPU. Tokens are sorted by segment and combined
    by a scan that starts anew with each segment, so nothing crosses from one to another.
    """
    order = jnp.argsort(segments, axis=1, stable=True)
    ids = jnp.take_along_axis(segments, order, axis=1)
    changes = ids[:, 1:] != ids[:, :-1]
    edge = jnp.ones_like(ids[:, :1], dtype=bool)
    starts, ends = jnp.concatenate([edge, changes], axis=1), jnp.concatenate([changes, edge], axis=1)
    places = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    start = lax.cummax(jnp.where(starts, places, 0), axis=1)
    end = lax.cummin(jnp.where(ends, places, ids.shape[1]), axis=1, reverse=True)

    def join(left, right):
        """(holds a start, what was combined since the last start) of two neighbouring stretches."""
        return left[0] | right[0], jnp.where(right[0], right[1], combine(left[1], right[1]))

    tokens = jnp.take_along_axis(x, order[..., None, None], axis=1)
    _, combined = lax.associative_scan(join, (starts[..., None, None], tokens), axis=1)
    own = jnp.argsort(order, axis=1)
    count = jnp.take_along_axis(end - start + 1, own, axis=1)
    total = jnp.take_along_axis(combined, jnp.take_along_axis(end, own, axis=1)[..., None, None], axis=1)
    return total, count[..., None, None].astype(jnp.float32)


def of_queries(x: Float32[Array, "B S K H"], segments: Int32[Array, "B T"]) -> Float32[Array, "B T K H"]:
    """What each query's segment has of what is the same for all of its keys; 0 for a query without one."""
    own = jnp.take_along_axis(x, jnp.maximum(segments, 0)[..., None, None], axis=1)
    return jnp.where((segments >= 0)[..., None, None], own, 0.0)


def clear_padding(x: Float[Array, "B time N H"], segments: Int32[Array, "B time"]) -> Float[Array, "B time N H"]:
    """Zero the tokens without a segment, whatever they hold."""
    return jnp.where((segments >= 0)[..., None, None], x, jnp.zeros((), x.dtype))
