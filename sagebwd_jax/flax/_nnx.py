"""Multi-head attention with QK-norm as a Flax nnx module, and the RMS norm that it uses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from sagebwd_jax._attention import attention

from ._rope import apply_rope

_FAN_IN = nnx.initializers.lecun_normal()


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last axis.

    Statistics, quotient and gain are float32 whatever comes in, and the result is rounded once, to ``dtype``.
    nnx.RMSNorm rounds its gain to ``dtype`` first, which at bfloat16 hides any change of it below 0.4%.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (features,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch W"]) -> Float[Array, "*batch W"]:
        """Normalizes every vector along the last axis."""
        x = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * inverse_rms * self.scale[...].astype(jnp.float32)).astype(self.dtype)


class QKNormAttention(nnx.Module):
    """Projections, QK-norm, RoPE, attention and output projection; grouped-query when num_kv_heads < num_heads.

        q, k, v = x Wq, x Wk, x Wv;    out = attention(rope(norm(q)), rope(norm(k)), v) Wo

    The norm is an RMS norm of each head of each token with one learned gain [H] for queries and one for keys, both
    shared by their heads. The paper asks for QK-norm without saying where (arXiv 2603.02170, section 5); per head and
    before RoPE is what Qwen3 does. INT8 attention leans on it: its error in dQ and dK grows with the spread of the
    logits.

    Parameters are kept in ``param_dtype`` and cast to ``dtype`` where they are used. Query, key and value reach the
    attention function in ``dtype``, all three alike.

    Args:
      width: channels of input and output.
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of num_heads; None for as many as query heads.
      head_dim: channels of a head; None for width / num_heads.
      attention_fn: anything with the signature of jax.nn.dot_product_attention.
      is_causal: whether a token sees itself and its past only.
      qk_norm: False leaves queries and keys as they are.
      rope_theta: see apply_rope.
      eps: of the two norms.
      kernel_init, out_init: initializers of the three input projections and of the output projection.

    Raises:
      ValueError: num_kv_heads does not divide num_heads, or head_dim is None and num_heads does not divide width.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        attention_fn: Callable[..., Any] = attention,
        is_causal: bool = True,
        qk_norm: bool = True,
        rope_theta: float = 10_000.0,
        eps: float = 1e-6,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = _FAN_IN,
        out_init: nnx.Initializer = _FAN_IN,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
        if head_dim is None:
            if width % num_heads:
                raise ValueError(f"{width=} must be a multiple of {num_heads=} unless head_dim is given")
            head_dim = width // num_heads
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)

        def project(heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                width, (heads, head_dim), use_bias=False, kernel_init=kernel_init, rngs=rngs, **dtypes
            )

        self.query = project(num_heads)
        self.key = project(num_kv_heads)
        self.value = project(num_kv_heads)
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim), width, axis=(-2, -1), use_bias=False, kernel_init=out_init, rngs=rngs, **dtypes
        )
        self.query_norm = RMSNorm(head_dim, eps=eps, rngs=rngs, **dtypes) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, eps=eps, rngs=rngs, **dtypes) if qk_norm else None
        self.attention_fn = attention_fn
        self.is_causal = is_causal
        self.rope_theta = rope_theta

    def __call__(
        self, x: Float[Array, "B T W"], *, positions: Int[Array, "#B T"] | None = None, **attention_options: Any
    ) -> Float[Array, "B T W"]:
        """Attends within x; positions are RoPE's, attention_options go to the attention function untouched."""
        q, k, v = self.query(x), self.key(x), self.value(x)  # [B, T, heads, H]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q = apply_rope(q, positions, theta=self.rope_theta)
        k = apply_rope(k, positions, theta=self.rope_theta)
        return self.out(self.attention_fn(q, k, v, is_causal=self.is_causal, **attention_options))
