"""Next-token cross-entropy in chunks of tokens, so that the logits of a batch never exist at one time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from .mesh import constrain
from .model import Decoder, output_rows, project

# Sums of exponentials up to this one leave float32 and bfloat16 room for what they are multiplied with.
LARGEST_TOTAL = 2.0**64


class LossSums(NamedTuple):
    """Sums over the tokens that count; each divided by ``count`` is a mean. Only the objective has a gradient."""

    objective: Float[Array, ""]  # loss + z_loss * squared_lse
    loss: Float[Array, ""]  # nats
    squared_lse: Float[Array, ""]  # of the logits' log-sum-exp, for z-loss
    count: Float[Array, ""]


def next_token_loss(
    model: Decoder, tokens: Int[Array, "B T1"], segment_ids: Int[Array, "B T1"] | None = None
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of each of T1 tokens but the first, given those before it."""
    sums = loss_sums(model, tokens, segment_ids)
    return sums.objective / sums.count


def loss_sums(
    model: Decoder,
    tokens: Int[Array, "B T1"],
    segment_ids: Int[Array, "B T1"] | None = None,
    row_weights: Float[Array, " B"] | None = None,
    *,
    z_loss: float = 0.0,
) -> LossSums:
    """loss = sum of w (lse(logits) - logits[target]) over T1 - 1 tokens of B sequences, in float32.

    w is 0 where the target is another document's first token, which nothing could predict, and else the sequence's
    weight (1 without row_weights). Logits exist for model.loss_chunk tokens of each sequence at a time, [B, chunk,
    V] in model.logits_dtype, beside their exponentials in the compute dtype; what the backward pass needs of them
    is computed while they are there.

    Raises:
      ValueError: model.loss_chunk does not divide T1 - 1 and is below it.
      TypeError: something other than the objective is differentiated.
    """
    targets = tokens[:, 1:]
    weights = jnp.ones(targets.shape, jnp.float32)
    if row_weights is not None:
        weights = weights * row_weights[:, None]
    inputs_ids = None
    if segment_ids is not None:
        inputs_ids = segment_ids[:, :-1]
        weights = weights * (inputs_ids == segment_ids[:, 1:])
    if model.loss_chunk < targets.shape[1] and targets.shape[1] % model.loss_chunk:
        raise ValueError(f"{targets.shape[1]} tokens are no multiple of loss_chunk={model.loss_chunk}")
    x = model.hidden(model.embed(tokens[:, :-1]), inputs_ids)
    settings = _Settings(model.loss_chunk, model.logits_dtype, z_loss)
    sums = _output_loss(x, model.embedding[...], targets, weights, settings)
    return LossSums(sums.objective, sums.loss, sums.squared_lse, jnp.sum(weights))


class _Settings(NamedTuple):
    """What the sums need besides arrays."""

    chunk: int  # tokens
    dtype: Any  # of logits in memory
    z_loss: float  # weight


class _Sums(NamedTuple):
    """Those of `LossSums` that logits are needed for."""

    objective: Any
    loss: Any
    squared_lse: Any


def _sums(x: Any, embedding: Any, targets: Any, weights: Any, settings: _Settings) -> _Sums:
    """The sums over [B, T] tokens from what the output layer reads."""
    rows = output_rows(embedding, x.dtype)

    def step(sums: _Sums, operands: Any) -> tuple[_Sums, None]:
        x, targets, weights = operands
        logits = project(x, rows, settings.dtype).astype(jnp.float32)
        return _add(sums, _token_losses(logits, targets), weights, settings.z_loss), None

    return _over_chunks(step, _zero_sums(), settings.chunk, x, targets, weights)[0]


def _forward(x: Any, embedding: Any, targets: Any, weights: Any, settings: _Settings) -> tuple[_Sums, tuple[Any, ...]]:
    """The sums, and the objective's gradients, which need no second look at the logits: they are linear in its own."""
    z_loss = settings.z_loss
    # What is differentiated comes with whether it is, which is of no use here.
    x, embedding, targets, weights = (arg.value for arg in (x, embedding, targets, weights))
    rows = output_rows(embedding, x.dtype)

    def step(carry: Any, operands: Any) -> tuple[Any, Any]:
        sums, dembedding = carry
        x, targets, weights = operands
        softmax = _exponentials(project(x, rows, settings.dtype), targets, x.dtype)
        nats, lse = softmax.losses()
        slope = 1 + 2 * z_loss * lse
        slope = jnp.where(jnp.abs(slope) < 1e-6, 1e-6, slope)  # it divides
        # dlogits = weight (slope exponentials / total - onehot) = factor (exponentials - total / slope onehot), where
        # a factor of each token can as well be that of its row in the products.
        factor = (weights * slope / softmax.total)[..., None]
        dlogits = softmax.less_at_targets(targets, softmax.total / slope)
        dx = jnp.einsum("btv,vw->btw", dlogits, rows, preferred_element_type=jnp.float32)
        dx = (factor * dx).astype(x.dtype)
        part = jnp.einsum("btv,btw->vw", dlogits, (factor * x).astype(x.dtype), preferred_element_type=jnp.float32)
        dembedding = constrain(dembedding + part, "tensor", None)
        return (_add(sums, (nats, lse), weights, z_loss), dembedding), (dx, nats + z_loss * jnp.square(lse))

    start = _zero_sums(), jnp.zeros(embedding.shape, jnp.float32)
    (sums, dembedding), (dx, dweights) = _over_chunks(step, start, settings.chunk, x, targets, weights)
    return sums, (dx, dembedding.astype(embedding.dtype), dweights)


