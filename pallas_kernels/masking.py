"""Masks and bias in the kernels: which tiles of scores a program visits, and which scores of a tile count.

A kernel owns a tile of queries (forward, dQ) or of keys (dK, dV) and visits tiles of the other axis. Those that hold no
score that counts are skipped at both ends; a run of tiles whose scores all count needs no masks. Both come from a small
table that XLA makes: a window of W costs O(T W), packed documents the sum of their squares.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import steps
from pallas_kernels.launch import Tile
from sagebwd_jax._config import LENGTH_MULTIPLE, CallSpec

# A bias at or below it hides the score, as -inf and the least bfloat16 or float32 do: beside it a logit is lost to
# float32's rounding anyway. The least float16 is far above it, so a bias of that type has its own.
HIDING_BIAS = -1e20
HIDING_FLOAT16 = -65504.0


def hides(bias):
    """Where a bias, as it was given or of its type's values in float32, hides the score; NaN does not."""
    return bias <= jnp.asarray(hiding_bias(bias.dtype), bias.dtype)


def hiding_bias(dtype):
    """The largest bias of this type that hides a score."""
    return HIDING_FLOAT16 if dtype == jnp.float16 else HIDING_BIAS


def tile_ranges(visibility, *, spec, tile: Tile, owns_keys):
    """[b, n, tiles, 4], int32: of each owned tile, (first, whole, whole_end, end) of the tiles that it visits.

    No score outside of first..end-1 counts; all scores within whole..whole_end-1 do.
    """
    some, every = _interacting(visibility, spec=spec, tile=tile)
    if owns_keys:
        some, every = some.swapaxes(2, 3), every.swapaxes(2, 3)
    count = some.shape[3]
    places = lax.broadcasted_iota(jnp.int32, some.shape, 3)
    end = jnp.where(some, places + 1, 0).max(3)
    first = jnp.minimum(jnp.where(some, places, count).min(3), end)
    whole = jnp.minimum(jnp.where(every, places, count).min(3), end)
    after = ~every & (places > whole[..., None])
    whole_end = jnp.minimum(jnp.where(after, places, count).min(3), end)
    return jnp.stack([first, whole, whole_end, end], axis=-1)


def _interacting(visibility, *, spec, tile):
    """[b, n, tiles of queries, tiles of keys]: whether any score of a tile may count, and whether all do."""
    # As many tiles as the operands hold, which are padded.
    rows = -(-spec.query_length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE // tile.block_q
    cols = -(-spec.key_length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE // tile.block_k
    first_row, first_col = jnp.arange(rows)[:, None] * tile.block_q, jnp.arange(cols)[None, :] * tile.block_k
    last_row, last_col = first_row + tile.block_q - 1, first_col + tile.block_k - 1
    some = (first_row < spec.query_length) & (first_col < spec.key_length)
    every = jnp.broadcast_to(last_col < spec.key_length, (rows, cols))
    left, right = spec.reach
    if left is not None:
        some, every = some & (last_col >= first_row - left), every & (first_col >= last_row - left)
    if right is not None:
        some, every = some & (first_col <= last_row + right), every & (last_col <= first_row + right)
    some, every = some[None, None], every[None, None]
    if visibility.query_segments is not None:
        q_min, q_max, q_all = _extent(visibility.query_segments, tile.block_q, rows)
        k_min, k_max, k_all = _extent(visibility.key_segments, tile.block_k, cols)
        q_min, q_max, q_all = (x[:, None, :, None] for x in (q_min, q_max, q_all))
        k_min, k_max, k_all = (x[:, None, None, :] for x in (k_min, k_max, k_all))
        some = some & (q_min <= k_max) & (k_min <= q_max)
        every = every & q_all & k_all & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    counting = [] if visibility.mask is None else [visibility.mask != 0]
    counting += [] if visibility.bias is None else [~hides(visibility.bias)]
    for counts in counting:
        tiles = _tiles(_tiles(counts, 3, tile.block_k, cols), 2, tile.block_q, rows)
        some, every = some & tiles.any((3, 5)), every & tiles.all((3, 5))
    return some, every


def _tiles(x, axis, block, count):
    """Cut `axis` into [count, block], or into [1, 1] where it is 1."""
    if x.shape[axis] == 1:
        count = block = 1
    x = lax.slice_in_dim(x, 0, count * block, axis=axis)
    return x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])


