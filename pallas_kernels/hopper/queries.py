"""What the Hopper kernels that own queries share: which block this is, and which keys and scores it sees."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import arrays, launch


def query_block(tiles, rows, queries, span, group, *, spec):
    """(batch, head, its key head, first query) of this block of `tiles`, and how many tiles of keys its rows see."""
    b, n, tile = launch.program()
    # Causal blocks with the most keys first: a shorter tail of the launch.
    tile = tiles - 1 - tile if spec.is_causal else tile
    count = jnp.int32(pl.cdiv(spec.key_length, span))
    if spec.is_causal:
        count = jnp.minimum(count, pl.cdiv(jnp.minimum((tile + 1) * rows, queries), jnp.int32(span)))
    return b, n, lax.div(n, jnp.int32(group)), tile * rows, count


def over_keys(body, carry, first, count, span, *, int8, depth, spec):
    """body(tile, carry, edge) over `count` tiles of keys for queries from `first` on; see query_block and `hide`."""
    whole = jnp.int32(spec.key_length // span)
    if spec.is_causal:
        whole = jnp.minimum(whole, lax.div(first + 1, jnp.int32(span)))
    elif spec.key_length % span == 0:
        return lax.fori_loop(jnp.int32(0), count, functools.partial(body, edge=False), carry)
    if arrays.branches(int8, depth):
        return lax.fori_loop(jnp.int32(0), count, lambda tile, carry: body(tile, carry, edge=tile >= whole), carry)
    carry = lax.fori_loop(jnp.int32(0), whole, functools.partial(body, edge=False), carry)
    return lax.fori_loop(whole, count, functools.partial(body, edge=True), carry)


def hide(x, hidden, first, tile, span, edge, *, spec):
    """Scores of queries from `first` on, but `hidden` where a key does not count or is later, if any does: `edge`."""
    numbers = arrays.row_numbers()
    limit = numbers + first if spec.is_causal else numbers * 0 + spec.key_length
    return arrays.hide_if(edge, x, jnp.minimum(limit, spec.key_length - 1) - tile * span, hidden)
