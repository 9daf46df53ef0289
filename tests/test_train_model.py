"""The decoder: what it computes, what its parameters are, and which attention it uses."""

import functools
import math

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_micro import micro_config

from train.config import PRESETS, SettingError
from train.loss import next_token_loss
from train.model import Block, Decoder, count_parameters, select_attention
from train.step import abstract_model

B, T = 3, 13


@functools.cache
def split_decoder(**overrides):
    """Structure and parameters of the micro decoder."""
    return nnx.split(Decoder(micro_config(**overrides).model, rngs=nnx.Rngs(0)))


def tokens(batch=B, length=T, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 256)


@functools.cache
def logits_fn(**overrides):
    graphdef, params = split_decoder(**overrides)
    return jax.jit(lambda tokens, params=params: nnx.merge(graphdef, params)(tokens))


@functools.cache
def loss_and_gradients(**overrides):
    """Of tokens(), keyed by the parameter's name."""
    graphdef, params = split_decoder(**overrides)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens())))(params)
    return loss, {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(grads)}


@functools.cache
def decode_gradient():
    """Gradient of a random projection of one position's logits with respect to all embedded tokens."""
    graphdef, params = split_decoder()
    weights = jax.random.normal(jax.random.key(2), (B, 256))

    def projection(x, position):
        return jnp.sum(weights * nnx.merge(graphdef, params).decode(x)[:, position])

    return jax.jit(jax.grad(projection))


def test_gains_in_the_matrices_that_read_them_change_neither_output_nor_gradients():
    rng = np.random.default_rng(0)
    graphdef, params = nnx.split(
        Block(micro_config(attention="exact", compute_dtype="float32").model, rngs=nnx.Rngs(0))
    )
    params = jax.tree.map(lambda leaf: leaf * jnp.asarray(rng.uniform(0.5, 2, leaf.shape), leaf.dtype), params)
    x, dout = (jnp.asarray(rng.standard_normal((B, T, 40)), jnp.float32) for _ in range(2))

    def projection(params, x, prepare):
        return jnp.sum(dout * prepare(nnx.merge(graphdef, params))(x))

    gradients = jax.jit(jax.value_and_grad(projection, argnums=(0, 1)), static_argnums=2)
    plain, folded = (gradients(params, x, prepare) for prepare in (lambda block: block, Block.with_folded_gains))
    for got, expected in zip(jax.tree.leaves(folded), jax.tree.leaves(plain), strict=True):
        assert helpers.relative_error(got, expected) < 1e-5
    block = nnx.merge(graphdef, params)
    block.with_folded_gains()
    chex.assert_trees_all_equal(nnx.state(block), params)


@pytest.mark.parametrize("position", [0, 5, T - 1])
def test_gradients_reach_the_past_and_never_the_future(position):
    x = jax.random.normal(jax.random.key(1), (B, T, 40))
    sizes = np.abs(np.asarray(decode_gradient()(x, position))).max(-1)
    assert (sizes[:, : position + 1] > 1e-4).all()
    assert (sizes[:, position + 1 :] == 0).all()


@pytest.mark.parametrize("attention", ["exact", "sagebwd"])
def test_text_written_stepwise_is_seen_as_in_one_pass(attention):
    """The last token's logits of every beginning; nearly with SageBwd, whose scales are of what it is given."""
    logits, x = logits_fn(attention=attention), tokens()
    whole = logits(x)
    for length in (1, 2, 7, T):
        stepwise = logits(x[:, :length])[:, -1]
        assert helpers.cosine(stepwise, whole[:, length - 1]) > (0.999 if attention == "sagebwd" else 1 - 1e-9)


def test_every_parameter_has_a_gradient():
    _, grads = loss_and_gradients()
    sizes = {name: float(jnp.abs(leaf).max()) for name, leaf in grads.items()}
    assert len(sizes) == 2 + 2 * 11
    assert min(sizes.values()) > 0, sizes


def test_embedding_is_the_output_layer():
    _, params = split_decoder()
    with_vocabulary = [leaf for leaf in jax.tree.leaves(params) if 256 in leaf.shape]
    assert [leaf.shape for leaf in with_vocabulary] == [(256, 40)]
    scaled = jax.tree.map(lambda leaf: leaf.at[255].multiply(2.0) if 256 in leaf.shape else leaf, params)
    without_255 = tokens() % 255  # never an input, so only its logit may move
    before, after = logits_fn()(without_255), logits_fn()(without_255, scaled)
    chex.assert_shape(before, (B, T, 256))
    chex.assert_trees_all_equal(after[..., :255], before[..., :255])
    chex.assert_trees_all_close(after[..., 255], 2 * before[..., 255], rtol=1e-5)


