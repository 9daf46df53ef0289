"""attention() in the form that Flax's own modules call their attention_fn."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sagebwd_jax._attention import attention
from sagebwd_jax._config import SageConfig


def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K H"],
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    *,
    config: SageConfig | None = None,
    implementation: str | None = None,
    **attention_options: Any,
) -> Float[Array, "*B T N H"]:
    """softmax(Q K^T / sqrt(H)) V for `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`.

        nnx.MultiHeadAttention(..., attention_fn=attention_fn)
        linen.MultiHeadDotProductAttention(..., attention_fn=functools.partial(attention_fn, is_causal=True))

    Linen passes only arguments that are named here, nnx all of its own; each is honoured or refused, none is dropped.

    Args:
      query, key, value: with any number of batch axes; cast to `dtype`, or to their common dtype.
      bias, mask: broadcast against [*B, N, T, S] and given to `attention`; a mask that is not boolean hides where it
        is 0, as in Flax.
      dropout_rate: of the attention weights; refused above 0 unless `deterministic`, for there are no weights to drop.
      broadcast_dropout, dropout_rng: without dropout they mean nothing.
      force_fp32_for_softmax: the softmax is in float32 anyway.
      precision, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: only None (and the default
        precision); `config` decides how products are computed.
      module: only None: the attention weights that it would receive are never made.
      is_causal, config, implementation, attention_options: see `attention`.

    Raises:
      NotImplementedError: what is refused above.
      ValueError, TypeError: see `attention`.
    """
    del broadcast_dropout, dropout_rng, force_fp32_for_softmax
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(
            f"{dropout_rate=} with {deterministic=}: dropout of the attention weights is not supported; accepted are 0,"
            " or deterministic=True"
        )
    if precision not in (None, jax.lax.Precision.DEFAULT):
        raise NotImplementedError(f"{precision=} is not supported: only None is accepted; see SageConfig")
    refused = dict(
        module=module,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    for name, given in refused.items():
        if given is not None:
            why = (
                "the attention weights that sow_weights asks for are never made"
                if name == "module"
                else "see SageConfig"
            )
            kind = type(given).__name__
            raise NotImplementedError(f"{name}: got a {kind}, only None is accepted; {why}")

    if attention_options.get("return_residual"):
        raise NotImplementedError("return_residual=True is not supported: Flax's modules take one output")
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    batch = query.shape[:-3]

    def flat(x):
        return x.astype(dtype).reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    mask = None if mask is None else _flat_scores(mask.astype(bool), batch)
    bias = None if bias is None else _flat_scores(bias, batch)
    out: Any = attention(
        flat(query),
        flat(key),
        flat(value),
        bias,
        mask,
        is_causal=is_causal,
        config=config,
        implementation=implementation,
        **attention_options,
    )
    return out.reshape(*batch, *out.shape[-3:])


def _flat_scores(x, batch):
    """Mask or bias [*B, N, T, S], of which axes may be 1 or missing, with one batch axis, 1 if all share it."""
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, scores = x.shape[:-3], x.shape[-3:]
    if math.prod(lead) == 1:
        return x.reshape(1, *scores)
    return jnp.broadcast_to(x, (*batch, *scores)).reshape(math.prod(batch), *scores)
