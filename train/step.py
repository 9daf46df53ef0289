"""One optimizer step and one held-out loss, as pure jitted functions.

Shapes: A micro batches of B sequences of T1 = sequence_length + 1 tokens, inputs and targets overlapping.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from .config import ModelConfig
from .loss import LossSums, loss_sums
from .mesh import constrain_state, replicated, state_shardings
from .model import Block, Decoder

# One product for queries and keys would need their gradients joined in memory, 3% of what a step moves.
_COMPILER_OPTIONS = {"gpu": {"xla_gpu_dot_merger_threshold_mb": "0"}}


class TrainState(NamedTuple):
    """What a step changes: float32 parameters, the optimizer's moments, and the parameters' moving average if kept."""

    params: Any
    opt_state: Any
    ema: Any = None


class StepMetrics(NamedTuple):
    """What a step reports; still on the device."""

    loss: Float[Array, ""]  # nats per token, before the update
    grad_norm: Float[Array, ""]  # global, before clipping


def abstract_model(config: ModelConfig) -> tuple[Any, Any]:
    """The decoder's structure and the shapes of its parameters, without the memory of any."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def init_model(config: ModelConfig, seed: int, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """The decoder's structure and its initial parameters; the same seed gives the same ones for every attention.

    On a mesh each device makes its own part of them, and the values are those of one device.
    """
    graphdef, shapes = abstract_model(config)
    params = _make_init(dataclasses.replace(config, attention="exact"), mesh)(jax.random.key(seed))
    return graphdef, jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(params))


@functools.lru_cache(maxsize=8)
def _make_init(config: ModelConfig, mesh: Mesh | None) -> Callable[[Any], Any]:
    """A key -> parameters as a dict, compiled once for runs that are alike.

    One program makes any of the blocks: all of them in one would keep XLA busy for most of a minute.
    """

    def compiled(build: Callable[[nnx.Rngs], nnx.Module]) -> Callable[..., Any]:
        """(key, count) -> parameters outside of blocks, and the count after them."""

        def make(key: Any, count: Array) -> tuple[Any, Array]:
            rngs = nnx.Rngs(key)
            rngs.default.count[...] = count
            params = nnx.state(build(rngs))
            return {name: x for name, x in params.items() if name != "blocks"}, rngs.default.count[...]

        if mesh is None:
            return jax.jit(make)
        made, _ = jax.eval_shape(make, jax.random.key(0), jnp.uint32(0))
        return jax.jit(make, out_shardings=(state_shardings(mesh, made), replicated(mesh)))

    outside = compiled(lambda rngs: Decoder(config, rngs=rngs))
    block = compiled(lambda rngs: Block(config, rngs=rngs))

    def init(key: Any) -> Any:
        # How many keys were drawn: the embedding comes before the blocks.
        params, count, blocks = outside(key, jnp.uint32(0))[0], jnp.uint32(1), {}
        for layer in range(config.num_layers):
            blocks[layer], count = block(key, count)
        return {**params, "blocks": blocks}

    return init


def init_state(params: Any, optimizer: optax.GradientTransformation, *, keeps_ema: bool, mesh: Mesh) -> TrainState:
    """The state before the first step; on a mesh the moments lie as their parameters do."""
    make = functools.partial(_fresh_state, optimizer=optimizer, keeps_ema=keeps_ema)
    # Not params themselves through the jitted function: nothing should be copied but the moving average.
    shardings = state_shardings(mesh, jax.eval_shape(make, params))
    state = jax.jit(make, out_shardings=shardings)(params)
    return state._replace(params=params)


def abstract_state(params: Any, optimizer: optax.GradientTransformation, *, keeps_ema: bool, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and places of the state of such parameters, to restore one into, without the memory of any."""
    make = functools.partial(_fresh_state, optimizer=optimizer, keeps_ema=keeps_ema)
    shapes = jax.eval_shape(make, params)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )


def _fresh_state(params: Any, optimizer: optax.GradientTransformation, keeps_ema: bool) -> TrainState:
    """Parameters, first moments, and the moving average where it starts."""
    return TrainState(params, optimizer.init(params), jax.tree.map(jnp.copy, params) if keeps_ema else None)


def make_train_step(
    graphdef: Any, optimizer: optax.GradientTransformation, *, z_loss: float = 0.0, ema_decay: float = 0.0
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """A jitted step over A micro batches; the state passed in is donated and must not be used again.

    ``step(state, tokens, segment_ids=None)`` of [A, B, T1]. Gradients are added up in float32 and divided by the number
    of tokens that count in all micro batches, so A passes of B sequences are one step of A*B. What is minimised is
    loss + z_loss * mean(lse^2) (z-loss: Chowdhery et al., arXiv 2204.02311); what is reported is the loss. If the loss
    or the gradient is not finite the state comes back as it was. To be called, not traced: on a GPU it has options of
    the compiler, which JAX takes at the top alone.
    """

    def loss_fn(params: Any, tokens: Int[Array, "B T1"], ids: Int[Array, "B T1"] | None) -> tuple[Array, LossSums]:
        sums = loss_sums(nnx.merge(graphdef, params), tokens, ids, z_loss=z_loss)
        # Over all of its tokens, so that the size of gradients does not depend on how many there are.
        share = 1 / (tokens.shape[0] * (tokens.shape[1] - 1))
        sums = LossSums(*(share * part for part in sums))
        return sums.objective, sums

    def train_step(
        state: TrainState, tokens: Int[Array, "A B T1"], segment_ids: Int[Array, "A B T1"] | None = None
    ) -> tuple[TrainState, StepMetrics]:
        def accumulate(total: Any, batch: Any) -> tuple[Any, None]:
            (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, *batch)
            return constrain_state(jax.tree.map(jnp.add, total, (sums, grads))), None

        zero = jnp.zeros((), jnp.float32)
        zeros = LossSums(*[zero] * len(LossSums._fields)), jax.tree.map(jnp.zeros_like, state.params)
        (sums, grads), _ = jax.lax.scan(accumulate, zeros, (tokens, segment_ids))
        grads = jax.tree.map(lambda x: x / sums.count, grads)
        metrics = StepMetrics(sums.loss / sums.count, optax.tree.norm(grads))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda old, new: ema_decay * old + (1 - ema_decay) * new, ema, params)
        is_finite = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm)
        keep_finite = functools.partial(jnp.where, is_finite)
        return constrain_state(jax.tree.map(keep_finite, TrainState(params, opt_state, ema), state)), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=_COMPILER_OPTIONS.get(jax.default_backend()))


def make_eval_step(graphdef: Any) -> Callable[..., tuple[Array, Array]]:
    """A jitted ``(params, tokens [B, T1], segment_ids=None, row_weights=None)``: summed loss, and the tokens in it."""

    def eval_step(params: Any, tokens: Any, segment_ids: Any = None, row_weights: Any = None) -> tuple[Array, Array]:
        sums = loss_sums(nnx.merge(graphdef, params), tokens, segment_ids, row_weights)
        return sums.loss, sums.count

    return jax.jit(eval_step)
