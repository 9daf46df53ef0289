"""Next-token cross-entropy in chunks of tokens, so that the logits of a batch never exist at one time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .model import Decoder


class LossSums(NamedTuple):
    """Sums over the tokens that count; each divided by ``count`` is a mean."""

    loss: Float[Array, ""]  # nats
    squared_lse: Float[Array, ""]  # of the logits' log-sum-exp, for z-loss
    count: Float[Array, ""]


def next_token_loss(
    model: Decoder, tokens: Int[Array, "B T1"], segment_ids: Int[Array, "B T1"] | None = None
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of each of T1 tokens but the first, given those before it."""
    sums = loss_sums(model, tokens, segment_ids)
    return sums.loss / sums.count


def loss_sums(
    model: Decoder,
    tokens: Int[Array, "B T1"],
    segment_ids: Int[Array, "B T1"] | None = None,
    row_weights: Float[Array, " B"] | None = None,
) -> LossSums:
    """loss = sum of w (lse(logits) - logits[target]) over T1 - 1 tokens of B sequences, in float32.

    w is 0 where the target is another document's first token, which nothing could predict, and else the sequence's
    weight (1 without row_weights). Logits exist for model.loss_chunk tokens of each sequence at a time, [B, chunk, V]
    in float32, and are made again in the backward pass; the embedding's gradients of the chunks add up in float32.
    """
    targets = tokens[:, 1:]
    weights = jnp.ones(targets.shape, jnp.float32)
    if row_weights is not None:
        weights = weights * row_weights[:, None]
    inputs_ids = None
    if segment_ids is not None:
        inputs_ids = segment_ids[:, :-1]
        weights = weights * (inputs_ids == segment_ids[:, 1:])
    x = model.hidden(model.embed(tokens[:, :-1]), inputs_ids)
    chunk, length = model.loss_chunk, targets.shape[1]
    if chunk >= length:
        return _chunk_sums(model, x, targets, weights)
    if length % chunk:
        raise ValueError(f"{length} tokens are no multiple of loss_chunk={chunk}")

    # The model's output layer alone goes into the scan, as an argument, or its gradient could not be found there.
    graphdef, params = nnx.split(model)

    @jax.checkpoint
    def add_chunk(params: Any, sums: LossSums, operands: Any) -> LossSums:
        return jax.tree.map(jnp.add, sums, _chunk_sums(nnx.merge(graphdef, params), *operands))

    def step(sums: LossSums, operands: Any) -> tuple[LossSums, None]:
        return add_chunk(params, sums, operands), None

    chunks = [jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0) for a in (x, targets, weights)]
    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(step, LossSums(zero, zero, zero), tuple(chunks))[0]


def _chunk_sums(model: Decoder, x: Any, targets: Any, weights: Any) -> LossSums:
    """The sums over [B, chunk] tokens."""
    logits = model.project(x)
    lse = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return LossSums(jnp.sum(weights * (lse - target_logits)), jnp.sum(weights * jnp.square(lse)), jnp.sum(weights))
