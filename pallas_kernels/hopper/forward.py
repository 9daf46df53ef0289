"""The forward kernel on Hopper: as pallas_kernels/forward.py, whose numbers it has, for INT8 products only.

May be changed: how a tile is computed. Must stay: one row of P is rounded over `pv_span` keys, the tile's length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import steps
from pallas_kernels.forward import HIDDEN, TINY_SCALE
from pallas_kernels.hopper import arrays, launch
from pallas_kernels.hopper.arrays import ROWS, across, down, filled, turned
from pallas_kernels.hopper.launch import fetch, matrix, slot_of
from pallas_kernels.hopper.queries import QueryBlocks, hide, hides, last_of, over_keys, skip_keys
from pallas_kernels.hopper.tiles import GROUP, Groups


def forward(q, k, v, q_scale, k_scale, v_scale, *, spec, layout: Groups, out_dtype, keep_out):
    """O [B, T, N, H], its log-sum-exp in base 2 [B, N, T], and with `keep_out` O in int16 with a scale a row.

    Args:
      q, k: int8 [B, N, T, H] and [B, K, S, H] with scales [B, N, T], which hold the logits' scale in base 2, and
        [B, K, S / block_k].
      v: turned int8 [B, K, H, S] with scales [B, K, H].
    """
    batch, heads, queries, depth = q.shape
    kv_heads, span = k.shape[1], spec.config.pv_span
    call = _Call(queries, span, heads // kv_heads, layout, spec, keep_out)
    shapes = [
        jax.ShapeDtypeStruct((batch, queries, heads, depth), out_dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        jax.ShapeDtypeStruct((batch, queries, heads, depth), jnp.int16),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
    ]
    ring = functools.partial(launch.barriers, layout.stages)
    return launch.call(
        launch.Work(*(functools.partial(part, call) for part in (_fetch, _compute, _copy))),
        "sagebwd_forward",
        call.dealt(batch, heads, k, v),
        [q, k, v, q_scale, k_scale, v_scale],
        shapes[: 2 + 2 * keep_out],
        [
            matrix(GROUP, depth, jnp.int8, layout.groups),
            launch.vectors(1, GROUP, layout.groups),
            launch.vectors(1, depth, layout.groups),
            launch.barriers(layout.groups, arrivals=3),
            *(matrix(GROUP, depth, dtype, layout.groups) for dtype in (out_dtype, jnp.int16)[: 1 + keep_out]),
            matrix(span, depth, jnp.int8, layout.stages),
            matrix(depth, span, jnp.int8, layout.stages),
            ring(),
            ring(),
            ring(arrivals=layout.groups),
            ring(arrivals=layout.groups),
        ],
        layout=layout,
    )


@dataclasses.dataclass(frozen=True)
class _Call(QueryBlocks):
    """What the groups know: which queries they own, and whether O is kept."""

    keep_out: bool


def _fetch(call, index, at, *refs):
    """Start the copies of a group's Q and its scales, and of V's scales."""
    q_own, q_scale_own, v_scale_own, own = (refs[8 + 2 * call.keep_out + i] for i in range(4))
    mine = call.rows_of(index, at)
    fetch(refs[0].at[mine], q_own.at[index], own.at[index])
    fetch(refs[3].at[mine], q_scale_own.at[index, 0], own.at[index])
    fetch(refs[5].at[at[0], call.key_head(at[1])], v_scale_own.at[index, 0], own.at[index])


def _compute(call, index, here, base, following, *refs):
    """O of a group's queries."""
    spec, span, layout = call.spec, call.span, call.layout
    k_scale_ref, outputs, refs = refs[4], refs[6 : 8 + 2 * call.keep_out], refs[8 + 2 * call.keep_out :]
    q_own, q_scale_own, v_scale_own, own, *buffers, k_ring, v_ring, k_full, v_full, k_free, v_free = refs
    depth = q_own.shape[-1]

    at = here()
    first, count, tiles = call.of_group(index, at)
    b, kv = at[0], call.key_head(at[1])
    launch.wait(own.at[index])
    row_scale = arrays.load_vector(q_scale_own.at[index, 0], ROWS)

    def scores(j):
        slot = slot_of(base + j, layout)
        launch.wait(k_full.at[slot])
        s = arrays.product(q_own.at[index], turned(k_ring.at[slot]))
        launch.arrive(k_free.at[slot])
        return s

    def probabilities(j, s, peak, shift, total, *, edge):
        shape = s.shape
        scale = row_scale * k_scale_ref[b, kv, lax.div(j * span, jnp.int32(spec.config.block_k))]
        scale, s = jnp.where(scale == 0, TINY_SCALE, scale), s.astype(jnp.float32)
        if edge:
            s = hide(s, HIDDEN, first, j, span, spec=spec)
        peak, new_shift, keep = steps.advance_shift(peak, shift, s.max(axis=1) * scale)
        # 127 P, so that rounding needs no multiplication; the 127 cancels in O / total.
        p = jnp.exp2(s * across(scale, shape) + across(steps.LOG2_INT8_MAX - new_shift, shape))
        total = total * keep + p.sum(axis=1)
        return arrays.round_to_int8(p), keep, peak, new_shift, total

    def body(j, carry, *, edge, s=None, half=False):
        out, *rest = carry
        s = scores(j) if s is None else s
        p_int8, keep, *rest = probabilities(j, arrays.first_half(s) if half else s, *rest, edge=edge)
        p_int8 = arrays.with_zeros(p_int8) if half else p_int8
        slot = slot_of(base + j, layout)
        launch.wait(v_full.at[slot])
        tile_out = arrays.product(p_int8, turned(v_ring.at[slot]))
        launch.arrive(v_free.at[slot])
        return out * across(keep, out.shape) + tile_out.astype(jnp.float32), *rest

    def body_ahead(j, carry):
        s, out, *rest = carry
        p_int8, keep, *rest = probabilities(j, s, *rest, edge=False)
        slot, next_slot = slot_of(base + j, layout), slot_of(base + j + 1, layout)
        launch.wait(v_full.at[slot])
        launch.wait(k_full.at[next_slot])
        out, s = arrays.two_products(
            (p_int8, turned(v_ring.at[slot])),
            (q_own.at[index], turned(k_ring.at[next_slot])),
            lambda tile_out: out * across(keep, out.shape) + tile_out.astype(jnp.float32),
        )
        launch.arrive(v_free.at[slot])
        launch.arrive(k_free.at[next_slot])
        return s, out, *rest

    nothing = filled((GROUP,), steps.NO_SCORE, ROWS)
    carry = filled((GROUP, depth), 0.0), nothing, nothing, filled((GROUP,), 0.0, ROWS)
    if layout.ahead:
        s, *carry = lax.fori_loop(jnp.int32(0), count - 1, body_ahead, (scores(jnp.int32(0)), *carry))
        last = functools.partial(body, last_of(count), edge=hides(spec, span))
        # If causal, every other group sees no more than the first half of its last tile.
        end = jnp.minimum(first + GROUP, spec.key_length) if spec.is_causal else jnp.int32(spec.key_length)
        halves = functools.partial(last, half=True), last
        parts = (lambda s, carry, part=part: tuple(part(carry, s=s)) for part in halves)
        carry = lax.cond(end - (count - 1) * span <= span // 2, *parts, s, tuple(carry))
    else:
        carry = over_keys(body, carry, count, span, spec=spec)
    out, _, shift, total = carry
    skip_keys(count, tiles, base, [((k_full,), k_free), ((v_full,), v_free)], layout=layout)
    out = out * across(1 / total, out.shape)
    out = out * down(arrays.load_vector(v_scale_own.at[index, 0], arrays.COLUMNS), out.shape)
    following()
    at = here()
    first, _, tiles = call.of_group(index, at)
    lse = shift + jnp.log(total) * steps.LOG2_E
    launch.stored()
    _write(outputs, [x.at[index] for x in buffers], out, lse, at=(*at[:2], first), spec=spec)
    return tiles


def _copy(call, at, base, q_ref, k_ref, v_ref, *refs):
    """Fill the ring with K and V."""
    k_ring, v_ring, k_full, v_full, k_free, v_free = refs[-6:]
    b, kv, (_, tiles), span = at[0], call.key_head(at[1]), call.of(at), call.span

    def load_k(j, slot):
        fetch(k_ref.at[b, kv, pl.ds(j * span, span)], k_ring.at[slot], k_full.at[slot])

    def load_v(j, slot):
        fetch(v_ref.at[b, kv, :, pl.ds(j * span, span)], v_ring.at[slot], v_full.at[slot])

    launch.stream(tiles, base, call.layout, (load_k, k_free), (load_v, v_free))
    return tiles


def _write(outputs, buffers, out, lse, *, at, spec):
    """Write a group's results: O through shared memory, a value a row as it is."""
    b, n, first = at
    mine = pl.ds(first, GROUP)
    launch.store(buffers[0], outputs[0].at[b, mine, n], out)
    rows = first + arrays.row_numbers()
    outputs[1][b, n, mine] = jnp.where(rows < spec.query_length, lse - steps.LOG2_INT8_MAX, steps.NO_QUERY)
    if len(outputs) == 4:
        scale, inverse = steps.scale_and_inverse(steps.magnitude(out).max(axis=1), steps.INT16_MAX)
        launch.store(buffers[1], outputs[2].at[b, mine, n], arrays.round_to_int16(out * across(inverse, out.shape)))
        outputs[3][b, n, mine] = scale
