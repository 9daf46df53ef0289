"""One optimizer step and one held-out loss, as pure jitted functions.

Shapes: A micro batches of B sequences of T1 = sequence_length + 1 tokens, inputs and targets overlapping.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from .config import ModelConfig
from .model import Decoder, next_token_loss


class TrainState(NamedTuple):
    """What a step changes: float32 parameters and AdamW's moments."""

    params: Any
    opt_state: Any


class StepMetrics(NamedTuple):
    """What a step reports; still on the device."""

    loss: Float[Array, ""]  # nats per token, before the update
    grad_norm: Float[Array, ""]  # global, before clipping


def init_model(config: ModelConfig, seed: int) -> tuple[Any, Any]:
    """The decoder's structure and its initial parameters; the same seed gives the same ones for every attention."""
    return nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))


def make_train_step(
    graphdef: Any, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Int[Array, "A B T1"]], tuple[TrainState, StepMetrics]]:
    """A jitted step over A micro batches; the state passed in is donated and must not be used again.

    Gradients are averaged in float32 over the micro batches, so A passes of B sequences are one step of A*B.
    """

    def loss_fn(params: Any, tokens: Int[Array, "B T1"]) -> Float[Array, ""]:
        return next_token_loss(nnx.merge(graphdef, params), tokens)

    def train_step(state: TrainState, batch: Int[Array, "A B T1"]) -> tuple[TrainState, StepMetrics]:
        def accumulate(total: Any, tokens: Int[Array, "B T1"]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(state.params, tokens)), None

        zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params))
        total, _ = jax.lax.scan(accumulate, zeros, batch)
        loss, grads = jax.tree.map(lambda x: x / batch.shape[0], total)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), StepMetrics(loss, optax.tree.norm(grads))

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(graphdef: Any) -> Callable[[Any, Int[Array, "B T1"]], Float[Array, ""]]:
    """A jitted mean loss of one batch."""

    def eval_step(params: Any, tokens: Int[Array, "B T1"]) -> Float[Array, ""]:
        return next_token_loss(nnx.merge(graphdef, params), tokens)

    return jax.jit(eval_step)
