"""What the Hopper kernels that own queries share: which block this is, and which keys and scores it sees."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import launch


def query_block(grid, rows, queries, span, *, spec):
    """(batch, head, first query) of this block of `rows`, and how many tiles of `span` keys its queries see."""
    b, n, tile = launch.program(grid)
    # Causal blocks with the most keys first: a shorter tail of the launch.
    tile = grid[2] - 1 - tile if spec.is_causal else tile
    count = jnp.int32(pl.cdiv(spec.key_length, span))
    if spec.is_causal:
        count = jnp.minimum(count, pl.cdiv(jnp.minimum((tile + 1) * rows, queries), jnp.int32(span)))
    return b, n, tile * rows, count


def over_keys(body, carry, first, count, span, *, spec):
    """body(tile, carry, edge=...) over `count` tiles of keys, whole ones first, for the queries from `first` on."""
    whole = jnp.int32(spec.key_length // span)
    if spec.is_causal:
        whole = jnp.minimum(whole, lax.div(first + 1, jnp.int32(span)))
    carry = lax.fori_loop(jnp.int32(0), whole, functools.partial(body, edge=False), carry)
    return lax.fori_loop(whole, count, functools.partial(body, edge=True), carry)


def hide(x, hidden, first, first_key, *, spec):
    """A tile from query `first` and key `first_key` on, but `hidden` where a key does not count or is later."""
    last = jnp.int32(spec.key_length - 1)
    numbers = launch.row_numbers()
    limit = jnp.minimum(numbers + first, last) if spec.is_causal else numbers * 0 + last
    return launch.hide(x, limit - first_key, hidden)
