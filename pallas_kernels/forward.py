"""The forward kernel: O = softmax(Q K^T) V for a tile of queries, one pass over the keys with an online softmax.

May be changed: how a tile is computed. Must stay: one row of P is rounded over `pv_span` keys, the tile's length.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import ptx, steps
from pallas_kernels.launch import Tile, call, own_rows, whole_head
from pallas_kernels.masking import TileMasks

# A hidden score before its scale, and the scale of a row whose own is 0: their product is far below any softmax shift.
HIDDEN = -3e38
TINY_SCALE = 1e-30


def forward(q, k, v, q_scale, k_scale, v_scale, *, spec, tile: Tile, out_dtype, keep_out, visibility=None):
    """O [B, T, N, H], its log-sum-exp in base 2 [B, N, T], and with `keep_out` O in int16 with a scale a row.

    Args:
      q, k: int8 [B, N, T, H] and [B, K, S, H] with scales [B, N, T], which hold the logits' scale in base 2, and
        [B, K, S] or [B, K, S / block_k]; or 16-bit [B, T, N, H] and [B, S, K, H] with scales None.
      v: turned int8 [B, K, H, S] with scales [B, K, H] (a channel), [B, T, K, H] (a channel of a query's document) or
        [B, K, S / pv_span] (a tile); or 16-bit [B, S, K, H] with scales None.
      visibility: masks and bias (sagebwd_jax/_masks.py), None for none of them. A query that sees no key gets an output
        of 0 and NO_QUERY.
    """
    int8_scores, int8_values = q_scale is not None, v_scale is not None
    batch, queries, heads, depth = (q.shape[0], q.shape[2], q.shape[1], q.shape[3]) if int8_scores else q.shape
    group = heads // (k.shape[1] if int8_scores else k.shape[2])

    masks = None if visibility is None else TileMasks.make(visibility, spec=spec, tile=tile)
    more = {} if masks is None else masks.operands
    scale_count = 2 * int8_scores + int8_values

    def kernel(q_ref, k_ref, v_ref, *refs):
        scale_refs, refs = refs[:scale_count], refs[scale_count:]
        mask_refs, out_refs = dict(zip(more, refs, strict=False)), refs[len(more) :]
        _forward_tile(q_ref, k_ref, v_ref, scale_refs, mask_refs, out_refs, spec=spec, tile=tile, masks=masks)

    own = functools.partial(own_rows, tile.block_q)
    of_queries = own(depth, heads_last=True, group=group)
    scales = [(q_scale, own()), (k_scale, None), (v_scale, of_queries if spec.packed else None)]
    scales = [(x, spec_ or whole_head(x, group=group)) for x, spec_ in scales if x is not None]
    shapes = [
        jax.ShapeDtypeStruct((batch, queries, heads, depth), out_dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        jax.ShapeDtypeStruct((batch, queries, heads, depth), jnp.int16),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
    ]
    own_out, own_row = own(depth, heads_last=True), own()
    outputs = 4 if keep_out else 2
    return call(
        kernel,
        "sagebwd_forward",
        (queries // tile.block_q, heads, batch),
        [q, k, v, *(x for x, _ in scales), *(x for x, _ in more.values())],
        [
            own(depth, heads_last=not int8_scores),
            whole_head(k, heads_last=not int8_scores, group=group),
            whole_head(v, heads_last=not int8_values, group=group),
            *(spec_ for _, spec_ in scales),
            *(spec_ for _, spec_ in more.values()),
        ],
        shapes[:outputs],
        [own_out, own_row, own_out, own_row][:outputs],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _forward_tile(q_ref, k_ref, v_ref, scale_refs, mask_refs, out_refs, *, spec, tile, masks):
    """One program: block_q queries against every key that they see."""
    i, q = pl.program_id(0), q_ref[...]
    block_q, block_k, depth = tile.block_q, tile.block_k, q.shape[1]
    int8_scores, int8_values = spec.uses_int8("qk"), spec.uses_int8("pv")
    shape = (block_q, block_k)
    if int8_scores:
        q_scale, k_scale_ref = scale_refs[0][...], scale_refs[1]
    if int8_values:
        v_scale_ref = scale_refs[-1]
    scale_a_tile = spec.config.value_scale == "block"

    def scores(j, cols):
        """A tile of scores before the scale of its rows, and that scale."""
        s = steps.score_tile(q, k_ref[cols, :])
        if not int8_scores:
            return s, jnp.full((block_q,), spec.scale * steps.LOG2_E, jnp.float32)
        if spec.config.key_scale == "block":
            return s, q_scale * k_scale_ref[j * block_k // spec.config.block_k]
        return s * k_scale_ref[cols][None, :], q_scale

    def body(j, carry, *, following, edge):
        del following
        out, peak, shift, total = carry
        cols = pl.ds(j * block_k, block_k)
        s, row_scale = scores(j, cols)
        if masks is not None:
            seen, bias = masks.tile_of(mask_refs, i, j, edge=edge)
            if bias is not None:
                s, row_scale = ptx.fma(s, row_scale[:, None], bias, shape), jnp.ones_like(row_scale)
            if seen is not None:
                # Infinitely low: a row that has seen no key yet keeps a sum of 0, whatever comes after.
                s, row_scale = jnp.where(seen, s, -jnp.inf), jnp.where(row_scale == 0, TINY_SCALE, row_scale)
        elif edge:
            seen = steps.visible(
                i * block_q,
                j * block_k,
                shape,
                is_causal=spec.is_causal,
                key_length=spec.key_length,
                rows_are_queries=True,
            )
            # Hidden scores stay far below all others under any scale; a scale of 0 means scores of 0.
            s, row_scale = jnp.where(seen, s, HIDDEN), jnp.where(row_scale == 0, TINY_SCALE, row_scale)
        tile_peak = jnp.max(s, axis=1) * row_scale
        peak, new_shift, keep = steps.advance_shift(peak, shift, tile_peak)
        if int8_values:
            # 127 P, so that rounding needs no multiplication; the 127 cancels in O / total.
            p = ptx.exp2(ptx.fma(s, row_scale[:, None], (steps.LOG2_INT8_MAX - new_shift)[:, None], shape))
            tile_out = steps.dot_int8(steps.swizzle16(ptx.round_to_int8(p)), v_ref[:, cols])
            if scale_a_tile:
                tile_out = tile_out * v_scale_ref[j]
        else:
            p = ptx.exp2(ptx.fma(s, row_scale[:, None], -new_shift[:, None], shape))
            tile_out = steps.dot_16(p.astype(v_ref.dtype), v_ref[cols, :], b_is_turned=True)
        out = ptx.fma(out, keep[:, None], tile_out, (block_q, depth))
        return out, peak, new_shift, total * keep + jnp.sum(p, axis=1)

    nothing = jnp.full((block_q,), steps.NO_SCORE, jnp.float32)
    start = jnp.zeros((block_q, depth), jnp.float32), nothing, nothing, jnp.zeros((block_q,), jnp.float32)
    if masks is None:
        phases = steps.key_phases(i, block_q, block_k, is_causal=spec.is_causal, key_length=spec.key_length)
        out, _, shift, total = steps.loop_tiles(body, start, phases)
        out = out / total[:, None]
    else:
        out, _, shift, total = masks.loop(body, start, mask_refs)
        out = out / jnp.where(total == 0, 1.0, total)[:, None]
    if int8_values and not scale_a_tile:
        out = out * (v_scale_ref[...] if spec.packed else v_scale_ref[...][None, :])
    out_refs[0][...] = out.astype(out_refs[0].dtype)
    lse = shift + jnp.log2(total) - (steps.LOG2_INT8_MAX if int8_values else 0.0)
    rows = i * block_q + jnp.arange(block_q, dtype=jnp.int32)
    counts = rows < spec.query_length
    if masks is not None:
        counts = counts & (total != 0)
    out_refs[1][...] = jnp.where(counts, lse, steps.NO_QUERY)
    if len(out_refs) == 4:
        scale, inverse = steps.scale_and_inverse(jnp.max(steps.magnitude(out), axis=1), steps.INT16_MAX)
        out_refs[2][...] = ptx.round_to_int16(out * inverse[:, None])
        out_refs[3][...] = scale
