"""The loss in chunks, documents that do not see each other, and what the backward pass computes again."""

import functools

import chex
import helpers
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_micro import micro_config

from pallas_kernels import launch
from sagebwd_jax import attention
from train import model as model_module
from train.loss import _output_loss, _Settings, loss_sums, next_token_loss
from train.step import init_model

B, T = 3, 24


def tokens(seed=0):
    return jax.random.randint(jax.random.key(seed), (B, T + 1), 1, 256)


@functools.cache
def loss_and_grads(segments=None, **overrides):
    """Of tokens(); segments are the lengths of the documents in every sequence."""
    graphdef, params = init_model(micro_config(num_layers=1, **overrides).model, seed=0)
    ids = None if segments is None else jnp.tile(np.repeat(np.arange(len(segments)), segments), (B, 1))
    loss = jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens(), ids)))
    return loss(params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_neither_loss_nor_gradients(dtype):
    whole, chunked = (loss_and_grads(loss_chunk=size, compute_dtype=dtype) for size in (T, 3))
    np.testing.assert_allclose(chunked[0], whole[0], rtol=1e-6)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for got, expected in zip(jax.tree.leaves(chunked[1]), jax.tree.leaves(whole[1]), strict=True):
        assert got.dtype == jnp.float32
        assert helpers.relative_error(got, expected) < tolerance


@pytest.mark.parametrize("chunk", [T, 6])
@pytest.mark.parametrize(
    ("dtype", "logits_dtype", "bound"),
    [("float32", "float32", 1e-5), ("bfloat16", "float32", 2e-2), ("float32", "bfloat16", 1e-4)],
)
def test_gradients_are_those_of_whole_logits(dtype, logits_dtype, bound, chunk):
    """z-loss, documents, weights of sequences, and a factor from outside: against JAX's own derivative."""
    options = dict(compute_dtype=dtype, logits_dtype=logits_dtype)
    graphdef, params = init_model(micro_config(num_layers=1, loss_chunk=chunk, **options).model, seed=0)
    ids, row_weights = jnp.tile(np.repeat([0, 1], [10, 15]), (B, 1)), jnp.asarray([1.0, 0.5, 2.0])

    def chunked(params, row_weights):
        return 0.3 * loss_sums(nnx.merge(graphdef, params), tokens(), ids, row_weights, z_loss=0.1).objective

    def whole(params, row_weights):
        logits = nnx.merge(graphdef, params)(tokens()[:, :-1], ids[:, :-1])
        # Rounded, with the gradient of what is not.
        logits += jax.lax.stop_gradient(logits.astype(logits_dtype) - logits)
        lse = jax.nn.logsumexp(logits, axis=-1)
        nats = lse - jnp.take_along_axis(logits, tokens()[:, 1:, None], axis=-1)[..., 0]
        weights = row_weights[:, None] * (ids[:, 1:] == ids[:, :-1])
        return 0.3 * jnp.sum(weights * (nats + 0.1 * jnp.square(lse)))

    got, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(params, row_weights) for f in (chunked, whole))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        assert helpers.relative_error(a, b) < bound


@pytest.mark.parametrize("spread", [10.0, 100.0, 3000.0])
def test_losses_of_any_size_have_their_gradients(spread):
    """Tokens of about 10, 100 and 3000 nats: the target's own logit serves as the shift of none but the first."""
    rng = np.random.default_rng(0)
    x, embedding = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(B, T, 16), (64, 16)])
    targets, weights = jnp.asarray(rng.integers(0, 64, (B, T))), jnp.asarray(rng.random((B, T)), jnp.float32)
    settings = _Settings(chunk=6, dtype=jnp.float32, z_loss=0.0)
    x *= spread / 10

    def exact(x, embedding):
        logits = jnp.einsum("btw,vw->btv", x, embedding, precision="highest")
        return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    expected = jax.value_and_grad(exact, (0, 1))(x, embedding)
    got = jax.value_and_grad(lambda *xs: _output_loss(*xs, targets, weights, settings).objective, (0, 1))(x, embedding)
    nats = float(expected[0] / weights.sum())
    assert spread / 2 < nats < 2 * spread
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert helpers.relative_error(a, b) < 1e-5


def test_a_slope_of_zero_has_a_gradient():
    logits = jnp.asarray([[[-45.0, -5.0, -300.0, -35.0]]])  # log-sum-exp -5, so that 1 + 2 * 0.1 * lse is 0
    settings = _Settings(chunk=2, dtype=jnp.float32, z_loss=0.1)
    targets, weights = jnp.asarray([[1]]), jnp.ones((1, 1))
    grad = jax.grad(lambda x: _output_loss(x, jnp.eye(4), targets, weights, settings).objective)(logits)
    np.testing.assert_allclose(grad[0, 0], [0, -1, 0, 0], atol=2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_end_in_a_loss_that_is_not(value):
    x, embedding = jnp.ones((1, 2, 4)), jnp.ones((8, 4)).at[3, 0].set(value)
    settings = _Settings(chunk=2, dtype=jnp.float32, z_loss=0.0)
    targets = jnp.asarray([[3, 4]])

    def loss(x):
        return _output_loss(x, embedding, targets, jnp.ones((1, 2)), settings).objective

    assert not np.isfinite(jax.value_and_grad(loss)(x)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_kept_in_the_dtype_that_is_asked_for(dtype):
    # On a CPU XLA may compute with more digits than that, so their values do not show it.
    graphdef, params = init_model(micro_config(num_layers=1, logits_dtype=dtype).model, seed=0)
    grad = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens()))
    logits = [x for x in product_shapes(grad, params) if x.shape == (B, T, 256)]
    assert [x.dtype for x in logits] == [jnp.dtype(dtype)]


