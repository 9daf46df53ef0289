"""Q, K and V to INT8 on Hopper, each read once: what pallas_kernels/quantize.py and statistics.py do in six launches.

K's mean and V's largest values are those of a whole head. A block holds INPUT_ROWS tokens of one tensor in shared
memory, hands on what they add to them, and waits for the other blocks of the head before it rounds. Blocks of Q wait
for nobody and keep the memory busy meanwhile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import steps
from pallas_kernels.hopper import arrays, launch
from pallas_kernels.hopper.arrays import COLUMNS, ROWS, across, down, filled
from pallas_kernels.hopper.launch import fetch, matrix, tile_in
from pallas_kernels.hopper.tiles import GROUP, INPUT_ROWS

# What a block's tensor is: K, V, or else the Q of one query head of the key head's group.
K, V = 0, 1
# Blocks whose sums are read at a time.
UNROLLED = 8


def quantize_inputs(query, key, value, *, spec, keep_16_bits):
    """Q and K as INT8 [B, N, T, H] and [B, K, S, H] with scales, and V as turned INT8 [B, K, H, S] with scales.

    In this order: Q, its scale a token [B, N, T], which holds that of the logits in base 2; K less its mean, its scale
    per `block_k` tokens; V, its scale a channel [B, K, H]; with `keep_16_bits` K less its mean in bfloat16.
    """
    (_, queries, heads, depth), (_, keys, kv_heads, _) = query.shape, key.shape
    kinds = 2 + heads // kv_heads
    tiles = pl.cdiv(keys, INPUT_ROWS)

    def kernel(_, q_ref, k_ref, v_ref, *refs):
        outputs, sums_ref, scratch = refs[: 6 + keep_16_bits], refs[6 + keep_16_bits], refs[7 + keep_16_bits :]
        b, n, tile = launch.program()
        n, kind = lax.div(n, jnp.int32(kinds)), lax.rem(n, jnp.int32(kinds))
        block = functools.partial(_Block, b, tile * INPUT_ROWS, scratch)
        turns = launch.turns(q_ref.shape[0], 2 * kv_heads)

        def head_sums(tensor, own, combine):
            """`_sum_over_blocks`, for which K's heads come before V's."""
            number = n + tensor * kv_heads
            return _sum_over_blocks(sums_ref.at[b, number], turns.at[b, number], tile, tiles, own, combine)

        @pl.when((kind == K) & (tile < tiles))
        def _():
            sums = functools.partial(head_sums, K)
            _round_keys(block(n, k_ref, keys), outputs[2:4] + outputs[6:], sums, spec=spec)

        @pl.when((kind == V) & (tile < tiles))
        def _():
            _round_values(block(n, v_ref, keys), outputs[4:6], functools.partial(head_sums, V))

        @pl.when((kind > V) & (tile * INPUT_ROWS < queries))
        def _():
            head = n * (kinds - 2) + kind - 2
            _round_queries(block(head, q_ref, queries), outputs[:2], factor=spec.scale * steps.LOG2_E)

    def launch_all(query, key, value):
        batch = query.shape[0]
        shapes = [
            jax.ShapeDtypeStruct((batch, heads, queries, depth), jnp.int8),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, keys, depth), jnp.int8),
            jax.ShapeDtypeStruct((batch, kv_heads, keys // spec.config.block_k), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, depth, keys), jnp.int8),
            jax.ShapeDtypeStruct((batch, kv_heads, depth), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, keys, depth), jnp.bfloat16),
        ][: 6 + keep_16_bits]
        return launch.call_parts(
            [launch.Part(1, None, kernel)],
            "sagebwd_quantize_inputs",
            dict(batch=batch, head=kinds * kv_heads, tile=max(tiles, pl.cdiv(queries, INPUT_ROWS))),
            [query, key, value],
            [*shapes, jax.ShapeDtypeStruct((batch, 2 * kv_heads, tiles, depth), jnp.float32)],
            [
                matrix(INPUT_ROWS, depth, key.dtype),
                launch.either(matrix(GROUP, depth, jnp.int8, 2), matrix(depth, GROUP, jnp.int8, 2)),
                launch.vectors(1, depth, 1),
                launch.barriers(INPUT_ROWS // GROUP),
            ],
        )

    return launch.fold_vmap(launch_all)(query, key, value)[:-1]


class _Block:
    """The tokens of one tensor that a block has, GROUP at a time."""

    def __init__(self, batch, first, scratch, head, ref, length):
        self.at, self.first, self.length = (batch, head), first, length
        self.rows, (self.by_token, self.turned), self.vector, self.full = scratch
        self.chunks = jnp.minimum(INPUT_ROWS // GROUP, lax.div(length - first, jnp.int32(GROUP)))
        for i in range(INPUT_ROWS // GROUP):
            pl.when(i < self.chunks)(functools.partial(self._fetch, ref, i))

    def _fetch(self, ref, i):
        """Start the copy of the i-th."""
        tokens = pl.ds(self.first + i * GROUP, GROUP)
        fetch(tile_in("input", ref, *self.at, tokens), self.chunk(i), self.full.at[i])

    def chunk(self, i):
        """The i-th GROUP tokens."""
        return self.rows.at[pl.ds(i * GROUP, GROUP)]

    def reduce(self, step, start):
        """step(turned tile, total) over all, each as soon as it has come."""

        def one(i, total):
            launch.wait(self.full.at[i])
            return step(arrays.load_turned(self.chunk(i)), total)

        return lax.fori_loop(jnp.int32(0), self.chunks, one, start)

    def round(self, step, buffers, place, *, together=1, prepare=lambda first: None):
        """Write step(i, prepared) of each to `place`(tokens), by one of two buffers while the other one is copied.

        `prepared` is prepare(i) of the first of so many `together`.
        """

        @pl.loop(jnp.int32(0), lax.div(self.chunks, jnp.int32(together)))
        def _(some):
            prepared = prepare(some * together)
            for i in (some * together + one for one in range(together)):
                buffer = buffers.at[lax.rem(i, jnp.int32(2))]
                launch.stored(but=1)
                launch.store(buffer, place(pl.ds(self.first + i * GROUP, GROUP)), step(i, prepared))

        launch.stored()


def _sum_over_blocks(sums_ref, turn, tile, tiles, own, combine):
    """The sum, or what `combine` makes, of what all blocks of a head have in `own`, in the order of the blocks."""
    sums_ref[tile] = own
    launch.join(turn, tiles)

    def some(first, count, total):
        for x in [arrays.load_vector(sums_ref.at[first + i], ROWS) for i in range(count)]:
            total = combine(total, x)
        return total

    rounds, rest = divmod(tiles, UNROLLED)
    total = filled(own.shape, 0.0, ROWS)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(rounds), lambda i, total: some(i * UNROLLED, UNROLLED, total), total)
    return some(rounds * UNROLLED, rest, total)


def _round_keys(block, outputs, head_sums, *, spec):
    """K less its head's mean, one scale per `block_k` tokens."""
    int8_ref, scale_ref, *smooth_ref = outputs
    (b, n), depth = block.at, block.rows.shape[1]
    own = block.reduce(lambda x, total: total + x.sum(axis=1), filled((depth,), 0.0, ROWS))
    mean = head_sums(own, lambda x, y: x + y) * (1 / spec.key_length)
    # A sum over tokens comes in the order of a turned tile's rows.
    launch.write(block.vector.at[0, 0], mean)
    mean = arrays.load_vector(block.vector.at[0, 0], COLUMNS)

    together = spec.config.block_k // GROUP

    def smooth(i):
        x = arrays.load(block.chunk(i)) - down(mean, (GROUP, depth))
        if spec.key_length == block.length:
            return x
        exists = block.first + i * GROUP + arrays.row_numbers() < spec.key_length
        return x * across(jnp.where(exists, 1.0, 0.0), x.shape)

    def scale_of(first):
        tops = [jnp.abs(smooth(first + i)).max(axis=1).max(axis=0) for i in range(together)]
        scale, inverse = steps.scale_and_inverse(functools.reduce(jnp.maximum, tops))
        scale_ref[b, n, lax.div(block.first + first * GROUP, jnp.int32(spec.config.block_k))] = scale
        return inverse

    def step(i, inverse):
        x = smooth(i)
        if smooth_ref:
            # All warps have read it for the sums before they joined the other blocks.
            launch.store(block.chunk(i), smooth_ref[0].at[b, n, pl.ds(block.first + i * GROUP, GROUP)], x)
        return arrays.round_pairs_to_int8(x * inverse)

    place = functools.partial(tile_in, "k", int8_ref, b, n)
    block.round(step, block.by_token, place, together=together, prepare=scale_of)


