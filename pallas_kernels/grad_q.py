"""The kernel of dQ = dS K for a tile of queries.

May be changed: how a tile is computed. Must stay: a query's row of dS is rounded over `dq_span` keys, the
tile's length.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import ptx, steps
from pallas_kernels.launch import Tile, call, own_rows, whole_head
from pallas_kernels.masking import TileMasks


def grad_q(ops, *, spec, tile: Tile, out_dtype, visibility=None, keep_ds=False):
    """dQ [B, T, N, H], and with `keep_ds` dS in float32 [B, N, T, S], before it is rounded.

    `ops` is a `BackwardOperands` (attention.py); `visibility` is what the forward pass had, not None with `keep_ds`.
    """
    int8_scores, int8_dq = spec.uses_int8("qk"), spec.uses_int8("dq")
    batch, queries, heads, depth = ops.dout.shape
    group, tiles = heads // ops.v.shape[2], queries // tile.block_q

    def own(x, *depth, heads_last=False):
        return x, own_rows(tile.block_q, *depth, heads_last=heads_last, last=tiles - 1 if tile.last_first else None)

    def keys(x, heads_last=False):
        return x, whole_head(x, heads_last=heads_last, group=group)

    inputs = dict(
        q=own(ops.q, depth, heads_last=not int8_scores),
        k=keys(ops.k, heads_last=not int8_scores),
        dout=own(ops.dout, depth, heads_last=True),
        v=keys(ops.v, heads_last=True),
        lse=own(ops.lse),
        delta=own(ops.delta),
    )
    if int8_scores:
        inputs |= dict(q_scale=own(ops.q_scale))
    if int8_scores or int8_dq:
        inputs |= dict(k_scale=keys(ops.k_scale))
    inputs |= dict(k_turned=keys(ops.k_turned)) if int8_dq else dict(k_16=keys(ops.k_16))
    masks = None if visibility is None else TileMasks.make(visibility, spec=spec, tile=tile)
    inputs |= {} if masks is None else masks.operands
    names = list(inputs)

    def kernel(*refs):
        _grad_q_tile(dict(zip(names, refs, strict=False)), refs[len(names) :], spec=spec, tile=tile, masks=masks)

    shapes = [jax.ShapeDtypeStruct((batch, queries, heads, depth), out_dtype)]
    specs = [own(ops.dout, depth, heads_last=True)[1]]
    if keep_ds:
        keys_padded = ops.v.shape[1]
        shapes += [jax.ShapeDtypeStruct((batch, heads, queries, keys_padded), jnp.float32)]
        specs += [own_rows(tile.block_q, keys_padded)]
    return call(
        kernel,
        "sagebwd_grad_q",
        (tiles, heads, batch),
        [x for x, _ in inputs.values()],
        [block for _, block in inputs.values()],
        shapes if keep_ds else shapes[0],
        specs if keep_ds else specs[0],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _grad_q_tile(refs, out_refs, *, spec, tile, masks):
    """One program: block_q queries against every key that they see."""
    q, dout = refs["q"][...], refs["dout"][...]
    i = pl.program_id(0)
    i = pl.num_programs(0) - 1 - i if tile.last_first else i
    lse, delta = refs["lse"][...], refs["delta"][...]
    block_q, block_k, depth = tile.block_q, tile.block_k, q.shape[1]
    shape = (block_q, block_k)
    int8_scores, int8_dq = spec.uses_int8("qk"), spec.uses_int8("dq")
    uniform_keys = spec.config.key_scale == "block"
    if int8_scores:
        q_scale = refs["q_scale"][...]

    def dp_product(j):
        return steps.dot_16(dout, refs["v"][pl.ds(j * block_k, block_k), :])

    def body(j, carry, *, following, edge):
        dq, *ahead = carry
        cols = pl.ds(j * block_k, block_k)
        s = steps.score_tile(q, refs["k"][cols, :])
        if tile.dp_ahead:
            # After S: the compiler lets a product run on into the next iteration if the first wait there is another's.
            [dp], ahead = ahead, [dp_product(following)]
        if not int8_scores:
            scale = jnp.full((block_q,), spec.scale * steps.LOG2_E, jnp.float32)
        elif uniform_keys:
            scale = q_scale * refs["k_scale"][j * block_k // spec.config.block_k]
        else:
            s, scale = s * refs["k_scale"][cols][None, :], q_scale
        seen, bias = (None, None) if masks is None else masks.tile_of(refs, i, j, edge=edge)
        scale = scale[:, None]
        p = ptx.exp2(ptx.fma(s, scale, -lse[:, None] if bias is None else bias - lse[:, None], shape))
        if edge and masks is None:
            seen = steps.visible(
                i * block_q,
                j * block_k,
                shape,
                is_causal=spec.is_causal,
                key_length=spec.key_length,
                rows_are_queries=True,
            )
        p = p if seen is None else jnp.where(seen, p, 0.0)
        ds = p * ((dp if tile.dp_ahead else dp_product(j)) - delta[:, None])
        if len(out_refs) == 2:
            out_refs[1][:, cols] = ds
        if not int8_dq:
            dq = dq + steps.dot_16(ds.astype(jnp.bfloat16), refs["k_16"][cols, :], b_is_turned=True)
            return dq, *ahead
        if not uniform_keys:
            # K's scale varies along the sum over keys, so dS takes it before it is rounded.
            ds = ds * refs["k_scale"][cols][None, :]
        ds_int8, ds_scale = steps.quantize_row(ds, whole_tile=spec.config.grad_scale == "tile")
        if uniform_keys:
            ds_scale = ds_scale * refs["k_scale"][j * block_k // spec.config.block_k]
        product = steps.dot_int8(ds_int8, refs["k_turned"][:, cols])
        return ptx.fma(product, ds_scale[:, None], dq, dq.shape), *ahead

    if masks is None:
        phases = steps.key_phases(i, block_q, block_k, is_causal=spec.is_causal, key_length=spec.key_length)
        ahead = [dp_product(steps.first_tile(phases))] if tile.dp_ahead else []
        dq, *_ = steps.loop_tiles(body, (jnp.zeros((block_q, depth), jnp.float32), *ahead), phases)
    else:
        [dq] = masks.loop(body, (jnp.zeros((block_q, depth), jnp.float32),), refs)
        if len(out_refs) == 2:
            masks.clear_skipped(out_refs[1], refs)
    # NaN where a row's operands are not finite: the maximum of a row of dS loses it.
    poison = delta * 0 + lse * 0
    out_refs[0][...] = (dq * spec.scale + poison[:, None]).astype(out_refs[0].dtype)
