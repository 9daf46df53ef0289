"""The kernel of dQ = dS K on Hopper: as pallas_kernels/grad_q.py, whose numbers it has, where S is an INT8 product.

May be changed: how a tile is computed. Must stay: a query's row of dS is rounded over `dq_span` keys, the tile's
length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import arrays, launch
from pallas_kernels.hopper.arrays import ROWS, across, filled, turned
from pallas_kernels.hopper.launch import fetch, matrix, slot_of
from pallas_kernels.hopper.queries import QueryBlocks, hide, over_keys, skip_keys
from pallas_kernels.hopper.tiles import GROUP, Groups


def grad_q(ops, *, spec, layout: Groups, out_dtype):
    """dQ [B, T, N, H]; `ops` is a `BackwardOperands` (pallas_kernels/attention.py)."""
    batch, queries, heads, depth = ops.dout.shape
    kv_heads, int8, span = ops.v.shape[2], spec.uses_int8("dq"), spec.config.dq_span
    right = ops.k_turned if int8 else ops.k_16
    call = _Call(queries, span, heads // kv_heads, layout, spec)
    ring = functools.partial(launch.barriers, layout.stages)
    own = functools.partial(matrix, GROUP, depth)
    return launch.call(
        launch.Work(*(functools.partial(part, call) for part in (_fetch, _compute, _copy))),
        "sagebwd_grad_q",
        call.dealt(batch, heads, ops.k, ops.v, right),
        [ops.q, ops.k, ops.v, ops.dout, right, ops.k_scale, ops.q_scale, ops.lse, ops.delta],
        jax.ShapeDtypeStruct((batch, queries, heads, depth), out_dtype),
        [
            own(jnp.int8, layout.groups),
            own(ops.dout.dtype, layout.groups),
            launch.vectors(3, GROUP, layout.groups),
            launch.barriers(layout.groups, arrivals=5),
            own(out_dtype, layout.groups),
            matrix(span, depth, jnp.int8, layout.stages),
            matrix(span, depth, ops.v.dtype, layout.stages),
            matrix(depth, span, jnp.int8, layout.stages) if int8 else matrix(span, depth, right.dtype, layout.stages),
            ring(),
            ring(),
            ring(),
            ring(arrivals=layout.groups),
        ],
        layout=layout,
    )


@dataclasses.dataclass(frozen=True)
class _Call(QueryBlocks):
    """What the groups know: which queries they own, and how dS is multiplied."""

    @property
    def int8(self) -> bool:
        """Whether dS and K are multiplied in INT8."""
        return self.spec.uses_int8("dq")


def _split(refs):
    """(q, k, v, dout, right), k_scale, the vectors of rows, dQ, and scratch."""
    return refs[:5], refs[5], refs[6:9], refs[9], refs[10:]


def _fetch(call, index, at, *refs):
    """Start the copies of a group's Q, dO and vectors."""
    (q_ref, _, _, dout_ref, _), _, vectors, _, (q_own, dout_own, vectors_own, own, *_) = _split(refs)
    b, n, mine = call.rows_of(index, at)
    fetch(q_ref.at[b, n, mine], q_own.at[index], own.at[index])
    fetch(dout_ref.at[b, mine, n], dout_own.at[index], own.at[index])
    for i, ref in enumerate(vectors):
        fetch(ref.at[b, n, mine], vectors_own.at[index, i], own.at[index])


def _compute(call, index, here, base, following, *refs):
    """dQ of a group's queries."""
    spec, span, layout, int8 = call.spec, call.span, call.layout, call.int8
    _, k_scale_ref, _, dq_ref, refs = _split(refs)
    q_own, dout_own, vectors_own, own, result, k_ring, v_ring, right_ring, k_full, v_full, right_full, free = refs
    depth = q_own.shape[-1]

    at = here()
    first, count, tiles = call.of_group(index, at)
    b, kv = at[0], call.key_head(at[1])
    launch.wait(own.at[index])
    q_scale, lse, delta = (arrays.load_vector(vectors_own.at[index, i], ROWS) for i in range(3))
    shape = (GROUP, span)

    def body(j, dq, *, edge):
        slot = slot_of(base + j, layout)
        k_scale = k_scale_ref[b, kv, lax.div(j * span, jnp.int32(spec.config.block_k))]
        launch.wait(k_full.at[slot])
        launch.wait(v_full.at[slot])

        def probabilities(s):
            p = jnp.exp2(s.astype(jnp.float32) * across(q_scale * k_scale, shape) + across(-lse, shape))
            return hide(p, 0.0, first, j, span, spec=spec) if edge else p

        p, dp = arrays.two_products(
            (q_own.at[index], turned(k_ring.at[slot])),
            (dout_own.at[index], turned(v_ring.at[slot])),
            probabilities,
        )
        ds = p * (dp - across(delta, shape))
        if int8:
            ds_int8, ds_scale = arrays.quantize_row(ds)
            launch.wait(right_full.at[slot])
            dq = arrays.add_int8_product(dq, ds_int8, ds_scale * k_scale, right_ring.at[slot])
        else:
            ds_16 = ds.astype(jnp.bfloat16)
            launch.wait(right_full.at[slot])
            dq = arrays.add_product(dq, ds_16, right_ring.at[slot])
        launch.arrive(free.at[slot])
        return dq

    dq = filled((GROUP, depth), 0.0)
    dq = over_keys(body, dq, count, span, spec=spec)
    skip_keys(count, tiles, base, [((k_full, v_full, right_full), free)], layout=layout)
    # NaN where a row's operands are not finite, as in the Triton kernels, whose maximum of a row loses it.
    poison = delta * 0 + lse * 0
    following()
    b, n, tile = here()
    first, _, tiles = call.of_group(index, (b, n, tile))
    launch.stored()
    out = dq * spec.scale + across(poison, dq.shape)
    launch.store(result.at[index], dq_ref.at[b, pl.ds(first, GROUP), n], out)
    return tiles


def _copy(call, at, base, *refs):
    """Fill the ring with K, V and what dS is multiplied with."""
    (_, k_ref, v_ref, _, right_ref), _, _, _, refs = _split(refs)
    k_ring, v_ring, right_ring, k_full, v_full, right_full, free = refs[-7:]
    b, kv, (_, tiles), span = at[0], call.key_head(at[1]), call.of(at), call.span

    def load(j, slot):
        keys = pl.ds(j * span, span)
        fetch(k_ref.at[b, kv, keys], k_ring.at[slot], k_full.at[slot])
        fetch(v_ref.at[b, keys, kv], v_ring.at[slot], v_full.at[slot])
        fetch(
            right_ref.at[b, kv, :, keys] if call.int8 else right_ref.at[b, kv, keys],
            right_ring.at[slot],
            right_full.at[slot],
        )

    launch.stream(tiles, base, call.layout, (load, free))
    return tiles
