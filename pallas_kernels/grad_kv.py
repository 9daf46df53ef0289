"""The kernel of dV = P^T dO and dK = dS^T Q for a tile of keys: either, or both from one tile of scores.

May be changed: how a tile is computed, and which gradients share a program. Must stay: a key's row of P is rounded over
`dv_span` queries and its row of dS over `dk_span`, the tile's length.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import ptx, steps
from pallas_kernels.launch import Tile, call, own_rows, whole_group, whole_head
from pallas_kernels.masking import TileMasks


def grad_kv(ops, *, spec, tile: Tile, want_dk, want_dv, out_dtype, visibility=None):
    """dK and dV [B, S, K, H], those that are wanted, in this order; both only if both products are in 16 bits.

    `ops` is a `BackwardOperands` (attention.py): what each product reads, in the order and type it reads; `visibility`
    is what the forward pass had.
    """
    int8_scores = spec.uses_int8("qk")
    batch, keys, kv_heads, depth = ops.v.shape
    group = ops.dout.shape[2] // kv_heads

    def queries(x, heads_last=False):
        return x, whole_group(x, heads_last=heads_last, group=group)

    inputs = dict(
        q=queries(ops.q, heads_last=not int8_scores),
        k=(ops.k, own_rows(tile.block_k, depth, heads_last=not int8_scores)),
        poison=(ops.poison, whole_head(ops.poison)),
    )
    # A kernel of one INT8 product takes the scale that varies along its sum with the exponent, for nothing.
    shift = ops.shift
    if want_dk and spec.uses_int8("dk"):
        shift = ops.shift_dk
    elif want_dv and spec.uses_int8("dv"):
        shift = ops.shift_dv
    inputs |= dict(shift=queries(shift))
    if int8_scores:
        one_scale = spec.config.key_scale == "block"
        k_scale_block = whole_head(ops.k_scale) if one_scale else own_rows(tile.block_k)
        inputs |= dict(q_scale=queries(ops.q_scale), k_scale=(ops.k_scale, k_scale_block))
    if want_dk or not spec.uses_int8("dv"):
        inputs |= dict(dout=queries(ops.dout, heads_last=True))
    if want_dk:
        inputs |= dict(v=(ops.v, own_rows(tile.block_k, depth, heads_last=True)), delta=queries(ops.delta))
        if spec.uses_int8("dk"):
            inputs |= dict(q_turned=queries(ops.q_turned))
        else:
            inputs |= dict(q_16=queries(ops.q_16, heads_last=True))
    if want_dv and spec.uses_int8("dv"):
        inputs |= dict(dout_turned=queries(ops.dout_turned))

    masks = None
    if visibility is not None:
        masks = TileMasks.make(visibility, spec=spec, tile=tile, owns_keys=True, group=group)
        inputs |= masks.operands
    names = list(inputs)

    def kernel(*refs):
        _grad_kv_tile(
            dict(zip(names, refs, strict=False)),
            refs[len(names) :],
            spec=spec,
            tile=tile,
            group=group,
            want=(want_dk, want_dv),
            masks=masks,
        )

    outputs = want_dk + want_dv
    return call(
        kernel,
        "sagebwd_grad_" + "k" * want_dk + "v" * want_dv,
        (keys // tile.block_k, kv_heads, batch),
        [x for x, _ in inputs.values()],
        [block for _, block in inputs.values()],
        [jax.ShapeDtypeStruct((batch, keys, kv_heads, depth), out_dtype)] * outputs,
        [own_rows(tile.block_k, depth, heads_last=True)] * outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _grad_kv_tile(refs, out_refs, *, spec, tile, group, want, masks):
    """One program: block_k keys against every query that sees them, of each query head of the group."""
    want_dk, want_dv = want
    outputs = len(out_refs)
    j, k = pl.program_id(0), refs["k"][...]
    block_q, block_k, depth = tile.block_q, tile.block_k, k.shape[1]
    shape = (block_k, block_q)
    whole_tile = spec.config.grad_scale == "tile"
    int8_scores, int8_dv, int8_dk = spec.uses_int8("qk"), spec.uses_int8("dv"), spec.uses_int8("dk")
    v = refs["v"][...] if want_dk else None
    uniform_keys = spec.config.key_scale == "block"
    if int8_scores:
        k_scale = refs["k_scale"][j * block_k // spec.config.block_k] if uniform_keys else refs["k_scale"][...]

    def scores(g, rows):
        return steps.score_tile(k, refs["q"][(g, rows, slice(None)) if int8_scores else (rows, g, slice(None))])

    def probabilities(s, g, i, rows, edge):
        """P^T [keys, queries] of a tile of scores, times the scale that `shift` holds."""
        if not int8_scores:
            scale = jnp.full((1, 1), spec.scale * steps.LOG2_E, jnp.float32)
        elif uniform_keys:
            scale = (refs["q_scale"][g, rows] * k_scale)[None, :]
        else:
            s, scale = s * k_scale[:, None], refs["q_scale"][g, rows][None, :]
        shift, seen = refs["shift"][g, rows][None, :], None
        if masks is not None:
            seen, bias = masks.tile_of(refs, i, j, edge=edge, g=g)
            shift = shift if bias is None else shift + bias
        p = ptx.exp2(ptx.fma(s, scale, shift, shape))
        if edge and masks is None:
            seen = steps.visible(
                j * block_k,
                i * block_q,
                shape,
                is_causal=spec.is_causal,
                key_length=spec.key_length,
                rows_are_queries=False,
            )
        return p if seen is None else jnp.where(seen, p, 0.0)

    def add_dv(p, g, rows, dv):
        if not int8_dv:
            dout = refs["dout"][rows, g, :]
            return dv + steps.dot_16(p.astype(dout.dtype), dout, b_is_turned=True)
        p_int8, p_scale = steps.quantize_row(p, whole_tile=whole_tile)
        product = steps.dot_int8(p_int8, refs["dout_turned"][g, :, rows])
        return ptx.fma(product, p_scale[:, None], dv, dv.shape)

    def dp_product(g, i):
        return steps.dot_16(v, refs["dout"][pl.ds(i * block_q, block_q), g, :])

    def add_dk(p, dp, g, rows, dk):
        ds = p * (dp - refs["delta"][g, rows][None, :])
        if not int8_dk:
            # bfloat16 even for float16 inputs: nothing bounds dS.
            q_16 = refs["q_16"][rows, g, :].astype(jnp.bfloat16)
            return dk + steps.dot_16(ds.astype(jnp.bfloat16), q_16, b_is_turned=True)
        ds_int8, ds_scale = steps.quantize_row(ds, whole_tile=whole_tile)
        return ptx.fma(steps.dot_int8(ds_int8, refs["q_turned"][g, :, rows]), ds_scale[:, None], dk, dk.shape)

    def body(g, i, carry, *, following, edge):
        sums, ahead = list(carry[:outputs]), carry[outputs:]
        rows = pl.ds(i * block_q, block_q)
        s, dp = scores(g, rows), None
        if tile.dp_ahead:
            # After S: the compiler lets a product run on into the next iteration if the first wait there is another's.
            [dp], ahead = ahead, [dp_product(g, following)]
        elif not want_dv:
            dp = dp_product(g, i)
        p = probabilities(s, g, i, rows, edge)
        if want_dv:
            sums[-1] = add_dv(p, g, rows, sums[-1])
        if want_dk:
            # With dV beside it only here: fewer values are held at a time.
            dp = dp_product(g, i) if dp is None else dp
            sums[0] = add_dk(p, dp, g, rows, sums[0])
        return *sums, *ahead

    # Keys that do not count are rows of their own, whose results nobody reads, unless they share a tile's scale.
    mask_all = whole_tile and spec.key_length % block_k != 0
    phases = steps.query_phases(
        j, block_q, block_k, is_causal=spec.is_causal, query_length=spec.query_length, mask_all=mask_all
    )

    def head(g, sums):
        if masks is not None:
            return masks.loop(functools.partial(body, g), sums, refs, g)
        ahead = [dp_product(g, steps.first_tile(phases))] if tile.dp_ahead else []
        return steps.loop_tiles(functools.partial(body, g), (*sums, *ahead), phases)[:outputs]

    sums = (jnp.zeros((block_k, depth), jnp.float32),) * outputs
    sums = head(0, sums) if group == 1 else lax.fori_loop(0, group, head, sums)

    # NaN if a query of the group is not finite: the maximum of a row loses it.
    poison = refs["poison"][0]
    factors = [1 / steps.LOG2_E if int8_dk else spec.scale] * want_dk + [1.0] * want_dv
    for out_ref, total, factor in zip(out_refs, sums, factors, strict=True):
        out_ref[...] = (total * factor + poison).astype(out_ref.dtype)
