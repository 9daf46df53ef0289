"""Steps that forward and backward share, most of them with the plain JAX implementation too.

Scores are in base 2 everywhere: log2(e) and the logits' scale are part of Q's scale.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import ptx

INT8_MAX = 127
INT16_MAX = 32767
LOG2_E = math.log2(math.e)
LOG2_INT8_MAX = math.log2(INT8_MAX)
# The softmax shift of a row that has seen no key yet, and the log-sum-exp of a query that does not count: 2^(s - it) is
# 0 for any finite score s.
NO_SCORE = -1e30
NO_QUERY = 1e30
# The least maximum of a row of P or dS: 127 / it is still a float32. It only replaces zeros and denormals.
TINIEST = 1e-36
# How far the softmax shift may lag behind the running maximum, in powers of two. A tile that lies lower adds less than
# 2^-64 of the sum, and 2^64 times a row's largest INT32 sum is far from float32's end.
MAX_LAG = 64.0


def magnitude(x):
    """|x|, infinite where x is NaN, so that a maximum over it cannot lose a NaN."""
    size = jnp.abs(x)
    return jnp.where(size < jnp.inf, size, jnp.inf)


def scale_and_inverse(absmax, largest=INT8_MAX):
    """absmax/127 and its inverse: 0 and 0 of zero, NaN of what is not finite."""
    scale = jnp.where(absmax < jnp.inf, absmax * (1 / largest), jnp.nan)
    # The floor keeps the inverse of a denormal finite.
    return scale, jnp.where(absmax > 0, largest / jnp.maximum(absmax, TINIEST), 0.0)


def advance_shift(peak, shift, tile_peak):
    """The softmax shift for the next tile of keys: (running maximum, shift, factor for sums made with the old shift).

    The shift is the tile's own row maximum, so that the largest entry of each row of P is always 127, not the running
    maximum, whose rows of P fade as the maximum grows. The factor can thus be above 1.
    """
    peak = jnp.maximum(peak, tile_peak)
    new_shift = jnp.maximum(tile_peak, peak - MAX_LAG)
    return peak, new_shift, jnp.exp2(shift - new_shift)


def visible(first_row, first_col, shape, *, is_causal, key_length, rows_are_queries, reach=(None, None)):
    """Which scores of a tile count: keys that exist, if causal are not after the query, and are within its reach.

    `reach` is (left, right): query i sees keys i-left..i+right, None for no limit.
    """
    rows = first_row + lax.broadcasted_iota(jnp.int32, shape, 0)
    cols = first_col + lax.broadcasted_iota(jnp.int32, shape, 1)
    queries, keys = (rows, cols) if rows_are_queries else (cols, rows)
    counts = keys < key_length
    left, right = reach
    if left is not None:
        counts = counts & (keys >= queries - left)
    if right is not None:
        counts = counts & (keys <= queries + right)
    return counts & (queries >= keys) if is_causal else counts


def swizzle16(x):
    """Permute the last axis in groups of 16: place 8h + 2t + e goes to 4t + 2h + e.

    A tile of scores leaves the tensor core with columns 2t, 2t+1, 8+2t, 9+2t in thread t; as an INT8 left operand it
    must have four neighbours 4t..4t+3 there. A sum over the axis does not care about order, so both operands are
    relabelled and no value leaves its thread. The right operand is permuted once, when it is quantised.
    """
    *lead, length = x.shape
    axes = range(len(lead))
    n = len(lead)
    groups = x.reshape(*lead, length // 16, 2, 4, 2)
    return groups.transpose(*axes, n, n + 2, n + 1, n + 3).reshape(x.shape)


def dot_int8(a, b):
    """a b^T with INT32 sums, both [rows, summed]: INT8 tensor cores take no other order. At most 127^2 * 128 < 2^31."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)


def dot_16(a, b, *, b_is_turned=False):
    """a b^T, or a b if `b_is_turned`, of 16-bit operands with float32 sums."""
    contract = ((1,), (0,)) if b_is_turned else ((1,), (1,))
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def score_tile(a, b):
    """Q K^T or K Q^T before its scales, whichever type the operands have."""
    return dot_int8(a, b) if a.dtype == jnp.int8 else dot_16(a, b)


