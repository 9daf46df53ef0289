"""What INT8 costs each layer's attention during training, so that trouble shows before the loss does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from sagebwd_jax.diagnostics import measure_attention

from .config import ModelConfig
from .loss import next_token_loss
from .model import SAGE_PRESETS


def make_probe(graphdef: Any, config: ModelConfig) -> Callable[[Any, Int[Array, "1 T1"]], dict[str, Array]]:
    """A jitted ``(params, tokens)``: for each layer [L], on its own query, key, value and cotangent,

    largest_logit: largest |scale q . k| that a query sees (16-bit attention cares little, INT8's errors grow with it);
    ds_zero_share: share of the visible entries of dS that round to 0 in INT8, which is gradient that is lost;
    error_NAME: relative l2 error of p, ds (as INT8 products read them), out, dq, dk and dv against exact attention.
    """

    def probe(params: Any, tokens: Any) -> dict[str, Array]:
        layers = []
        for operands in attention_operands(graphdef, params, tokens, config):
            report = measure_attention(*operands, is_causal=True, config=SAGE_PRESETS[config.sage_preset]())
            errors = {f"error_{name}": report.errors[name].relative_l2 for name in ("p", "ds", "out", "dq", "dk", "dv")}
            layers.append(dict(largest_logit=report.largest_logit, ds_zero_share=report.ds_zero_share, **errors))
        return jax.tree.map(lambda *values: jnp.stack(values), *layers)

    return jax.jit(probe)


def attention_operands(
    graphdef: Any, params: Any, tokens: Int[Array, "B T1"], config: ModelConfig
) -> list[tuple[Any, Any, Any, Any]]:
    """query, key, value [B, T, heads, H] of every layer, and the gradient of the loss in its attention's output."""
    shape = (tokens.shape[0], tokens.shape[1] - 1, config.num_heads, config.head_dim)
    taps = [jnp.zeros(shape, config.compute_dtype)] * config.num_layers

    def tapped(attend: Any, tap: Any, seen: list[Any]) -> Any:
        def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
            seen.append((q, k, v))
            return attend(q, k, v, **options) + tap

        return call

    def loss(taps: Any) -> tuple[Array, Any]:
        model, seen = nnx.merge(graphdef, params), []
        # What is computed again cannot be handed out.
        model.recompute = "none"
        for block, tap in zip(model.blocks, taps, strict=True):
            block.attention.attention_fn = tapped(block.attention.attention_fn, tap, seen)
        return next_token_loss(model, tokens), seen

    douts, operands = jax.grad(loss, has_aux=True)(taps)
    return [(*qkv, dout) for qkv, dout in zip(operands, douts, strict=True)]
