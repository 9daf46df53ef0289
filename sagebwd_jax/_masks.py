"""What a query may see: the arguments of attention() about it, checked, in the form that the implementations take."""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from sagebwd_jax import _segments, _sharding
from sagebwd_jax._config import LENGTH_MULTIPLE

BIAS_DTYPES = ("bfloat16", "float16", "float32")
# A bias that hides, and stays finite in base 2, as float32's least does not: `jax.debug_infs` finds infinities.
_HIDDEN = dict(bfloat16=-2e20, float16=-65504.0, float32=-2e20)
Window = tuple[int | None, int | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """What decides, beside causality and the window, which scores count; None for what was not given.

    T and S are padded to whole tiles, or 1 where mask or bias is the same along that axis; never are both 1. Axes of
    batch and heads are 1 where all share one.
    """

    # Canonical (see _segments.py): a score counts where they are equal. Lengths are part of them.
    query_segments: Int32[Array, "B T"] | None = None
    key_segments: Int32[Array, "B S"] | None = None
    # A score counts where it is not 0.
    mask: Int8[Array, "b n t s"] | None = None
    # Added to the logits, natural units.
    bias: Float[Array, "b n t s"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The axes of one call; `batched` is whether its inputs have the batch axis."""

    batch: int
    queries: int
    keys: int
    heads: int
    batched: bool


def canonical(
    sizes: Sizes,
    *,
    bias,
    mask,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    query_segment_ids,
    key_value_segment_ids,
) -> tuple[Window, Visibility | None]:
    """The window and the rest in canonical form; None where nothing but causality limits what is seen.

    Raises:
      ValueError: a shape or size.
      TypeError: a dtype or type.
    """
    window = _check_window(local_window_size, sizes)
    bias = _check_scores_operand("bias", bias, BIAS_DTYPES, sizes)
    mask = _check_scores_operand("mask", mask, ("bool",), sizes)
    query_lengths = _check_lengths("query_seq_lengths", query_seq_lengths, sizes.queries, sizes)
    key_lengths = _check_lengths("key_value_seq_lengths", key_value_seq_lengths, sizes.keys, sizes)
    ids = _check_segments(query_segment_ids, key_value_segment_ids, sizes)

    if 0 in (sizes.batch, sizes.queries, sizes.keys, sizes.heads):
        return window, None
    query_counts = _within(query_lengths, sizes.queries)
    key_counts = _within(key_lengths, sizes.keys)
    query_ids = key_ids = None
    if ids is not None:
        (query_ids, key_ids), (query_shared, key_shared) = _segments.in_one_dtype(*ids)
        if query_shared is not None:
            query_counts, key_counts = _both(query_counts, query_shared), _both(key_counts, key_shared)
    if mask is not None and mask.shape[1] == 1 and 1 in mask.shape[2:]:
        # The same for all heads and for all queries or keys: padding, which costs nothing where it is known as such.
        if mask.shape[2] == 1:
            key_counts = _both(key_counts, jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], sizes.keys)))
        else:
            query_counts = _both(query_counts, mask[:, 0, :, 0])
        mask = None
    query_segments = key_segments = None
    if query_ids is not None or query_counts is not None or key_counts is not None:
        shapes = (sizes.batch, sizes.queries), (sizes.batch, sizes.keys)
        counts = [
            jnp.ones(shape, bool) if x is None else jnp.broadcast_to(x, shape)
            for x, shape in zip((query_counts, key_counts), shapes, strict=True)
        ]
        query_segments, key_segments = _segments.canonical_segments(
            *map(_sharding.replicate, (query_ids, key_ids, *counts))
        )
        query_segments = _pad(query_segments, (1,), _segments.LONE_QUERY)
        key_segments = _pad(key_segments, (1,), _segments.LONE_KEY)
    visibility = Visibility(
        query_segments=query_segments,
        key_segments=key_segments,
        mask=None if mask is None else _pad_scores(_with_an_axis(mask, sizes).astype(jnp.int8), 0),
        bias=None if bias is None else _pad_scores(_with_an_axis(bias, sizes), _HIDDEN[bias.dtype.name]),
    )
    given = jax.tree.leaves(visibility) or window != (None, None)
    return window, visibility if given else None


def _both(a, b):
    """Both conditions, of which the first may be None."""
    return b if a is None else a & b


def _within(lengths, time):
    """[B, time]: the tokens before each length; None of None."""
    return None if lengths is None else jnp.arange(time, dtype=jnp.int32)[None, :] < lengths[:, None]


def _with_an_axis(x, sizes):
    """Repeat what is the same for all queries and keys along the queries (a mask) or keys (a bias): little memory."""
    if x.shape[2:] != (1, 1):
        return x
    shape = (*x.shape[:2], sizes.queries, 1) if sizes.queries > 1 else (*x.shape[:2], 1, sizes.keys)
    return jnp.broadcast_to(x, shape)


def _pad_scores(x, hides):
    """`hides` up to whole tiles along queries and keys, where these axes are not 1, so that tiles of it are skipped."""
    if x.shape[2:] == (1, 1):
        # One query and one key: any axis may be the long one.
        return _pad(x, (2,), hides)
    return _pad(x, [axis for axis in (2, 3) if x.shape[axis] > 1], hides)


def _pad(x, axes, value):
    """`value` up to a multiple of LENGTH_MULTIPLE along these axes."""
    widths = [(0, -size % LENGTH_MULTIPLE if axis in axes else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value) if any(after for _, after in widths) else x


def _check_window(window, sizes) -> Window:
    """(left, right), None where it limits nothing."""
    accepted = "an int or a pair (left, right) of ints that are not negative"
    if window is None:
        return None, None
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"local_window_size={window!r} has {len(pair)} parts: accepted is {accepted}")
    for side in pair:
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise TypeError(f"local_window_size={window!r} holds a {type(side).__name__}: accepted is {accepted}")
        if side < 0:
            raise ValueError(f"local_window_size={window!r}: accepted is {accepted}")
    left, right = map(int, pair)
    return left if left < sizes.queries - 1 else None, right if right < sizes.keys - 1 else None


def _check_scores_operand(name, x, dtypes, sizes):
    """Mask or bias as an array of rank 4 that broadcasts to [B, N, T, S]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.dtype.name not in dtypes:
        hints = dict(
            mask="; sagebwd_jax.flax.attention_fn takes Flax's masks of numbers",
            bias="; a boolean mask is passed as mask" if x.dtype == bool else "",
        )
        raise TypeError(f"{name} has dtype {x.dtype.name}: accepted are {', '.join(dtypes)}{hints[name]}")
    full = sizes.batch, sizes.heads, sizes.queries, sizes.keys
    shape = (1,) * (4 - x.ndim) + x.shape
    if x.ndim > 4 or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        raise ValueError(f"{name} has shape {x.shape}: accepted is what broadcasts to [B, N, T, S] = {full}")
    return x.reshape(shape)


def _check_integers(name, x) -> Any:
    """An array of integers; one of NumPy stays that, since JAX may keep but 32 of its 64 bits."""
    x = np.asarray(x) if isinstance(x, np.ndarray | np.generic | int) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype.name}: accepted are integers")
    return x


def _check_lengths(name, lengths, time, sizes):
    """[B] int32."""
    if lengths is None:
        return None
    lengths = _check_integers(name, lengths)
    if lengths.shape != (sizes.batch,) and (sizes.batched or lengths.shape != ()):
        raise ValueError(f"{name} has shape {lengths.shape}: accepted is [B] = {(sizes.batch,)}")
    if jnp.iinfo(lengths.dtype).max > jnp.iinfo(jnp.int32).max:
        # Else a length of 2^32 + 3 would be one of 3.
        lengths = lengths.clip(0, time)
    return jnp.asarray(lengths.astype(jnp.int32)).reshape(sizes.batch)


def _check_segments(query_ids, key_ids, sizes):
    """Both [B, time] integers, or None; queries' alone are also the keys' where these are as many."""
    if query_ids is None and key_ids is None:
        return None
    if key_ids is None and sizes.queries == sizes.keys:
        key_ids = query_ids
    if query_ids is None or key_ids is None:
        missing = "query_segment_ids" if query_ids is None else "key_value_segment_ids"
        raise ValueError(
            f"{missing} is None: query_segment_ids and key_value_segment_ids are accepted together, or, where T = S, "
            f"query_segment_ids alone for both; got T={sizes.queries} and S={sizes.keys}"
        )
    checked = []
    named = ("query_segment_ids", query_ids, "T", sizes.queries), ("key_value_segment_ids", key_ids, "S", sizes.keys)
    for name, ids, letter, time in named:
        ids = _check_integers(name, ids)
        if ids.shape != (sizes.batch, time) and (sizes.batched or ids.shape != (time,)):
            accepted = f"[B, {letter}] = {(sizes.batch, time)}" if sizes.batched else f"[{letter}] = {(time,)}"
            raise ValueError(f"{name} has shape {ids.shape}: accepted is {accepted}")
        checked.append(ids.reshape(sizes.batch, time))
    return checked