def equations(jaxpr):
    """Those of a traced function, inner functions too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def product_shapes(function, *inputs):
    """Shape and dtype of each product that a function traces."""
    traced = jax.make_jaxpr(function)(*inputs).jaxpr
    return [eqn.outvars[0].aval for eqn in equations(traced) if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("name", ["loss", "squared_lse"])
def test_what_has_no_gradient_is_refused(name):
    graphdef, params = init_model(micro_config(num_layers=1).model, seed=0)
    with pytest.raises(TypeError, match=f"LossSums.{name} has no gradient"):
        jax.grad(lambda p: getattr(loss_sums(nnx.merge(graphdef, p), tokens()), name))(params)


def largest_array(jaxpr):
    """Elements of the largest value that a traced function makes, inner functions too."""
    return max(var.aval.size for eqn in equations(jaxpr) for var in eqn.outvars if hasattr(var.aval, "size"))


@pytest.mark.parametrize(("chunk", "tokens_at_a_time"), [(T, T), (6, 6)])
def test_logits_exist_for_one_chunk_at_a_time(chunk, tokens_at_a_time):
    graphdef, params = init_model(micro_config(num_layers=1, vocab_size=1024, loss_chunk=chunk).model, seed=0)
    wide = jnp.zeros((16, T + 1), jnp.int32)  # more logits than the embedding has entries
    grad = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p), wide))
    largest = largest_array(jax.make_jaxpr(grad)(params).jaxpr)
    assert largest == max(16 * tokens_at_a_time * 1024, 1024 * 40)


@pytest.mark.parametrize("attention_name", ["exact", "sagebwd"])
def test_documents_in_one_sequence_are_as_if_alone(attention_name):
    """Packed 10 + 15 tokens: losses and gradients are those of the two documents in sequences of their own."""
    graphdef, params = init_model(micro_config(num_layers=1, attention=attention_name).model, seed=0)
    batch = tokens()

    def sums(params, batch, ids=None):
        return loss_sums(nnx.merge(graphdef, params), batch, ids).objective

    @jax.jit
    def together(params):
        return jax.value_and_grad(sums)(params, batch, jnp.tile(np.repeat([0, 1], [10, 15]), (B, 1)))

    @jax.jit
    def apart(params):
        return jax.value_and_grad(lambda p: sums(p, batch[:, :10]) + sums(p, batch[:, 10:]))(params)

    if attention_name == "exact":
        chex.assert_trees_all_close(together(params), apart(params), rtol=2e-4, atol=2e-5)
    else:  # Scales of packed documents are finer.
        for got, expected in zip(*map(jax.tree.leaves, (together(params), apart(params))), strict=True):
            assert helpers.relative_error(got, expected) < 0.05
    plain = jax.jit(sums)(params, batch)
    assert abs(float(plain) - float(together(params)[0])) > 1  # one target less, and less to see


def test_sequences_without_weight_do_not_count():
    graphdef, params = init_model(micro_config(num_layers=1).model, seed=0)
    model = nnx.merge(graphdef, params)
    sums = nnx.jit(loss_sums)
    weighted = sums(model, tokens(), None, jnp.asarray([1.0, 0.0, 1.0]))
    chex.assert_trees_all_close(weighted, sums(model, tokens()[jnp.asarray([0, 2])]), rtol=1e-5)


@pytest.mark.parametrize(
    ("recompute", "forward_kernels", "is_more"),
    [("none", 2, False), ("all_but_attention", 2, True), ("all", 4, True)],
)
def test_attention_runs_again_only_where_its_residuals_are_not_kept(monkeypatch, recompute, forward_kernels, is_more):
    """Two layers: SageBwd's forward kernel runs twice if its residuals are kept by name, else twice more."""
    monkeypatch.setattr(model_module, "attention", functools.partial(attention, implementation="triton"))
    config = micro_config(attention="sagebwd", recompute=recompute).model
    with launch.interpreted():
        graphdef, params = init_model(config, seed=0)
        grad = jax.grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens()))
        assert helpers.count_kernels(grad, params, name="sagebwd_forward") == forward_kernels
        shapes = [x.shape for x in product_shapes(grad, params)]
    # SwiGLU's gate and up of both layers, in the forward pass and computed again.
    assert shapes.count((B, T, 56, 2)) == (4 if is_more else 2)


def test_what_is_computed_again_changes_no_gradient():
    plain, again = loss_and_grads(loss_chunk=T, compute_dtype="float32"), loss_and_grads(recompute="all")
    chex.assert_trees_all_close(again, plain, rtol=1e-5, atol=1e-7)
