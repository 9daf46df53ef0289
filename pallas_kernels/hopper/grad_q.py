"""The kernel of dQ = dS K on Hopper: as pallas_kernels/grad_q.py, whose numbers it has, where S is an INT8 product.

May be changed: how a tile is computed. Must stay: a query's row of dS is rounded over `dq_span` keys, the tile's
length.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import arrays, launch
from pallas_kernels.hopper.arrays import ROWS, across, filled, turned
from pallas_kernels.hopper.launch import fetch, matrix, slot_of
from pallas_kernels.hopper.queries import hide, over_keys, query_block
from pallas_kernels.hopper.tiles import GROUP, Groups


def grad_q(ops, *, spec, layout: Groups, out_dtype):
    """dQ [B, T, N, H]; `ops` is a `BackwardOperands` (pallas_kernels/attention.py)."""
    batch, queries, heads, depth = ops.dout.shape
    kv_heads, int8, span = ops.v.shape[2], spec.uses_int8("dq"), spec.config.dq_span
    rows = layout.groups * GROUP
    right = ops.k_turned if int8 else ops.k_16
    grid = (batch, heads, pl.cdiv(queries, rows))
    block = functools.partial(query_block, grid[2], rows, queries, span, heads // kv_heads, spec=spec)

    def compute(group, q_ref, k_ref, v_ref, dout_ref, right_ref, q_scale_ref, k_scale_ref, lse_ref, delta_ref, *refs):
        dq_ref, q_own, dout_own, k_ring, v_ring, right_ring, own, k_full, v_full, right_full, free = refs
        b, n, kv, first, count = block()
        # A group past the end repeats the last rows.
        first = jnp.minimum(first + group * GROUP, queries - GROUP)
        mine = pl.ds(first, GROUP)
        fetch(q_ref.at[b, n, mine], q_own.at[group], own.at[group])
        fetch(dout_ref.at[b, mine, n], dout_own.at[group], own.at[group])
        q_scale, lse, delta = (
            arrays.load_vector(ref.at[b, n, mine], ROWS) for ref in (q_scale_ref, lse_ref, delta_ref)
        )
        launch.wait(own.at[group])
        shape = (GROUP, span)

        def body(j, dq, *, edge):
            slot = slot_of(j, layout)
            k_scale = k_scale_ref[b, kv, lax.div(j * span, jnp.int32(spec.config.block_k))]
            launch.wait(k_full.at[slot])

            def probabilities(s):
                p = jnp.exp2(s.astype(jnp.float32) * across(q_scale * k_scale, shape) + across(-lse, shape))
                return hide(p, 0.0, first, j, span, edge, spec=spec)

            p, dp = arrays.two_products(
                (q_own.at[group], turned(k_ring.at[slot])),
                (dout_own.at[group], turned(v_ring.at[slot])),
                probabilities,
                shape,
                ready=lambda: launch.wait(v_full.at[slot]),
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
        dq = over_keys(body, dq, first, count, span, int8=int8, depth=depth, spec=spec)
        # NaN where a row's operands are not finite: the maximum of a row of dS loses it.
        poison = delta * 0 + lse * 0
        launch.store(dout_own.at[group], dq_ref.at[b, mine, n], dq * spec.scale + across(poison, dq.shape))

    def copy(q_ref, k_ref, v_ref, dout_ref, right_ref, q_scale_ref, k_scale_ref, lse_ref, delta_ref, *refs):
        k_ring, v_ring, right_ring, _, k_full, v_full, right_full, free = refs[-8:]
        b, _, kv, _, count = block()

        def load(j, slot):
            keys = pl.ds(j * span, span)
            fetch(k_ref.at[b, kv, keys], k_ring.at[slot], k_full.at[slot])
            fetch(v_ref.at[b, keys, kv], v_ring.at[slot], v_full.at[slot])
            fetch(
                right_ref.at[b, kv, :, keys] if int8 else right_ref.at[b, kv, keys],
                right_ring.at[slot],
                right_full.at[slot],
            )

        launch.stream(count, layout, (load, free))

    ring = functools.partial(launch.barriers, layout.stages)
    own = functools.partial(matrix, GROUP, depth)
    return launch.call(
        compute,
        copy,
        "sagebwd_grad_q",
        grid,
        [ops.q, ops.k, ops.v, ops.dout, right, ops.q_scale, ops.k_scale, ops.lse, ops.delta],
        jax.ShapeDtypeStruct((batch, queries, heads, depth), out_dtype),
        [
            own(jnp.int8, layout.groups),
            own(ops.dout.dtype, layout.groups),
            matrix(span, depth, jnp.int8, layout.stages),
            matrix(span, depth, ops.v.dtype, layout.stages),
            matrix(depth, span, jnp.int8, layout.stages) if int8 else matrix(span, depth, right.dtype, layout.stages),
            launch.barriers(layout.groups, arrivals=2),
            ring(),
            ring(),
            ring(),
            ring(arrivals=layout.groups),
        ],
        layout=layout,
    )
