"""A Llama-style decoder: RMS norm, RoPE, SwiGLU, grouped-query attention with QK-norm, tied embeddings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sagebwd_jax import RESIDUAL_NAMES, SageConfig, attention
from sagebwd_jax.flax import QKNormAttention, RMSNorm

from .config import AttentionName, ModelConfig, SettingError
from .mesh import BATCH_AXES, constrain, gather_parameters
from .swiglu import SwiGLU

EMBEDDING_STD = 0.02
SAGE_PRESETS = {
    "default": SageConfig,
    "mixed": SageConfig.mixed,
    "precise": SageConfig.precise,
    "faithful": SageConfig.faithful,
}


def select_attention(name: AttentionName, sage_preset: str = "default") -> Callable[..., Any]:
    """The attention function behind one word of the config: of query, key, value, is_causal and segment_ids [B, T].

    With segment_ids a token attends to the tokens of its own number alone.
    """
    if name == "sagebwd":
        return functools.partial(_sagebwd, SAGE_PRESETS[sage_preset]())
    if name == "exact":
        return functools.partial(_dot_product, "xla")
    if name == "cudnn":
        if jax.default_backend() != "gpu":
            raise SettingError(f"attention='cudnn' needs an NVIDIA GPU; JAX runs on {jax.default_backend()!r} here")
        return functools.partial(_dot_product, "cudnn")
    raise SettingError(f"attention={name!r} must be 'sagebwd', 'exact' or 'cudnn'")


def _dot_product(implementation: Any, q: Any, k: Any, v: Any, *, is_causal: bool, segment_ids: Any = None) -> Any:
    """jax.nn's attention; documents become a mask [B, 1, T, T]."""
    mask = None if segment_ids is None else segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal, implementation=implementation)


def _sagebwd(config: SageConfig, q: Any, k: Any, v: Any, *, is_causal: bool, segment_ids: Any = None) -> Any:
    """SageBwd, which keeps sequences and heads on the devices of a mesh where they are."""
    return attention(
        q, k, v, is_causal=is_causal, config=config, query_segment_ids=segment_ids, key_value_segment_ids=segment_ids
    )


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
            attention_fn=select_attention(config.attention, config.sage_preset),
            qk_norm=config.qk_norm,
            rope_theta=config.rope_theta,
            eps=config.norm_eps,
            dtype=dtype,
            out_init=out_init,
            rngs=rngs,
        )
        self.ffn_norm = norm()
        self.ffn = SwiGLU(config.width, config.ffn_width, out_init=out_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T W"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T W"]:
        """Both residual branches in turn."""
        options = {} if segment_ids is None else dict(segment_ids=segment_ids)
        x = x + self.attention(self.attention_norm(x), **options)
        x = x + self.ffn(self.ffn_norm(x))
        return constrain(x, BATCH_AXES, None, None)

    def with_folded_gains(self) -> "Block":
        """The same function, as (x gain) W = x (gain W): neither gain's gradient is then a sum over tokens."""
        block = nnx.clone(self)
        attention, ffn = block.attention, block.ffn
        attention_layers, ffn_layers = (attention.query, attention.key, attention.value), (ffn.gate, ffn.up)
        for norm, layers in ((block.attention_norm, attention_layers), (block.ffn_norm, ffn_layers)):
            gain = norm.scale[...]
            for layer in layers:
                kernel = layer.kernel[...]
                layer.kernel[...] = gain.reshape(-1, *[1] * (kernel.ndim - 1)) * kernel
            norm.scale[...] = jnp.ones_like(gain)
        return block


class Decoder(nnx.Module):
    """Tokens to next-token logits.

    Parameters are float32, activations ``config.compute_dtype``, logits float32 (the loss rounds its own to
    ``config.logits_dtype``). The embedding is the output layer too.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.recompute = config.recompute
        self.loss_chunk = config.loss_chunk
        self.logits_dtype = jnp.dtype(config.logits_dtype)
        init = nnx.initializers.normal(EMBEDDING_STD)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.width), jnp.float32))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.width, eps=config.norm_eps, dtype=self.dtype, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits of the token after each of ``tokens``, which sees those before it that are of its own document."""
        return self.decode(self.embed(tokens), segment_ids)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """The row of each token."""
        # Cast after the look-up: the gradient then sums the uses of a token in float32. Bytes repeat a lot.
        rows = constrain(self.embedding[...], "tensor", None)[tokens].astype(self.dtype)
        return constrain(rows, BATCH_AXES, None, None)

    def decode(self, x: Float[Array, "B T W"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        """The same from embedded tokens."""
        return self.project(self.hidden(x, segment_ids))

    def hidden(self, x: Float[Array, "B T W"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T W"]:
        """What the output layer reads, from embedded tokens."""
        for block in self.blocks:
            graphdef, params = nnx.split(block)

            def run(params: Any, x: Any, ids: Any, graphdef: Any = graphdef) -> Any:
                return gather_parameters(nnx.merge(graphdef, params).with_folded_gains(), self.dtype)(x, ids)

            if self.recompute != "none":
                names = RESIDUAL_NAMES if self.recompute == "all_but_attention" else ()
                run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))
            x = run(params, x, segment_ids)
        return self.final_norm(x)

    def project(self, x: Float[Array, "B T W"]) -> Float[Array, "B T V"]:
        """Logits of the output layer."""
        return project(x, output_rows(self.embedding[...], x.dtype))


def output_rows(embedding: Float[Array, "V W"], dtype: Any) -> Float[Array, "V W"]:
    """The embedding as the output layer reads it: in ``dtype``, each device's part of the vocabulary whole."""
    return constrain(embedding.astype(dtype), "tensor", None)


def project(x: Float[Array, "B T W"], rows: Float[Array, "V W"], dtype: Any = jnp.float32) -> Float[Array, "B T V"]:
    """Logits of every token, rounded to ``dtype``: its products with the rows of the output layer."""
    logits = jnp.einsum("btw,vw->btv", x, rows, preferred_element_type=dtype)
    return constrain(logits, BATCH_AXES, None, "tensor")


def count_parameters(params: Any) -> int:
    """Numbers that training may change, of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
