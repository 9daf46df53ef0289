"""The kernel of dQ, dK and dV at once on Hopper, all three of INT8 products: a tile's P and dP are made once.

A block owns 128 keys. Two warp groups make P^T and dS^T of 64 keys each, and add to their dK and dV; a third rounds dS
by query and makes the block's part of dQ, which the last adds to memory, block after block in an order that is fixed.
May be changed: how a tile is computed, and that order, if it stays one. Must stay: a key's rows of P and of dS are
rounded over SPAN queries, a query's row of dS over GROUP keys.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import steps
from pallas_kernels.hopper import arrays, launch
from pallas_kernels.hopper.arrays import COLUMNS, down, filled, turned
from pallas_kernels.hopper.blocks import MOST_PLANNED, Blocks, largest_divisor
from pallas_kernels.hopper.launch import fetch, matrix
from pallas_kernels.hopper.tiles import GROUP, Groups
from pallas_kernels.launch import target_cores
from sagebwd_jax._config import CallSpec

# Queries of a tile, and the groups that own keys.
SPAN, OWNERS = 64, 2
# A team's programs must be on the GPU at once, where another program, or fewer multiprocessors than the call was
# compiled for, may leave room for a part of all.
MOST_TEAMS = 4
# Registers of a thread of the owners and of the group that makes dQ. With these no loop spills.
OWNER_REGISTERS, SUM_REGISTERS = 184, 112
# Tiles of dS, and of dQ, that may wait for the next group.
WAITING = 2
STREAMS = ("q", "q_turned", "dout", "dout_turned")
VECTORS = ("q_scale", "shift", "factor", "delta")


def grad_qkv(ops, *, spec, layout: Groups, out_dtype):
    """dQ [B, T, N, H], dK and dV [B, S, K, H]; `ops` is a `BackwardOperands` (pallas_kernels/attention.py)."""
    _, keys, kv_heads, depth = ops.v.shape
    queries, heads = ops.dout.shape[1:3]
    blocks = keys // (OWNERS * GROUP)
    # One P serves both sums over queries: its rows hold dO's scale, for dV, so dS takes Q's for dK over dO's.
    q_scale, factor = _factors(ops.q_scale, ops.dout_scale)
    inputs = dict(k=ops.k, v=ops.v, k_turned=ops.k_turned, q=ops.q, q_turned=ops.q_turned)
    inputs |= dict(dout=ops.dout, dout_turned=ops.dout_turned, q_scale=ops.q_scale, shift=ops.shift_dv)
    inputs |= dict(factor=factor, delta=ops.delta * factor, k_scale=ops.k_scale, poison=ops.poison)
    scratch = _scratch(depth, ops.dout.dtype, layout.stages)
    sizes = _Sizes(queries // SPAN, blocks, heads // kv_heads, layout, spec)

    def run(work, mine, group, *refs):
        outputs, held = refs[len(inputs) : len(inputs) + 3], refs[len(inputs) + 3 :]
        named = dict(zip(inputs, refs, strict=False)), outputs, dict(zip(scratch, held, strict=True))
        work(sizes, mine, group, *named)

    parts = (
        launch.Part(OWNERS, OWNER_REGISTERS, functools.partial(run, _own_keys)),
        launch.Part(1, SUM_REGISTERS, functools.partial(run, _sum_keys)),
        launch.Part(1, launch.COPY_REGISTERS, functools.partial(run, _copy)),
    )

    def launch_all(*operands):
        batch = operands[0].shape[0]
        of_keys = jax.ShapeDtypeStruct((batch, keys, kv_heads, depth), out_dtype)
        return launch.stay(
            parts,
            "sagebwd_grad_qkv",
            sizes.dealt(batch, kv_heads, target_cores()),
            operands,
            [of_keys, of_keys, jax.ShapeDtypeStruct((batch, queries, heads, depth), jnp.float32)],
            list(scratch.values()),
        )

    dk, dv, dq = launch.fold_vmap(launch_all)(*inputs.values())
    # NaN where a row's operands are not finite, as in the Triton kernels, whose maximum of a row loses it.
    factor = spec.scale / q_scale + (ops.delta * 0 + ops.lse * 0)
    return (dq * factor.swapaxes(1, 2)[..., None]).astype(out_dtype), dk, dv


def _factors(q_scale, dout_scale):
    """Q's scale, or a head's largest where it is 0, and that over dO's scale, 0 where there is none: both [B, N, T]."""
    largest = q_scale.max(-1, keepdims=True)
    # dS of a query that is 0 counts for dQ alone, but lies in rows that are rounded for dK.
    q_scale = jnp.where(q_scale == 0, jnp.where(largest == 0, 1.0, largest), q_scale)
    return q_scale, jnp.where(dout_scale < steps.TINIEST, 0.0, q_scale / jnp.maximum(dout_scale, steps.TINIEST))


