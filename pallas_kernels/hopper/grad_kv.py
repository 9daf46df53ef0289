"""The kernel of dV = P^T dO and dK = dS^T Q on Hopper: as pallas_kernels/grad_kv.py, whose numbers it has.

Either of them by an INT8 product, or both by 16-bit products; S is an INT8 product. May be changed: how a tile is
computed. Must stay: a key's row of P is rounded over `dv_span` queries and its row of dS over `dk_span`, the tile's
length.
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
from pallas_kernels.hopper.blocks import Blocks
from pallas_kernels.hopper.launch import fetch, matrix, slot_of
from pallas_kernels.hopper.tiles import GROUP, Groups
from pallas_kernels.launch import target_cores
from sagebwd_jax._config import CallSpec

# Queries of a tile where no rounding asks for a number.
SPAN_16 = 64


def grad_kv(ops, *, spec, layout: Groups, want_dk, want_dv, out_dtype):
    """dK and dV [B, S, K, H], those that are wanted, in this order; both only if both products are in 16 bits.

    `ops` is a `BackwardOperands` (pallas_kernels/attention.py).
    """
    batch, keys, kv_heads, depth = ops.v.shape
    int8 = want_dk != want_dv
    span = SPAN_16 if not int8 else spec.config.dk_span if want_dk else spec.config.dv_span
    own, streams, vectors = _operands(ops, int8, want_dk)
    names = tuple(own), tuple(streams), tuple(vectors)
    call = _Call(keys, span, ops.dout.shape[2] // kv_heads, (want_dk, want_dv), *names, layout, spec)

    def ring_of(name, x):
        turn = name.endswith("turned")
        return matrix(depth if turn else span, span if turn else depth, x.dtype, layout.stages)

    return launch.call(
        launch.Work(*(functools.partial(part, call) for part in (_fetch, _compute, _copy))),
        "sagebwd_grad_" + "k" * want_dk + "v" * want_dv,
        call.dealt(batch, kv_heads, *streams.values(), *vectors.values()),
        [*own.values(), *streams.values(), *vectors.values(), ops.k_scale, ops.poison],
        [jax.ShapeDtypeStruct((batch, keys, kv_heads, depth), out_dtype)] * (want_dk + want_dv),
        [
            *(matrix(GROUP, depth, x.dtype, layout.groups) for x in own.values()),
            matrix(GROUP, depth, out_dtype, layout.groups),
            *(ring_of(name, x) for name, x in streams.items()),
            launch.vectors(len(vectors), span, layout.stages),
            launch.barriers(layout.groups, arrivals=len(own)),
            launch.barriers(layout.stages, arrivals=len(streams) + len(vectors)),
            launch.barriers(layout.stages, arrivals=layout.groups),
        ],
        layout=layout,
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the groups know: which keys they own, which queries they go through, and the names of their operands."""

    keys: int
    span: int
    group: int
    # dK and dV.
    want: tuple[bool, bool]
    own: tuple[str, ...]
    streams: tuple[str, ...]
    vectors: tuple[str, ...]
    layout: Groups
    spec: CallSpec

    @property
    def rows(self) -> int:
        """Keys of a block."""
        return self.layout.groups * GROUP

    @property
    def tiles(self) -> int:
        """Tiles of queries of a head."""
        return pl.cdiv(self.spec.query_length, self.span)

    @property
    def int8(self) -> bool:
        """Whether the one product that is wanted is in INT8."""
        return self.want[0] != self.want[1]

    def dealt(self, batch, kv_heads, *streams) -> Blocks:
        """All blocks, in the order that they are taken; `streams` are what all blocks of a head read."""
        first_tiles = [int(self._first_tile(tile)) for tile in range(pl.cdiv(self.keys, self.rows))]
        counts = [(self.tiles - first) * self.group for first in first_tiles]
        return Blocks.make(batch, kv_heads, counts, streams, target_cores())

    def queries_of(self, at):
        """The first tile of queries that sees a block's keys, and how many do of each head."""
        first = self._first_tile(at[2])
        return first, self.tiles - first

    def keys_of(self, index, at):
        """A group's first key: one past the end repeats the last rows."""
        return jnp.minimum(at[2] * self.rows + index * GROUP, self.keys - GROUP)

    def split(self, refs):
        """Inputs by name, (k_scale, poison), outputs, and scratch by name."""
        names, outputs = (*self.own, *self.streams, *self.vectors), sum(self.want)
        inputs, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
        held = (*self.own, "result", *self.streams, "vectors", "own", "full", "free")
        return inputs, refs[:2], refs[2 : 2 + outputs], dict(zip(held, refs[2 + outputs :], strict=True))

    def _first_tile(self, tile):
        """The first tile of queries that sees keys of a block, known or not; the last one where none does."""
        if not self.spec.is_causal:
            return 0 if isinstance(tile, int) else jnp.int32(0)
        if isinstance(tile, int):
            return min(tile * self.rows // self.span, self.tiles - 1)
        return jnp.minimum(lax.div(tile * self.rows, jnp.int32(self.span)), self.tiles - 1)


def _fetch(call, index, at, *refs):
    """Start the copies of what a group owns."""
    inputs, _, _, held = call.split(refs)
    (b, n, _), mine = at, pl.ds(call.keys_of(index, at), GROUP)
    for name in call.own:
        fetch(launch.tile_in(name, inputs[name], b, n, mine), held[name].at[index], held["own"].at[index])


def _compute(call, index, here, base, following, *refs):
    """dK or dV, or both, of a group's keys."""
    spec, span, group, layout = call.spec, call.span, call.group, call.layout
    _, (k_scale_ref, poison_ref), outputs, held = call.split(refs)
    depth, (want_dk, want_dv) = held["result"].shape[-1], call.want
    at = here()
    (first, per_head), first_key = call.queries_of(at), call.keys_of(index, at)
    k_scale = k_scale_ref[*at[:2], lax.div(first_key, jnp.int32(spec.config.block_k))]
    launch.wait(held["own"].at[index])
    k_own, v_own = (held[x].at[index] if x in call.own else None for x in ("k", "v"))
    tile = functools.partial(
        _tile, held, k_own, v_own, k_scale, spec=spec, first_key=first_key, span=span, want=call.want
    )

    def body(i, carry, *, edge):
        slot, *sums = carry
        launch.wait(held["full"].at[slot])
        sums = tile(slot, first + i, sums, edge)
        launch.arrive(held["free"].at[slot])
        return slot_of(slot + 1, layout), *sums

    def skip(_, slot):
        launch.wait(held["full"].at[slot])
        launch.arrive(held["free"].at[slot])
        return slot_of(slot + 1, layout)

    def head(_, carry):
        slot, *sums = carry
        # Queries that see other groups' keys alone; of the others the first tile hides some, or is the last one.
        hidden = jnp.clip(lax.div(first_key, jnp.int32(span)) - first, 0, per_head - 1)
        carry = lax.fori_loop(jnp.int32(0), hidden, skip, slot), *sums
        carry = body(hidden, carry, edge=True)
        return lax.fori_loop(hidden + 1, per_head, functools.partial(body, edge=False), carry)

    carry = slot_of(base, layout), *(filled((GROUP, depth), 0.0),) * (want_dk + want_dv)
    if not spec.is_causal:
        sums = lax.fori_loop(jnp.int32(0), per_head * group, functools.partial(body, edge=False), carry)
    elif group == 1:
        sums = head(0, carry)
    else:
        sums = lax.fori_loop(jnp.int32(0), jnp.int32(group), head, carry)
    _, *sums = sums
    following()
    b, n, tile = here()
    mine = pl.ds(call.keys_of(index, (b, n, tile)), GROUP)
    # NaN if a query of the group is not finite, as in the Triton kernels.
    poison = poison_ref[b, n, 0]
    factors = [1 / steps.LOG2_E if call.int8 else spec.scale] * want_dk + [1.0] * want_dv
    for output, total, factor in zip(outputs, sums, factors, strict=True):
        launch.stored()
        launch.store(held["result"].at[index], output.at[b, mine, n], total * factor + poison)
    return call.queries_of((b, n, tile))[1] * group


def _copy(call, at, base, *refs):
    """Fill the ring with tiles of queries."""
    inputs, _, _, held = call.split(refs)
    (first, per_head), group, span = call.queries_of(at), call.group, call.span

    def load(step, slot):
        g, i = (lax.div(step, per_head), lax.rem(step, per_head)) if group > 1 else (0, step)
        head, queries = at[1] * group + g, pl.ds((first + i) * span, span)
        full = held["full"].at[slot]
        for name in call.streams:
            fetch(launch.tile_in(name, inputs[name], at[0], head, queries), held[name].at[slot], full)
        for i, name in enumerate(call.vectors):
            fetch(inputs[name].at[at[0], head, queries], held["vectors"].at[slot, i], full)

    launch.stream(per_head * group, base, call.layout, (load, held["free"]))
    return per_head * group


def _operands(ops, int8, want_dk):
    """By name: what a group owns, what the ring holds of a tile of queries by time or turned, and its vectors."""
    own, streams = dict(k=ops.k), dict(q=ops.q)
    # An INT8 product takes the scale that varies along its sum with the exponent, for nothing.
    vectors = dict(q_scale=ops.q_scale, shift=(ops.shift_dk if want_dk else ops.shift_dv) if int8 else ops.shift)
    if not want_dk:
        return own, streams | dict(dout_turned=ops.dout_turned), vectors
    streams |= dict(dout=ops.dout) | (dict(q_turned=ops.q_turned) if int8 else dict(q_16=ops.q_16))
    return own | dict(v=ops.v), streams, vectors | dict(delta=ops.delta)


def _tile(held, k_own, v_own, k_scale, slot, i, sums, edge, *, spec, first_key, span, want):
    """The sums with what a tile of queries adds to them."""
    want_dk, want_dv = want
    int8, shape = want_dk != want_dv, (GROUP, span)
    q_scale, shift, *rest = (held["vectors"].at[slot, x] for x in range(2 + want_dk))

    def vector(ref):
        return arrays.load_vector(ref, COLUMNS)

    def probabilities(s):
        """P^T, times the scale that `shift` holds."""
        scale = down(vector(q_scale) * k_scale, shape)
        p = jnp.exp2(s.astype(jnp.float32) * scale + down(vector(shift), shape))
        # Keys that do not count are rows of their own, whose results nobody reads.
        return arrays.hide(p, arrays.row_numbers() + first_key - i * span, 0.0, before=True) if edge else p

    scores = k_own, turned(held["q"].at[slot])
    if not want_dk:
        p_int8, p_scale = arrays.quantize_row(probabilities(arrays.product(*scores)))
        [dv] = sums
        return (arrays.add_int8_product(dv, p_int8, p_scale, held["dout_turned"].at[slot]),)
    p, dp = arrays.two_products(scores, (v_own, turned(held["dout"].at[slot])), probabilities)
    [delta] = rest

    def ds():
        return p * (dp - down(vector(delta), shape))

    if int8:
        [dk] = sums
        ds_int8, ds_scale = arrays.quantize_row(ds())
        return (arrays.add_int8_product(dk, ds_int8, ds_scale, held["q_turned"].at[slot]),)
    dk, dv = sums
    dv, dk = arrays.add_two_products(
        (dv, dk),
        (p.astype(jnp.bfloat16), held["dout"].at[slot]),
        lambda: (ds().astype(jnp.bfloat16), held["q_16"].at[slot]),
    )
    return dk, dv