def _round_values(block, outputs, head_sums):
    """V turned, one scale a channel."""
    int8_ref, scale_ref = outputs
    (b, n), depth = block.at, block.rows.shape[1]
    own = block.reduce(lambda x, total: jnp.maximum(total, jnp.abs(x).max(axis=1)), filled((depth,), 0.0, ROWS))
    scale, inverse = steps.scale_and_inverse(head_sums(own, jnp.maximum))

    @pl.when(block.first == 0)
    def _():
        scale_ref[b, n] = scale

    def step(i, _):
        x = arrays.load_turned(block.chunk(i))
        return arrays.round_to_int8(x * across(inverse, x.shape))

    block.round(step, block.turned, functools.partial(tile_in, "v_turned", int8_ref, b, n))


def _round_queries(block, outputs, *, factor):
    """factor * Q, one scale a token."""
    int8_ref, scale_ref = outputs
    b, n = block.at

    def step(i, _):
        launch.wait(block.full.at[i])
        x = arrays.load(block.chunk(i)) * factor
        scale, inverse = steps.scale_and_inverse(jnp.abs(x).max(axis=1))
        scale_ref[b, n, pl.ds(block.first + i * GROUP, GROUP)] = scale
        return arrays.round_pairs_to_int8(x * across(inverse, x.shape))

    block.round(step, block.by_token, functools.partial(tile_in, "q", int8_ref, b, n))