def test_bfloat16_compute_keeps_float32_parameters_gradients_and_logits():
    graphdef, params = split_decoder(compute_dtype="bfloat16")
    block = nnx.merge(graphdef, params).blocks[0]
    assert jax.eval_shape(block, jnp.ones((1, 2, 40), jnp.bfloat16)).dtype == jnp.bfloat16
    assert jax.eval_shape(logits_fn(compute_dtype="bfloat16"), tokens()).dtype == jnp.float32
    loss, grads = loss_and_gradients(compute_dtype="bfloat16")
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {jnp.dtype(jnp.float32)}
    exact, _ = loss_and_gradients()
    assert 1e-7 < abs(float(loss) - float(exact)) < 0.02


def test_embedding_gradient_sums_repeats_in_float32():
    graphdef, params = split_decoder(compute_dtype="bfloat16")

    def look_up(p):
        model = nnx.merge(graphdef, p)
        model.decode = lambda x, segment_ids: x  # only the look-up
        return jnp.sum(model(jnp.zeros((8, 513), jnp.int32)).astype(jnp.float32))

    # 4104 ones: a bfloat16 sum stops at 256.
    np.testing.assert_allclose(jax.jit(jax.grad(look_up))(params)["embedding"][...][0], np.full(40, 8 * 513.0))


def test_loss_is_cross_entropy_of_the_next_token():
    batch = tokens()
    logits = np.asarray(logits_fn()(batch[:, :-1]), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.mean([-math.log(probabilities[b, t, int(batch[b, t + 1])]) for b in range(B) for t in range(T - 1)])
    np.testing.assert_allclose(float(loss_and_gradients()[0]), expected, rtol=1e-5)
    assert abs(expected - math.log(256)) < 0.1  # small embeddings: a fresh model knows nothing


@pytest.mark.parametrize("layers", [1, 6])
def test_branches_start_small_enough_for_any_depth(layers):
    x = jax.random.normal(jax.random.key(3), (B, T, 40))
    graphdef, params = split_decoder(num_layers=layers)

    @jax.jit
    def residual_stream(params, x):
        for block in nnx.merge(graphdef, params).blocks:
            x = block(x)
        return x

    assert 0.3 < float(jnp.std(residual_stream(params, x) - x)) < 1.5


def test_dummy_shapes_and_shapes_alone():
    config = micro_config(compute_dtype="bfloat16").model
    shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(shapes)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, split_decoder(compute_dtype="bfloat16")[1])
    for batch, length in ((1, 1), (4, 257)):
        chex.assert_shape(logits_fn(compute_dtype="bfloat16")(tokens(batch, length)), (batch, length, 256))
        out = jax.eval_shape(
            lambda p, x: nnx.merge(graphdef, p)(x), params, jax.ShapeDtypeStruct((batch, length), jnp.int32)
        )
        chex.assert_shape(out, (batch, length, 256))


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("tiny", 426_752),
        ("30m", 29_939_328),
        ("124m", 123_588_864),
        ("325m", 324_185_600),
        ("325m-2m", 324_185_600),
        ("1b", 1_046_830_080),
    ],
)
def test_presets_have_the_size_they_are_named_after(preset, parameters):
    config = PRESETS[preset].with_attention("exact").model
    assert count_parameters(abstract_model(config)[1]) == parameters


def test_325m_is_the_papers_model():
    config = PRESETS["325m"]
    shape = config.model.width, config.model.num_layers, config.model.num_heads, config.model.ffn_width
    assert (*shape, config.data.sequence_length, config.model.vocab_size) == (1024, 20, 16, 3072, 4096, 50_304)
    assert (config.model.num_kv_heads, config.model.head_dim, config.model.qk_norm) == (16, 64, True)


def test_attention_is_chosen_by_one_word():
    q, k = jax.random.normal(jax.random.key(4), (2, B, T, 6, 8))
    got = select_attention("exact")(q, k, k, is_causal=True)
    chex.assert_trees_all_close(got, jax.nn.dot_product_attention(q, k, k, is_causal=True))
    with pytest.raises(SettingError, match="attention='flash' must be 'sagebwd', 'exact' or 'cudnn'"):
        select_attention("flash")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be there")
def test_cudnn_is_refused_where_there_is_none():
    with pytest.raises(SettingError, match="attention='cudnn' needs an NVIDIA GPU; JAX runs on 'cpu' here"):
        split_decoder(attention="cudnn", compute_dtype="bfloat16")
