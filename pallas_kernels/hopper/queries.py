"""What the Hopper kernels that own queries share: which block this is, and which keys and scores it sees."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import arrays, launch
from pallas_kernels.hopper.blocks import Blocks
from pallas_kernels.hopper.tiles import GROUP, Groups
from pallas_kernels.launch import target_cores
from sagebwd_jax._config import CallSpec


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """Blocks of a head's `queries`, which go through tiles of `span` keys; `group` query heads share a key head."""

    queries: int
    span: int
    group: int
    layout: Groups
    spec: CallSpec

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.layout.groups * GROUP

    def key_head(self, head):
        """The key head of a query head."""
        return lax.div(head, jnp.int32(self.group))

    def dealt(self, batch, heads, *streams) -> Blocks:
        """All blocks, in the order that they are taken; `streams` are what all blocks of a head read."""
        tiles = range(pl.cdiv(self.queries, self.rows))
        steps = [int(self._key_tiles(self.queries - tile * self.rows)) for tile in tiles]
        return Blocks.make(batch, heads, steps, streams, target_cores())

    def of(self, at):
        """The first query of a block `at` (batch, head, tile), and how many tiles of keys its rows see.

        Tiles count from the end, so that causal blocks with the most keys come first and one that is not full has the
        fewest. Its rows begin before 0.
        """
        end = self.queries - at[2] * self.rows
        return end - self.rows, self._key_tiles(end)

    def of_group(self, index, at):
        """The first query of a group of a block, and how many tiles of keys that group and the block see."""
        first, tiles = self.of(at)
        # A group before the first query repeats rows of another.
        first = jnp.clip(first + index * GROUP, 0, self.queries - GROUP)
        return first, jnp.minimum(tiles, self._key_tiles(first + GROUP)) if self.spec.is_causal else tiles, tiles

    def rows_of(self, index, at):
        """(batch, head, the rows) of a group of a block."""
        return at[0], at[1], pl.ds(self.of_group(index, at)[0], GROUP)

    def _key_tiles(self, end):
        """How many tiles of keys the queries before `end`, known or not, see."""
        count = pl.cdiv(self.spec.key_length, self.span)
        if not self.spec.is_causal:
            return count if isinstance(end, int) else jnp.int32(count)
        if isinstance(end, int):
            return min(count, pl.cdiv(end, self.span))
        return jnp.minimum(count, pl.cdiv(end, jnp.int32(self.span)))


def skip_keys(first, end, base, rings, *, layout: Groups):
    """Free the tiles of keys first..end-1, which other groups of the block see.

    `rings` are pairs of the barriers that say that what a tile holds has come, and those that free it.
    """

    @pl.loop(first, end)
    def _(step):
        slot = launch.slot_of(base + step, layout)
        for full, free in rings:
            for barrier in full:
                launch.wait(barrier.at[slot])
            launch.arrive(free.at[slot])


def hides(spec, span) -> bool:
    """Whether some of a group's last tile of keys may be hidden; of those before it none are."""
    return spec.is_causal or spec.key_length % span != 0


def over_keys(body, carry, count, span, *, spec):
    """body(tile, carry, edge) over `count` tiles of keys, the last one as an `edge` if it `hides` some.

    It is not in the loop: a branch there, or a second loop, takes more than its code.
    """
    loop = functools.partial(body, edge=False)
    if not hides(spec, span):
        return lax.fori_loop(jnp.int32(0), count, loop, carry)
    return body(last_of(count), lax.fori_loop(jnp.int32(0), count - 1, loop, carry), edge=True)


def last_of(count):
    """The last of `count` tiles; what is made of it is not kept in registers while the others are gone through."""
    return lax.optimization_barrier(count - 1)


def hide(x, hidden, first, tile, span, *, spec):
    """Scores of queries from `first` on, but `hidden` where a key does not count or is later."""
    numbers = arrays.row_numbers()
    limit = numbers + first if spec.is_causal else numbers * 0 + spec.key_length
    return arrays.hide(x, jnp.minimum(limit, spec.key_length - 1) - tile * span, hidden)
