"""The train step: accumulation, what it reports, donation, and that its gradients with SageBwd are the exact ones."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_micro import micro_config

from benchmarks import pretraining
from train import step as step_module
from train.loss import next_token_loss
from train.model import Decoder
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


def documents(*shape):
    """Segment ids [*shape, T1]: sequences of one document, of a few, and of many."""
    lengths = jnp.asarray([25, 25, 5, 3]).repeat(3)[:, None]
    return (jnp.arange(T1) // lengths).reshape(*shape, T1)


def test_four_micro_batches_equal_one_large_batch(setup):
    """Also where documents leave some micro batches fewer targets than others: every token counts alike."""
    _, step, new_state = setup
    tokens = batch(4, 3)
    accumulated, metrics = step(new_state(), tokens, documents(4, 3))
    at_once, expected = step(new_state(), tokens.reshape(1, 12, T1), documents(1, 12))
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
    # Moments are gradients, so this is tight; parameters are not, for Adam's first update is their sign.
    chex.assert_trees_all_close(accumulated.opt_state, at_once.opt_state, rtol=1e-3, atol=1e-7)
    other, _ = step(new_state(), batch(4, 3, seed=1), documents(4, 3))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(accumulated.opt_state, other.opt_state, rtol=1e-3, atol=1e-7)


def test_reports_the_loss_before_the_update_and_the_norm_before_clipping(setup):
    graphdef, step, new_state = setup
    tokens, state = batch(1, 12), new_state()
    loss, grads = jax.jit(
        jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens[0], documents(12)))
    )(state.params)
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(grads)))
    assert norm > 0.2  # above clip_norm, or this would not tell the two apart
    _, metrics = step(state, tokens, documents(1, 12))
    chex.assert_trees_all_close(metrics, StepMetrics(loss, jnp.float32(norm)), rtol=1e-5)


def test_state_is_donated_and_changes(setup):
    _, step, new_state = setup
    state = new_state()
    fresh, _ = step(state, batch(1, 12), documents(1, 12))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    for before, after in zip(jax.tree.leaves(new_state().params), jax.tree.leaves(fresh.params), strict=True):
        assert after.dtype == jnp.float32 and jnp.any(before != after)


def test_eval_step_sums_the_loss_of_its_batch(setup):
    graphdef, _, new_state = setup
    params, tokens, eval_step = new_state().params, batch(5), make_eval_step(setup[0])
    sums = [eval_step(params, row[None]) for row in tokens]
    losses = [float(total) for total, _ in sums]
    assert max(losses) - min(losses) > 1e-2 and {float(count) for _, count in sums} == {T1 - 1}
    total, count = eval_step(params, tokens)
    chex.assert_trees_all_close((float(total), float(count)), (sum(losses), 5.0 * (T1 - 1)), rtol=1e-5)


def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(setup):
    _, step, new_state = setup
    state = new_state()
    broken = state._replace(params=jax.tree.map(lambda x: x.at[0].set(jnp.nan) if x.ndim == 2 else x, state.params))
    before = jax.device_get(broken)
    after, metrics = step(broken, batch(1, 12), documents(1, 12))
    assert not np.isfinite(metrics.grad_norm)
    chex.assert_trees_all_equal(jax.device_get(after), before)


def test_z_loss_and_moving_average_are_as_defined():
    config = micro_config(num_layers=1)
    graphdef, params = init_model(config.model, seed=0)
    params, optimizer, tokens = jax.device_get(params), optax.sgd(1.0), batch(1, 4)

    def parts(params):
        logits = nnx.merge(graphdef, params)(tokens[0][:, :-1])
        lse = jax.nn.logsumexp(logits, axis=-1)
        loss = jnp.mean(lse - jnp.take_along_axis(logits, tokens[0][:, 1:, None], axis=-1)[..., 0])
        return loss + 0.5 * jnp.mean(jnp.square(lse)), loss

    (_, loss), grads = jax.jit(jax.value_and_grad(parts, has_aux=True))(params)
    state = TrainState(jax.tree.map(jnp.asarray, params), optimizer.init(params), jax.tree.map(jnp.asarray, params))
    state, metrics = make_train_step(graphdef, optimizer, z_loss=0.5, ema_decay=0.75)(state, tokens)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)  # the loss alone is reported
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    chex.assert_trees_all_close(state.params, expected, rtol=1e-4, atol=1e-6)
    average = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, params, expected)
    chex.assert_trees_all_close(state.ema, average, rtol=1e-4, atol=1e-6)


def test_initial_parameters_depend_on_the_seed_and_not_on_the_attention():
    exact, sagebwd, other = (
        init_model(micro_config(attention=attention, num_layers=1).model, seed)[1]
        for attention, seed in (("exact", 3), ("sagebwd", 3), ("exact", 4))
    )
    chex.assert_trees_all_equal(exact, sagebwd)
    assert jnp.any(exact["embedding"][...] != other["embedding"][...])


def test_initial_parameters_are_those_of_the_decoder():
    # They are made block by block, so that one program serves all of them.
    config = micro_config(attention="exact", num_layers=11).model
    expected = jax.jit(lambda key: nnx.state(Decoder(config, rngs=nnx.Rngs(key))))(jax.random.key(3))
    got = init_model(config, seed=3)[1]
    chex.assert_trees_all_equal(got, expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)


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


def test_the_compiler_knows_the_options_that_it_is_given():
    # It refuses those that it does not, on a CPU too.
    for options in step_module._COMPILER_OPTIONS.values():
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": "0"})(1)