def quantize_row(x, *, whole_tile=False):
    """A tile of P or dS as swizzled int8, and the scale [rows] of its rows."""
    top = jnp.maximum(jnp.max(jnp.abs(x), axis=1), TINIEST)
    if whole_tile:
        top = jnp.full_like(top, jnp.max(top))
    factor = ptx.reciprocal(top) * INT8_MAX
    return swizzle16(ptx.round_to_int8(x * factor[:, None])), top * (1 / INT8_MAX)


class Phase(NamedTuple):
    """Tiles first..end-1 of a program's loop: whether their scores need masks, and whether it is one tile at most."""

    first: jax.Array | int
    end: jax.Array | int
    edge: bool
    single: bool = False


def loop_tiles(body, carry, phases):
    """Run body(tile, carry, following, edge) over the phases; `following` is the tile after it, or one that exists.

    A single tile is not made a loop: from a loop the compiler would hoist the positions that masks compare, and hold
    them in registers (forward, depth 64: 204 registers instead of 134).
    """
    for phase, later in zip(phases, [*phases[1:], None], strict=True):
        step = functools.partial(_step, body, phase, later)
        known = isinstance(phase.first, int) and isinstance(phase.end, int)
        if known and phase.first >= phase.end:
            continue
        # The lowering takes no branch whose condition is known.
        if phase.single and known:
            carry = step(phase.first, carry)
        elif phase.single:
            carry = lax.cond(phase.first < phase.end, functools.partial(step, phase.first), lambda c: c, carry)
        else:
            carry = lax.fori_loop(phase.first, phase.end, step, carry)
    return carry


def _step(body, phase, later, tile, carry):
    """One tile of a phase, told which tile comes after it: in this phase or in the one `later`."""
    if later is None:
        following = _existing(tile + 1, phase.end)
    else:
        following = _existing(later.first, later.end)
        if not phase.single:
            following = jnp.where(tile + 1 < phase.end, tile + 1, following)
    return body(tile, carry, following=following, edge=phase.edge)


def first_tile(phases):
    """The tile that `loop_tiles` starts with, or one that exists if all phases are empty."""
    first, end, *_ = phases[0]
    for phase in phases[1:]:
        first = lax.select(first < end, _int32(first), _int32(phase.first))
        end = jnp.maximum(_int32(end), _int32(phase.end))
    return _existing(first, end)


def _existing(tile, end):
    """A tile in 0..end-1: what is read ahead must lie within its operand, also where nothing follows."""
    return jnp.maximum(jnp.minimum(_int32(tile), _int32(end) - 1), 0)


def _int32(x):
    """A Python number or a traced one as the one type that the lowering compares."""
    return jnp.asarray(x, jnp.int32)


def key_phases(query_tile, block_q, block_k, *, is_causal, key_length):
    """The phases of a program that owns a tile of queries: tiles of keys that need masks, then whole ones.

    In this order an accumulator of a 16-bit product does not pass from the main loop to another use, for which the
    compiler would wait for every product of the loop (ptxas C7515).
    """
    whole, end = key_length // block_k, pl.cdiv(key_length, block_k)
    if is_causal:
        whole = jnp.minimum(whole, (query_tile * block_q + 1) // block_k)
        end = jnp.minimum(end, pl.cdiv((query_tile + 1) * block_q, block_k))
    return [Phase(whole, end, True, single=block_q <= block_k), Phase(0, whole, False)]


def query_phases(key_tile, block_q, block_k, *, is_causal, query_length, mask_all):
    """The phases of a program that owns a tile of keys: tiles of queries that need masks, then whole ones.

    Queries that do not count need none: their log-sum-exp is NO_QUERY, so that their row of P is 0.
    """
    end = pl.cdiv(query_length, block_q)
    if not is_causal:
        return [Phase(0, end, mask_all)]
    first = jnp.minimum(key_tile * block_k // block_q, end)
    whole = jnp.minimum(pl.cdiv((key_tile + 1) * block_k - 1, block_q), end)
    return [Phase(first, whole, True, single=block_k <= block_q), Phase(whole, end, mask_all)]