def _backward(settings: _Settings, residuals: Any, cotangents: _Sums) -> tuple[Any, ...]:
    """The gradients that the forward pass made, times the objective's own."""
    dx, dembedding, dweights = residuals
    for name, value in zip(_Sums._fields[1:], cotangents[1:], strict=True):
        if not isinstance(value, SymbolicZero):
            raise TypeError(f"LossSums.{name} has no gradient; differentiate LossSums.objective")
    scale = cotangents.objective
    return (scale * dx).astype(dx.dtype), scale * dembedding, None, scale * dweights


_output_loss = jax.custom_vjp(_sums, nondiff_argnums=(4,))
_output_loss.defvjp(_forward, _backward, symbolic_zeros=True)


class _Exponentials(NamedTuple):
    """exp(logits - shift) of each token, rounded, and their sum before they were."""

    values: Float[Array, "B C V"]
    total: Float[Array, "B C"]
    shift: Float[Array, "B C"]
    target_logits: Float[Array, "B C"]

    def losses(self) -> tuple[Any, Any]:
        """As `_token_losses`."""
        nats = jnp.log(self.total) + (self.shift - self.target_logits)
        return nats, nats + self.target_logits

    def less_at_targets(self, targets: Any, amount: Any) -> Any:
        """The values, with that of each target less its amount, rounded once."""
        at_targets = jnp.exp(self.target_logits - self.shift) - amount

        def set_one(values: Any, target: Any, value: Any) -> Any:
            return values.at[target].set(value, mode="promise_in_bounds")

        # Mapped, it stays on the device that has the token.
        return jax.vmap(jax.vmap(set_one))(self.values, targets, at_targets.astype(self.values.dtype))


def _exponentials(logits: Any, targets: Any, dtype: Any) -> _Exponentials:
    """One pass over the logits, which takes each target's own as the shift: the sum then is exp(loss).

    Where that is above `LARGEST_TOTAL`, 44 nats, all is done again with the shift that always does, the maximum.
    """
    target_logits = _of_targets(logits, targets).astype(jnp.float32)

    def shifted_by(shift: Any) -> _Exponentials:
        values = jnp.exp(logits.astype(jnp.float32) - shift[..., None])
        return _Exponentials(values.astype(dtype), values.sum(axis=-1), shift, target_logits)

    # A loop without a turn leaves its arrays where they are; results of a branch would be copied.
    return jax.lax.while_loop(
        lambda softmax: jnp.any(softmax.total > LARGEST_TOTAL),
        lambda _: shifted_by(logits.max(axis=-1).astype(jnp.float32)),
        shifted_by(target_logits),
    )


def _token_losses(logits: Float[Array, "B C V"], targets: Int[Array, "B C"]) -> tuple[Any, Any]:
    """Each token's cross-entropy in nats, and its logits' log-sum-exp."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - _of_targets(logits, targets), lse


def _of_targets(logits: Float[Array, "B C V"], targets: Int[Array, "B C"]) -> Float[Array, "B C"]:
    """Each target's own logit."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def _zero_sums() -> _Sums:
    """Of no tokens."""
    return _Sums(*[jnp.zeros((), jnp.float32)] * len(_Sums._fields))


def _add(sums: _Sums, losses: tuple[Any, Any], weights: Any, z_loss: float) -> _Sums:
    """The sums with those of a chunk."""
    loss, squared_lse = jnp.sum(weights * losses[0]), jnp.sum(weights * jnp.square(losses[1]))
    return jax.tree.map(jnp.add, sums, _Sums(loss + z_loss * squared_lse, loss, squared_lse))


def _over_chunks(step: Any, carry: Any, chunk: int, *arrays: Any) -> tuple[Any, Any]:
    """jax.lax.scan over chunks of the second axis, whose results it joins again; all of it at once if it fits."""
    if chunk >= arrays[0].shape[1]:
        return step(carry, arrays)
    chunks = [jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0) for a in arrays]
    carry, results = jax.lax.scan(step, carry, tuple(chunks))
    return carry, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:]), results)
