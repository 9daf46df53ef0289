"""Schedule at named steps, decay of matrices only and decoupled, clipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_micro import micro_config

from train.config import OptimizerConfig
from train.model import Decoder
from train.optimizer import decay_mask, learning_rate_schedule, make_optimizer


def make_config(**overrides):
    defaults = dict(peak_learning_rate=0.8, final_learning_rate_ratio=0.25, warmup_steps=4)
    return OptimizerConfig(**(defaults | overrides))


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.16),  # the first update moves already
        (3, 0.64),
        (4, 0.8),  # peak
        (12, 0.5),  # halfway down: mean of 0.8 and 0.2
        (20, 0.2),  # the last of 21 updates
        (50, 0.2),
    ],
)
def test_schedule_at_named_steps(step, rate):
    np.testing.assert_allclose(learning_rate_schedule(make_config(), steps=21)(step), rate, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 7])
def test_schedule_without_warmup_starts_at_the_peak(steps):
    schedule = learning_rate_schedule(make_config(warmup_steps=0), steps)
    np.testing.assert_allclose(schedule(0), 0.8, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.16), (3, 0.64), (4, 0.8), (13, 0.8), (14, 0.8), (17, 0.5), (20, 0.2), (50, 0.2)],
)
def test_wsd_stays_at_the_peak_and_then_falls_in_a_line(step, rate):
    schedule = learning_rate_schedule(make_config(schedule="wsd", decay_fraction=0.3), steps=21)
    np.testing.assert_allclose(schedule(step), rate, rtol=1e-6)


def test_only_matrices_decay():
    params = nnx.state(nnx.eval_shape(lambda: Decoder(micro_config().model, rngs=nnx.Rngs(0))))
    decays = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(decay_mask(params))}
    assert {name.rsplit(".")[-1] for name, decayed in decays.items() if decayed} == {"kernel", "embedding"}
    assert {name.rsplit(".")[-1] for name, decayed in decays.items() if not decayed} == {"scale"}
    assert decays["blocks.0.attention.query.kernel"] and not decays["blocks.1.attention.query_norm.scale"]


def test_decay_is_decoupled_from_the_gradient():
    optimizer = make_optimizer(make_config(weight_decay=0.5, warmup_steps=0), steps=1)
    params = {"matrix": jnp.full((2, 3), 10.0), "gain": jnp.full((3,), 10.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], np.full((2, 3), -0.8 * 0.5 * 10), rtol=1e-6)
    np.testing.assert_array_equal(updates["gain"], np.zeros(3))


def test_moments_and_clipping_are_as_configured():
    """Two steps written out: clip to norm 1, both moments, bias correction, epsilon outside the root."""
    config = make_config(beta1=0.7, beta2=0.9, epsilon=0.1, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)
    optimizer = make_optimizer(config, steps=100)
    schedule = learning_rate_schedule(config, steps=100)
    params = {"gain": jnp.zeros(2)}
    state = optimizer.init(params)
    first, second = 0.0, 0.0
    for step, grad in enumerate((np.array([3.0, 4.0]), np.array([0.3, -0.4]))):
        updates, state = optimizer.update({"gain": jnp.asarray(grad, jnp.float32)}, state, params)
        clipped = grad / max(1.0, np.linalg.norm(grad))
        first, second = 0.7 * first + 0.3 * clipped, 0.9 * second + 0.1 * clipped**2
        mean, square = first / (1 - 0.7 ** (step + 1)), second / (1 - 0.9 ** (step + 1))
        expected = -float(schedule(step)) * mean / (np.sqrt(square) + 0.1)
        np.testing.assert_allclose(updates["gain"], expected, rtol=1e-5)


def muon_update(grads, params):
    """Updates of the first step, keyed by path, at a rate of 1 and a decay of 0.5."""
    config = make_config(optimizer="muon", weight_decay=0.5, warmup_steps=0, peak_learning_rate=1.0, clip_norm=1e9)
    init, update = _jitted_muon(config)
    return dict(nnx.to_flat_state(update(grads, init(params), params)[0]))


@functools.cache
def _jitted_muon(config):
    optimizer = make_optimizer(config, steps=10)
    return jax.jit(optimizer.init), jax.jit(optimizer.update)


def test_muon_makes_the_layers_matrices_orthogonal_and_leaves_the_rest_to_adam():
    """The update of each kernel has singular values alike, and AdamW's size; embedding and gains are Adam's."""
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(micro_config(num_layers=1).model, rngs=nnx.Rngs(0))))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # which do not decay
    grads = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    kinds = set()
    for path, leaf in muon_update(grads, zeros).items():
        update = np.asarray(leaf[...])
        kinds.add(path[-1])
        if path[-1] != "kernel":
            # Nesterov's first step is one size for all entries.
            np.testing.assert_allclose(np.abs(update), np.abs(update).max(), rtol=1e-2)
            continue
        rows = np.prod(update.shape[:-1]) if path[-2] == "out" else update.shape[0]
        values = np.linalg.svd(update.reshape(int(rows), -1), compute_uv=False)
        assert values.max() / values.min() < 2, (path, values)
        assert np.sqrt(np.mean(update**2)) == pytest.approx(0.2, rel=0.2)
    assert kinds == {"kernel", "scale", "embedding"}


def test_muon_decays_matrices_alone_and_decoupled():
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(micro_config(num_layers=1).model, rngs=nnx.Rngs(0))))
    zeros, tens = (jax.tree.map(lambda leaf, x=x: jnp.full(leaf.shape, x), shapes) for x in (0.0, 10.0))
    for path, leaf in muon_update(zeros, tens).items():
        expected = 0.0 if path[-1] == "scale" else -0.5 * 10
        np.testing.assert_allclose(leaf[...], np.full(leaf.shape, expected), rtol=1e-6, atol=1e-7)