def _scratch(depth, dtype, stages):
    """Buffers and barriers of a block, by name."""
    ring = launch.barriers
    return dict(
        k_own=matrix(GROUP, depth, jnp.int8, OWNERS),
        v_own=matrix(GROUP, depth, dtype, OWNERS),
        k_turned_own=matrix(depth, GROUP, jnp.int8, OWNERS),
        result=matrix(GROUP, depth, dtype, OWNERS),
        q=matrix(SPAN, depth, jnp.int8, stages),
        q_turned=matrix(depth, SPAN, jnp.int8, stages),
        dout=matrix(SPAN, depth, dtype, stages),
        dout_turned=matrix(depth, SPAN, jnp.int8, stages),
        vectors=launch.vectors(len(VECTORS), SPAN, stages),
        ds=matrix(GROUP, SPAN, dtype, WAITING, OWNERS),
        dq=matrix(SPAN, depth, jnp.float32, WAITING),
        own=ring(OWNERS, arrivals=2),
        turned_own=ring(1, arrivals=OWNERS),
        full=ring(stages, arrivals=len(STREAMS) + len(VECTORS)),
        free=ring(stages, arrivals=OWNERS),
        ds_full=ring(WAITING, arrivals=OWNERS),
        ds_free=ring(WAITING),
        dq_full=ring(WAITING),
        dq_free=ring(WAITING),
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Tiles of queries, blocks of keys, query heads a key head, the ring, and the call."""

    tiles: int
    blocks: int
    group: int
    layout: Groups
    spec: CallSpec

    def dealt(self, batch, kv_heads, cores) -> Blocks:
        """All blocks, in the order that they are taken.

        Of as many heads as a team runs at once they alternate: blocks of one head that start together would wait for
        their turns, one after another. A block waits for blocks of its head before it alone, so of its team; where a
        program takes one block, for programs that began before it.
        """
        steps = [(self.tiles - int(self.first_tile(self.place(i)))) * self.group for i in range(self.blocks)]
        total = batch * kv_heads * self.blocks
        teams = max(n for n in range(1, MOST_TEAMS + 1) if cores % n == 0 and batch * kv_heads % n == 0)
        if teams == 1 or not cores < total <= MOST_PLANNED:
            return Blocks(batch, kv_heads, tuple(steps), side=1, programs=total)
        side = largest_divisor(batch * kv_heads // teams, max(cores // teams // self.blocks, 1))
        return Blocks(batch, kv_heads, tuple(steps), side, cores, teams)

    def place(self, number):
        """Which block of keys comes so many-th: causal ones begin with the fewest tiles.

        Each begins with its first tile of queries, so none ever has to wait for its turn on one that begins later.
        """
        return self.blocks - 1 - number if self.spec.is_causal else number

    def first_tile(self, block):
        """The first tile of queries that sees keys of a block, a number that is known or one that is not."""
        if not self.spec.is_causal:
            return block * 0
        lower = min if isinstance(block, int) else jnp.minimum
        return lower(block * (OWNERS * GROUP // SPAN), self.tiles - 1)


class _Block:
    """Where a block of keys is, and the tiles of queries that it goes through."""

    def __init__(self, sizes: _Sizes, at):
        self.sizes = sizes
        self.batch, self.head, number = at
        self.block = sizes.place(number)
        self.first_key = self.block * (OWNERS * GROUP)
        self.first = sizes.first_tile(self.block)
        self.per_head = jnp.int32(sizes.tiles) - self.first
        self.steps = self.per_head * sizes.group

    def at(self, step):
        """(head, tile of queries) of a step."""
        if self.sizes.group == 1:
            return self.head, self.first + step
        g, tile = lax.div(step, self.per_head), lax.rem(step, self.per_head)
        return self.head * self.sizes.group + g, self.first + tile

    def earlier(self, tile):
        """How many blocks add to a tile of queries before this one."""
        if not self.sizes.spec.is_causal:
            return self.block
        last = jnp.int32(self.sizes.blocks - 1)
        seen = jnp.minimum(lax.div((tile + 1) * SPAN - 1, jnp.int32(OWNERS * GROUP)), last)
        # Blocks past the last query go through the last tile, in which they see nothing.
        return jnp.where(tile == self.sizes.tiles - 1, last, seen) - self.block

    def hide(self, p, first_key, tile):
        """P^T of keys from `first_key` on, but 0 where a key does not count or is after the query."""
        spec, numbers = self.sizes.spec, arrays.row_numbers() + first_key
        ragged = spec.key_length % (OWNERS * GROUP) != 0
        if not (spec.is_causal or ragged):
            return p
        limit = numbers - tile * SPAN if spec.is_causal else numbers * 0
        edge = tile * SPAN < first_key + (GROUP - 1) if spec.is_causal else False
        if ragged:
            limit = jnp.where(numbers < spec.key_length, limit, SPAN)
            edge = edge | (first_key + GROUP > spec.key_length)
        return arrays.hide_if(edge, p, limit, 0.0, before=True)

    def k_scale(self, k_scale_ref, first_key):
        """The one scale of K for a group's keys."""
        return k_scale_ref[self.batch, self.head, lax.div(first_key, jnp.int32(self.sizes.spec.config.block_k))]


def _own_keys(sizes, mine, group, inputs, outputs, held):
    """dK and dV of a group's keys, and each tile's dS for the group that sums over keys."""

    def start(at):
        block = _Block(sizes, at)
        own, keys = held["own"].at[group], pl.ds(block.first_key + group * GROUP, GROUP)
        fetch(inputs["k"].at[block.batch, block.head, keys], held["k_own"].at[group], own)
        fetch(inputs["v"].at[block.batch, keys, block.head], held["v_own"].at[group], own)

    def one(here, base, following):
        block = _Block(sizes, here())
        dk, dv = _sum_queries(block, base, group, inputs, held)
        following()
        block = _Block(sizes, here())
        keys = pl.ds(block.first_key + group * GROUP, GROUP)
        # NaN if a query of the group is not finite, as in the Triton kernels.
        poison = inputs["poison"][block.batch, block.head, 0]
        for output, total in ((outputs[0], dk * (1 / steps.LOG2_E)), (outputs[1], dv)):
            launch.stored()
            launch.store(held["result"].at[group], output.at[block.batch, keys, block.head], total + poison)
        return block.steps

    mine.compute(start, one)


def _sum_queries(block, base, group, inputs, held):
    """A group's sums over queries, dK and dV, when its keys have come."""
    layout, first_key = block.sizes.layout, block.first_key + group * GROUP
    shape, depth = (GROUP, SPAN), inputs["k"].shape[-1]
    k_scale = block.k_scale(inputs["k_scale"], first_key)
    launch.wait(held["own"].at[group])

    def body(step, carry):
        slot, position, dk, dv = carry
        waiting = lax.rem(position, jnp.int32(WAITING))
        tile = block.at(step)[1]
        launch.wait(held["full"].at[slot])

        def vector(name):
            return down(arrays.load_vector(held["vectors"].at[slot, VECTORS.index(name)], COLUMNS), shape)

        def probabilities(s):
            scale = vector("q_scale") * k_scale
            return block.hide(jnp.exp2(s.astype(jnp.float32) * scale + vector("shift")), first_key, tile)

        p, dp = arrays.two_products(
            (held["k_own"].at[group], turned(held["q"].at[slot])),
            (held["v_own"].at[group], turned(held["dout"].at[slot])),
            probabilities,
        )
        ds = p * (dp * vector("factor") - vector("delta"))
        launch.wait_for_buffer(held["ds_free"].at[waiting], position, WAITING)
        launch.write(held["ds"].at[waiting, group], ds)
        launch.arrive(held["ds_full"].at[waiting])
        dv = arrays.add_int8_product(dv, *arrays.quantize_row(p), held["dout_turned"].at[slot])
        dk = arrays.add_int8_product(dk, *arrays.quantize_row(ds), held["q_turned"].at[slot])
        launch.arrive(held["free"].at[slot])
        return launch.slot_of(slot + 1, layout), position + 1, dk, dv

    start = launch.slot_of(base, layout), base, *(filled((GROUP, depth), 0.0),) * 2
    return lax.fori_loop(jnp.int32(0), block.steps, body, start)[2:]


def _sum_keys(sizes, mine, _, inputs, outputs, held):
    """dQ of each tile of queries over the block's keys, a scale of dS per group of keys."""
    del outputs  # Written by the copying group.
    own, shape = held["turned_own"].at[0], (SPAN, inputs["k"].shape[-1])

    def start(at):
        block = _Block(sizes, at)
        for group in range(OWNERS):
            keys = pl.ds(block.first_key + group * GROUP, GROUP)
            fetch(inputs["k_turned"].at[block.batch, block.head, :, keys], held["k_turned_own"].at[group], own)

    def one(here, base, following):
        block = _Block(sizes, here())
        scales = [block.k_scale(inputs["k_scale"], block.first_key + group * GROUP) for group in range(OWNERS)]
        launch.wait(own)

        @pl.loop(jnp.int32(0), block.steps)
        def _(step):
            waiting = lax.rem(base + step, jnp.int32(WAITING))
            launch.wait(held["ds_full"].at[waiting])
            dq = filled(shape, 0.0)
            for group in range(OWNERS):
                ds_int8, ds_scale = arrays.quantize_row(arrays.load_turned(held["ds"].at[waiting, group]))
                if group == OWNERS - 1:
                    launch.arrive(held["ds_free"].at[waiting])
                dq = arrays.add_int8_product(dq, ds_int8, ds_scale * scales[group], held["k_turned_own"].at[group])
            launch.wait_for_buffer(held["dq_free"].at[waiting], base + step, WAITING)
            launch.write(held["dq"].at[waiting], dq)
            launch.arrive(held["dq_full"].at[waiting])

        following()
        return block.steps

    mine.compute(start, one)


def _copy(sizes, mine, _, inputs, outputs, held):
    """Fetch tiles of queries ahead of the owners, and beside that add each tile of dQ to memory."""
    turns = launch.turns(*inputs["q"].shape[:2], sizes.tiles)

    def load_all(number, base):
        block = _Block(sizes, mine.at(number))

        def load(step, slot):
            head, tile = block.at(step)
            queries, full = pl.ds(tile * SPAN, SPAN), held["full"].at[slot]
            for name in STREAMS:
                source = launch.tile_in(name, inputs[name], block.batch, head, queries)
                fetch(source, held[name].at[slot], full)
            for i, name in enumerate(VECTORS):
                fetch(inputs[name].at[block.batch, head, queries], held["vectors"].at[slot, i], full)

        launch.stream(block.steps, base, sizes.layout, (load, held["free"]))
        return block.steps

    def add_all(number, base):
        block = _Block(sizes, mine.at(number))

        @pl.loop(jnp.int32(0), block.steps)
        def _(step):
            head, tile = block.at(step)
            waiting = lax.rem(base + step, jnp.int32(WAITING))
            launch.wait(held["dq_full"].at[waiting])
            launch.add_in_turn(
                held["dq"].at[waiting],
                outputs[2].at[block.batch, pl.ds(tile * SPAN, SPAN), head],
                turns.at[block.batch, head, tile],
                block.earlier(tile),
                lambda: launch.arrive(held["dq_free"].at[waiting]),
            )

        return block.steps

    launch.in_warps(lambda: mine.each(load_all), lambda: mine.each(add_all))
