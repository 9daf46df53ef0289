"""The train step: accumulation, what it reports, donation, and that its gradients with SageBwd are the exact ones."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_micro import micro_config

from benchmarks import pretraining
from train.model import next_token_loss
from train.optimizer import make_optimizer
from train.step import StepMetrics, TrainState, init_model, make_eval_step, make_train_step

T1 = 25


@pytest.fixture(scope="module")
def setup():
    """Structure, optimizer and jitted step of one model; states are made anew, for a step consumes them."""
    config = micro_config(num_layers=1, clip_norm=0.1)
    graphdef, params = init_model(config.model, seed=0)
    optimizer = make_optimizer(config.optimizer, config.steps)
    step = make_train_step(graphdef, optimizer)

    def new_state():
        copy = jax.tree.map(jnp.copy, params)
        return TrainState(copy, optimizer.init(copy))

    return graphdef, step, new_state


def batch(*shape, seed=0):
    return jax.random.randint(jax.random.key(seed), (*shape, T1), 0, 256)


def test_four_micro_batches_equal_one_large_batch(setup):
    _, step, new_state = setup
    tokens = batch(4, 3)
    accumulated, metrics = step(new_state(), tokens)
    at_once, expected = step(new_state(), tokens.reshape(1, 12, T1))
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
    # Moments are gradients, so this is tight; parameters are not, for Adam's first update is their sign.
    chex.assert_trees_all_close(accumulated.opt_state, at_once.opt_state, rtol=1e-3, atol=1e-7)
    other, _ = step(new_state(), batch(4, 3, seed=1))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(accumulated.opt_state, other.opt_state, rtol=1e-3, atol=1e-7)


def test_reports_the_loss_before_the_update_and_the_norm_before_clipping(setup):
    graphdef, step, new_state = setup
    tokens, state = batch(1, 12), new_state()
    loss, grads = jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens[0])))(
        state.params
    )
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(grads)))
    assert norm > 0.2  # above clip_norm, or this would not tell the two apart
    _, metrics = step(state, tokens)
    chex.assert_trees_all_close(metrics, StepMetrics(loss, jnp.float32(norm)), rtol=1e-5)


def test_state_is_donated_and_changes(setup):
    _, step, new_state = setup
    state = new_state()
    fresh, _ = step(state, batch(1, 12))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    for before, after in zip(jax.tree.leaves(new_state().params), jax.tree.leaves(fresh.params), strict=True):
        assert after.dtype == jnp.float32 and jnp.any(before != after)


def test_eval_step_is_the_loss_of_its_batch(setup):
    graphdef, _, new_state = setup
    params, tokens = new_state().params, batch(5)
    losses = [float(make_eval_step(graphdef)(params, row[None])) for row in tokens]
    assert max(losses) - min(losses) > 1e-3
    chex.assert_trees_all_close(float(make_eval_step(graphdef)(params, tokens)), float(np.mean(losses)), rtol=1e-5)


def test_initial_parameters_depend_on_the_seed_and_not_on_the_attention():
    exact, sagebwd, other = (
        init_model(micro_config(attention=attention, num_layers=1).model, seed)[1]
        for attention, seed in (("exact", 3), ("sagebwd", 3), ("exact", 4))
    )
    chex.assert_trees_all_equal(exact, sagebwd)
    assert jnp.any(exact["embedding"][...] != other["embedding"][...])


def test_sagebwd_gradients_reach_every_parameter_as_exact_ones_do():
    tokens, grads = batch(3), {}
    for attention in ("exact", "sagebwd"):
        graphdef, params = init_model(
            micro_config(attention=attention, compute_dtype="bfloat16", num_layers=1).model, seed=0
        )
        grad = jax.jit(jax.grad(lambda p, g=graphdef: next_token_loss(nnx.merge(g, p), tokens)))(params)
        grads[attention] = {
            ".".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(grad)
        }
    assert {f"blocks.0.attention.{name}.kernel" for name in ("query", "key", "value")} < grads["exact"].keys()
    for name, exact in grads["exact"].items():
        got = grads["sagebwd"][name]
        norms = np.linalg.norm(got), np.linalg.norm(exact)
        cosine = np.vdot(got, exact) / (norms[0] * norms[1])
        assert abs(norms[0] / norms[1] - 1) < 0.05 and cosine > 0.99, (name, norms, cosine)


def test_pretraining_times_the_step_of_each_attention(tmp_path):
    arguments = "--preset tiny --length 32 --sequences 2 --attention sagebwd exact --output".split()
    pretraining.main([*arguments, str(tmp_path)])
    [path] = tmp_path.glob("pretraining_tiny_*.json")
    ours, exact = json.loads(path.read_text())
    assert (ours["attention"], exact["attention"]) == ("sagebwd", "exact")
    assert ours["tokens_per_second"] == pytest.approx(64e3 / ours["milliseconds"])
    # The same parameters and tokens, 24 steps on.
    assert ours["loss"] == pytest.approx(exact["loss"], rel=0.05) and ours["loss"] < 5
