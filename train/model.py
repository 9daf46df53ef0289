"""A Llama-style decoder: RMS norm, RoPE, SwiGLU, grouped-query attention with QK-norm, tied embeddings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sagebwd_jax import attention
from sagebwd_jax.flax import QKNormAttention, RMSNorm

from .config import AttentionName, ModelConfig, SettingError

EMBEDDING_STD = 0.02


def select_attention(name: AttentionName) -> Callable[..., Any]:
    """The attention function behind one word of the config."""
    if name == "exact":
        return functools.partial(jax.nn.dot_product_attention, implementation="xla")
    if name == "cudnn":
        if jax.default_backend() != "gpu":
            raise SettingError(f"attention='cudnn' needs an NVIDIA GPU; JAX runs on {jax.default_backend()!r} here")
        return functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if name == "sagebwd":
        return attention
    raise SettingError(f"attention={name!r} must be 'sagebwd', 'exact' or 'cudnn'")


class SwiGLU(nnx.Module):
    """(silu(x Wgate) * (x Wup)) Wdown (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, ffn_width: int, *, out_init: nnx.Initializer, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(use_bias=False, dtype=dtype, rngs=rngs)
        self.gate = nnx.Linear(width, ffn_width, **options)
        self.up = nnx.Linear(width, ffn_width, **options)
        self.down = nnx.Linear(ffn_width, width, kernel_init=out_init, **options)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Applies the layer to every token."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        # 2 * num_layers branches add to the residual stream; scaled like this, their sum starts with variance 1.
        out_init = nnx.initializers.variance_scaling(0.5 / config.num_layers, "fan_in", "truncated_normal")
        norm = functools.partial(RMSNorm, config.width, eps=config.norm_eps, dtype=dtype, rngs=rngs)
        self.attention_norm = norm()
        self.attention = QKNormAttention(
            config.width,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            attention_fn=select_attention(config.attention),
            qk_norm=config.qk_norm,
            rope_theta=config.rope_theta,
            eps=config.norm_eps,
            dtype=dtype,
            out_init=out_init,
            rngs=rngs,
        )
        self.ffn_norm = norm()
        self.ffn = SwiGLU(config.width, config.ffn_width, out_init=out_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Both residual branches in turn."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nnx.Module):
    """Tokens to next-token logits.

    Parameters are float32, activations ``config.compute_dtype``, logits float32. The embedding is the output layer too.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        init = nnx.initializers.normal(EMBEDDING_STD)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.width), jnp.float32))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.width, eps=config.norm_eps, dtype=self.dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of the token after each of ``tokens``."""
        # Cast after the look-up: the gradient then sums the uses of a token in float32. Bytes repeat a lot.
        return self.decode(self.embedding[...][tokens].astype(self.dtype))

    def decode(self, x: Float[Array, "B T W"]) -> Float[Array, "B T V"]:
        """The same from embedded tokens."""
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        embedding = self.embedding[...].astype(self.dtype)
        return jnp.einsum("btw,vw->btv", x, embedding, preferred_element_type=jnp.float32)


def next_token_loss(model: Decoder, tokens: Int[Array, "B T1"]) -> Float[Array, ""]:
    """Mean cross-entropy in nats of each of T1 tokens but the first, given those before it."""
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def count_parameters(model: Decoder) -> int:
    """Numbers that training may change; works on shapes alone."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
