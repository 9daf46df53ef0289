"""How far quantised attention is from exact attention, tensor by tensor: the paper's Table 2 for any activations."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sagebwd_jax import reference
from sagebwd_jax._attention import attention
from sagebwd_jax._config import SageConfig


class TensorError(NamedTuple):
    """Of one tensor against its exact value, over all of its entries, in float32."""

    cosine: Float[Array, ""]
    relative_l2: Float[Array, ""]  # norm(got - exact) / norm(exact)


class AttentionReport(NamedTuple):
    """What quantisation does to one call of attention."""

    errors: dict[str, TensorError]
    """Of delta, p, dp, ds, out, dq, dk and dv: the columns of the paper's Table 2."""
    largest_logit: Float[Array, ""]
    """Largest |scale q . k| that a query sees, natural units."""
    ds_zero_share: Float[Array, ""]
    """Share of the scores that a query sees whose dS rounds to 0 in INT8; 0 where dQ's product is in 16 bits."""


def measure_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    config: SageConfig | None = None,
    implementation: str | None = None,
) -> AttentionReport:
    """Cosine and relative l2 error of every tensor of attention, as in arXiv 2603.02170, Table 2.

    out, dq, dk and dv are what `attention` itself returns for these inputs. Of delta = rowsum(dO O), P, dP = dO V^T and
    dS = P (dP - delta), which it never has in memory, the quantised values are those of the dense form: P and dS as the
    INT8 products of dV and dQ read them, rounded; dP as its 16-bit product makes it. Exact values are float32
    throughout, and dO counts as exact. Memory is O(B N T S): measure a sequence or two of a few thousand tokens.

    Args:
      query, key, value: as of `attention`, batched.
      dout: cotangent of the output, [B, T, N, H].
      is_causal, scale, config, implementation: as of `attention`; scale a number.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attention`, and ValueError for a dout unlike query.
    """
    if dout.shape != query.shape:
        raise ValueError(f"dout must have query's shape {query.shape}: got {dout.shape}")
    config = SageConfig() if config is None else config
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    def attend(q: Array, k: Array, v: Array) -> Array:
        out = attention(q, k, v, is_causal=is_causal, scale=scale, config=config, implementation=implementation)
        assert isinstance(out, jax.Array)
        return out

    out, vjp = jax.vjp(attend, query, key, value)
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout.astype(out.dtype))), strict=True))
    truth = reference.exact_attention_and_grads(query, key, value, dout, is_causal=is_causal, scale=scale)
    exact = {name: getattr(truth, name) for name in got}

    visible = jnp.ones((query.shape[1], key.shape[1]), bool)
    visible = jnp.tril(visible) if is_causal else visible
    inputs = query, key, value, dout
    logits, exact_scores = _exact_scores(*inputs, scale, visible, truth)
    exact |= exact_scores
    got |= _quantized_scores(*inputs, scale, visible, config.at_depth(query.shape[-1]))
    zeros = jnp.sum((got["ds"] == 0) & visible) / (visible.sum() * query.shape[0] * query.shape[2])
    return AttentionReport(
        errors={name: _error(got[name], exact[name]) for name in ("delta", "p", "dp", "ds", "out", "dq", "dk", "dv")},
        largest_logit=jnp.max(jnp.where(visible, jnp.abs(logits), 0.0)),
        ds_zero_share=jnp.float32(0) if "dq" in config.sixteen_bit else zeros.astype(jnp.float32),
    )


def _exact_scores(query, key, value, dout, scale, visible, truth):
    """Logits, and P, dP, dS, delta in float32 [B, N, T, S]."""
    q, k, v, do = _by_head(query, key, value, dout)
    logits = scale * _product("bnth,bnsh->bnts", q, k)
    p = jnp.where(visible, jnp.exp(logits - truth.lse.swapaxes(1, 2)[..., None]), 0.0)
    dp = jnp.where(visible, _product("bnth,bnsh->bnts", do, v), 0.0)
    delta = jnp.sum(do * truth.out.swapaxes(1, 2), axis=-1, keepdims=True)
    return logits, dict(p=p, dp=dp, delta=delta, ds=p * (dp - delta))


def _quantized_scores(query, key, value, dout, scale, visible, config):
    """P and dS as the products of dV and dQ read them, dP and delta; the steps are reference.py's."""
    q, k, v, do = _by_head(query, key, value, dout)
    q16, k16, v16, do16 = (reference._round_to_16_bits(x, query.dtype) for x in (q, k, v, do))
    k_smooth = k - k.mean(2, keepdims=True) if config.smooth_k else k
    q_int8, q_scale = reference._quantize_rows(q * (scale * reference.LOG2_E), config.query_scale, config.block_q)
    k_int8, k_scale = reference._quantize_rows(k_smooth, config.key_scale, config.block_k)
    if "qk" in config.sixteen_bit:
        s = _product("bnth,bnsh->bnts", q16, k16) * (scale * reference.LOG2_E)
    else:
        s = _product("bnth,bnsh->bnts", q_int8, k_int8) * q_scale * k_scale.swapaxes(2, 3)
    s = jnp.where(visible, s, -jnp.inf)
    p = jnp.exp2(s - reference._logsumexp2(s))
    dp = jnp.where(visible, _product("bnth,bnsh->bnts", do16, v16), 0.0)
    largest = jnp.abs(v).max(2, keepdims=True)
    out = _product("bnts,bnsh->bnth", *reference._operands_of_out(p, v, v16, largest, query.dtype, config))
    delta = jnp.sum(do * out, axis=-1, keepdims=True)
    ds = p * (dp - delta)
    rounded = dict(p=p, dp=dp, delta=delta, ds=ds)
    if "dv" not in config.sixteen_bit:
        # A scale that varies along a sum is part of what is rounded; taken out again to compare.
        _, do_scale = reference._quantize_rows(do, config.dout_scale, config.block_q)
        rows = reference._tile_rows(config, config.block_k)
        rounded_p = reference._round_rows((p * do_scale).swapaxes(2, 3), config.dv_span, rows).swapaxes(2, 3)
        rounded["p"] = jnp.where(do_scale == 0, p, rounded_p / jnp.where(do_scale == 0, 1, do_scale))
    if "dq" not in config.sixteen_bit:
        columns = k_scale.swapaxes(2, 3)
        rows = reference._tile_rows(config, config.block_q)
        rounded_ds = reference._round_rows(ds * columns, config.dq_span, rows)
        rounded["ds"] = jnp.where(columns == 0, ds, rounded_ds / jnp.where(columns == 0, 1, columns))
    return rounded


def _by_head(query, key, value, dout):
    """float32 [B, N, time, H]; keys and values repeated for the query heads that share them."""
    q, k, v, do = (x.astype(jnp.float32).swapaxes(1, 2) for x in (query, key, value, dout))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    return q, k, v, do


def _product(axes, a, b):
    """One matrix product in float32."""
    return jnp.einsum(axes, a, b, precision="highest")


def _error(got, exact) -> TensorError:
    """Cosine and relative l2; two tensors that are 0 agree."""
    got, exact = got.astype(jnp.float32).ravel(), exact.astype(jnp.float32).ravel()
    norm, size, difference = (jnp.linalg.norm(x) for x in (got, exact, got - exact))
    same = difference == 0
    cosine = jnp.vdot(got, exact, precision="highest") / jnp.where(norm * size == 0, 1, norm * size)
    return TensorError(jnp.where(same, 1.0, cosine), jnp.where(same, 0.0, difference / size))