def _extent(segments, block, count):
    """Least and largest segment of each tile [B, count], and whether none of its tokens is without one."""
    tiles = _tiles(segments, 1, block, count)
    counts = tiles >= 0
    largest = jnp.iinfo(jnp.int32).max
    return jnp.where(counts, tiles, largest).min(2), jnp.where(counts, tiles, -1).max(2), counts.all(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileMasks:
    """What a kernel reads of the masks, and how it reads it; made by `make`.

    Attributes:
      operands: by name, each array and its BlockSpec, to be added to the kernel's inputs.
      axes: of mask and bias, whether heads, queries and keys are axes or all alike.
    """

    spec: CallSpec
    tile: Tile
    owns_keys: bool
    operands: dict[str, tuple[jax.Array, pl.BlockSpec]]
    axes: dict[str, tuple[bool, bool, bool]]
    bias_dtype: Any

    @classmethod
    def make(cls, visibility, *, spec, tile: Tile, owns_keys=False, group=1):
        """For a kernel whose program (i, n, b) owns queries of head n, or keys of the `group` heads of key head n."""
        owned, block_spec = _key_blocks(tile, group) if owns_keys else _query_blocks(tile)
        ranges = tile_ranges(visibility, spec=spec, tile=tile, owns_keys=owns_keys)
        operands = dict(ranges=(ranges, owned(ranges)))
        if visibility.query_segments is not None:
            whole = {True: visibility.query_segments, False: visibility.key_segments}[owns_keys]
            blocks = [
                pl.BlockSpec((None, tile.block_k if owns_keys else tile.block_q), lambda i, n, b: (b, i)),
                pl.BlockSpec((None, whole.shape[1]), lambda i, n, b: (b, 0)),
            ]
            names = ["query_segments", "key_segments"]
            for name, block in zip(reversed(names) if owns_keys else names, blocks, strict=True):
                operands[name] = getattr(visibility, name), block
        axes = {}
        for name in ("mask", "bias"):
            x = getattr(visibility, name)
            if x is not None:
                operands[name] = x, block_spec(x)
                axes[name] = x.shape[1] > 1, x.shape[2] > 1, x.shape[3] > 1
        bias_dtype = None if visibility.bias is None else visibility.bias.dtype
        return cls(spec=spec, tile=tile, owns_keys=owns_keys, operands=operands, axes=axes, bias_dtype=bias_dtype)

    def loop(self, body, carry, refs, g=0):
        """Run body(tile, carry, following, edge) over the tiles that this program visits, for head g of its group.

        Those that need masks come first, so that the accumulator of a 16-bit product does not pass from the main loop
        to another use (see `steps.key_phases`).
        """
        ranges = refs["ranges"]
        at = (g if ranges.shape[0] > 1 else 0,) if self.owns_keys else ()
        first, whole, whole_end, end = (ranges[(*at, place)] for place in range(4))

        def edge(place, carry):
            # The tiles before the whole ones, then those after them.
            visited = jnp.where(place < whole - first, first + place, whole_end + place - (whole - first))
            return body(visited, carry, following=None, edge=True)

        carry = lax.fori_loop(0, whole - first + end - whole_end, edge, carry)
        return lax.fori_loop(whole, whole_end, functools.partial(body, following=None, edge=False), carry)

    def clear_skipped(self, out_ref, refs):
        """Zero the tiles of [block_q, S] that `loop` does not visit; for kernels that own queries."""
        block = self.tile.block_k
        zeros = jnp.zeros((self.tile.block_q, block), out_ref.dtype)

        def clear(j, carry):
            out_ref[:, pl.ds(j * block, block)] = zeros
            return carry

        first, end = refs["ranges"][0], refs["ranges"][3]
        lax.fori_loop(0, first, clear, 0)
        lax.fori_loop(end, out_ref.shape[1] // block, clear, 0)

    def tile_of(self, refs, i, j, *, edge, g=0):
        """Of the tile of scores (i, j): which count, None for all, and the bias in base 2, None for none.

        Both are [queries, keys], turned where the kernel owns keys, with axes of 1 that broadcast.
        """
        bias = self._scores_operand("bias", refs, i, j, g)
        seen = None
        if edge:
            seen = steps.visible(
                (j if self.owns_keys else i) * (self.tile.block_k if self.owns_keys else self.tile.block_q),
                (i if self.owns_keys else j) * (self.tile.block_q if self.owns_keys else self.tile.block_k),
                (self.tile.block_k, self.tile.block_q) if self.owns_keys else (self.tile.block_q, self.tile.block_k),
                is_causal=False,
                key_length=self.spec.key_length,
                rows_are_queries=not self.owns_keys,
                reach=self.spec.reach,
            )
            if "query_segments" in refs:
                seen = seen & self._same_segment(refs, i, j)
            mask = self._scores_operand("mask", refs, i, j, g)
            if mask is not None:
                seen = seen & (mask.astype(jnp.int32) != 0)
            if bias is not None:
                seen = seen & ~(bias <= hiding_bias(self.bias_dtype))
        return seen, None if bias is None else bias * steps.LOG2_E

    def _same_segment(self, refs, i, j):
        """Whether query and key are of one segment."""
        queries, keys = refs["query_segments"], refs["key_segments"]
        if self.owns_keys:
            rows = pl.ds(i * self.tile.block_q, self.tile.block_q)
            return keys[...][:, None] == queries[rows][None, :]
        cols = pl.ds(j * self.tile.block_k, self.tile.block_k)
        return queries[...][:, None] == keys[cols][None, :]

    def _scores_operand(self, name, refs, i, j, g):
        """A tile of mask or bias, bias in float32; None if there is none."""
        if name not in self.axes:
            return None
        ref = refs[name]
        by_head, by_query, by_key = self.axes[name]
        if self.owns_keys:
            rows = pl.ds(i * self.tile.block_q, self.tile.block_q)
            x = ref[(g if by_head else 0, *[rows] * by_query, *[slice(None)] * by_key)]
        else:
            cols = pl.ds(j * self.tile.block_k, self.tile.block_k)
            x = ref[(*[slice(None)] * by_query, *[cols] * by_key)]
        x = x.astype(jnp.float32) if name == "bias" else x
        if by_query and by_key:
            return x.swapaxes(0, 1) if self.owns_keys else x
        return x[:, None] if by_query != self.owns_keys else x[None, :]


def _query_blocks(tile):
    """BlockSpecs of the ranges, and of mask or bias, for kernels that own queries."""

    def ranges(x):
        by_batch, by_head = (int(size > 1) for size in x.shape[:2])
        return pl.BlockSpec((None, None, None, 4), lambda i, n, b: (b * by_batch, n * by_head, i, 0))

    def scores(x):
        by_batch, by_head, by_query, by_key = (int(size > 1) for size in x.shape)
        block = None, None, tile.block_q if by_query else None, x.shape[3] if by_key else None
        return pl.BlockSpec(block, lambda i, n, b: (b * by_batch, n * by_head, i * by_query, 0))

    return ranges, scores


def _key_blocks(tile, group):
    """The same for kernels that own keys of a group of heads, whose axis stays."""

    def ranges(x):
        by_batch, by_head = (int(size > 1) for size in x.shape[:2])
        block = None, group if by_head else 1, None, 4
        return pl.BlockSpec(block, lambda j, n, b: (b * by_batch, n * by_head, j, 0))

    def scores(x):
        by_batch, by_head, by_query, by_key = (int(size > 1) for size in x.shape)
        block = None, group if by_head else 1, x.shape[2] if by_query else None, tile.block_k if by_key else None
        return pl.BlockSpec(block, lambda j, n, b: (b * by_batch, n * by_head, 0, j * by_key))

    return ranges, scores
