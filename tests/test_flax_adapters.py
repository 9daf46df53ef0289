"""Flax's own attention modules with attention_fn: what they pass is honoured or refused, and it trains."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_bitwise, cosine, normal, relative_error

from sagebwd_jax import RESIDUAL_NAMES, SageConfig, attention
from sagebwd_jax.flax import _adapters, attention_fn

HEADS, WIDTH = 4, 64
SAGE = functools.partial(attention_fn, implementation="xla")


def make_linen(function, **options):
    """(apply, parameters) of linen's module; apply(parameters, x, **call)."""
    options = dict(num_heads=HEADS, qkv_features=128, dropout_rate=0.0, deterministic=True) | options
    module = nn.MultiHeadDotProductAttention(attention_fn=function, **options)
    known = options | dict(deterministic=True)
    params = nn.MultiHeadDotProductAttention(**known).init(jax.random.key(0), jnp.ones((1, 1, WIDTH)))["params"]
    return lambda params, x, **call: module.apply({"params": params}, x, **call), params


def make_nnx(function, **options):
    """The same of nnx's module."""
    options = dict(num_heads=HEADS, in_features=WIDTH, qkv_features=128, decode=False, deterministic=True) | options
    module = nnx.MultiHeadAttention(attention_fn=function, rngs=nnx.Rngs(0), **options)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return lambda params, x, **call: nnx.merge(graph, params, rest)(x, **call), params


MAKERS = {"linen": make_linen, "nnx": make_nnx}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def x_of(*batch, length=65):
    return normal(0, *batch, length, WIDTH)


class TestNumbers:
    # nnx's default takes no mask over several batch axes.
    @pytest.mark.parametrize(
        ("batch", "causal_mask"), [((2, 3), False), ((), False), ((2,), True)], ids=["(2, 3)", "()", "causal mask"]
    )
    def test_output_and_gradients_are_those_of_the_default(self, make, batch, causal_mask):
        x, weights = x_of(*batch), normal(1, *batch, 65, WIDTH)
        call = dict(mask=nn.make_causal_mask(x[..., 0])) if causal_mask else {}
        results = []
        for function in (SAGE, None):
            apply, params = make(function) if function else make(*default_of(make))

            def loss(params, apply=apply):
                out = apply(params, x, **call)
                return jnp.sum(out * weights), out

            grads, out = jax.jit(jax.grad(loss, has_aux=True))(params)
            results.append((out, jax.tree.leaves(grads)))
        (out, grads), (expected_out, expected_grads) = results
        assert out.shape == x.shape and relative_error(out, expected_out) <= 0.03
        # Kernels and biases of query, key, value and output; that of the keys' bias is 0, for softmax does not see it.
        assert len(grads) == len(expected_grads) == 8
        for got, expected in zip(grads, expected_grads, strict=True):
            if jnp.linalg.norm(expected) > 1e-3:
                assert cosine(got, expected) >= 0.99
                assert abs(jnp.linalg.norm(got) / jnp.linalg.norm(expected) - 1) <= 0.05

    def test_causal(self):
        x = x_of(2)
        apply, params = make_linen(functools.partial(SAGE, is_causal=True))
        exact, _ = make_linen(nn.dot_product_attention)
        assert relative_error(apply(params, x), exact(params, x, mask=nn.make_causal_mask(x[..., 0]))) <= 0.03
        apply, params = make_nnx(SAGE)
        exact, _ = make_nnx(nnx.dot_product_attention)
        assert relative_error(apply(params, x, is_causal=True), exact(params, x, is_causal=True)) <= 0.03
        assert relative_error(apply(params, x), exact(params, x, is_causal=True)) > 0.1

    def test_in_16_bits(self, make):
        apply, params = make(SAGE, dtype=jnp.bfloat16)
        exact, _ = make(*default_of(make), dtype=jnp.bfloat16)
        out = apply(params, x_of(2))
        assert out.dtype == jnp.bfloat16 and relative_error(out, exact(params, x_of(2))) <= 0.04

    def test_decode(self, make):
        # Token by token against a cache: a mask hides the places that are not written yet.
        x = x_of(2, length=4)
        steps = decode_linen if make is make_linen else decode_nnx
        assert relative_error(steps(SAGE, x), steps(*default_of(make), x)) <= 0.01


def decode_linen(function, x):
    """What linen's module makes of x [B, T, WIDTH] a token at a time, with a cache of two tokens more."""
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=128, attention_fn=function, decode=True)
    variables = module.init(jax.random.key(0), jnp.ones((x.shape[0], x.shape[1] + 2, WIDTH)))
    out = []
    for i in range(x.shape[1]):
        token, changed = module.apply(variables, x[:, i : i + 1], mutable=["cache"])
        variables = variables | changed
        out.append(token)
    return jnp.concatenate(out, axis=1)


def decode_nnx(function, x):
    """The same of nnx's module."""
    options = dict(num_heads=HEADS, in_features=WIDTH, qkv_features=128, decode=True, rngs=nnx.Rngs(0))
    module = nnx.MultiHeadAttention(attention_fn=function, **options)
    module.init_cache((x.shape[0], x.shape[1] + 2, WIDTH))
    return jnp.concatenate([module(x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)


def default_of(make):
    return (nn.dot_product_attention if make is make_linen else nnx.dot_product_attention,)


def without_nnx_names(query, key, value, *, mask, **_):
    return nn.dot_product_attention(query, key, value, mask=mask)


class TestPassedOn:
    """With an attention() that is exact and notes what it is given."""

    @pytest.fixture
    def given(self, monkeypatch):
        given = {}

        def exact(query, key, value, bias, mask, *, config, implementation, **options):
            given.update(options, config=config, implementation=implementation, mask=mask, bias=bias, query=query)
            return jax.nn.dot_product_attention(query, key, value, bias, mask, implementation="xla", **options)

        monkeypatch.setattr(_adapters, "attention", exact)
        return given

    @pytest.mark.parametrize("shape", [(1, 1, 1, 65), (2, 1, 65, 65), (2, HEADS, 65, 1), (65, 65)], ids=str)
    def test_mask(self, given, make, shape):
        mask = (normal(3, *shape) > -0.5).at[..., 0].set(True)
        apply, params = make(SAGE)
        exact, _ = make(*default_of(make))
        assert relative_error(apply(params, x_of(2), mask=mask), exact(params, x_of(2), mask=mask)) <= 1e-5
        assert given["mask"].ndim == 4 and given["mask"].dtype == bool

    def test_mask_over_several_batch_axes(self, given, make):
        mask = normal(3, 2, 1, 1, 65, 65) > -0.5
        apply, params = make(SAGE)
        # nnx's default cannot do this.
        exact, _ = make(nn.dot_product_attention if make is make_linen else without_nnx_names)
        x = x_of(2, 3)
        assert relative_error(apply(params, x, mask=mask), exact(params, x, mask=mask)) <= 1e-5
        assert given["query"].shape == (6, 65, HEADS, 32) and given["mask"].shape == (6, 1, 65, 65)

    def test_a_mask_of_numbers_as_flax_makes_it(self, given):
        x = x_of(2)
        mask = nn.make_causal_mask(x[..., 0])
        assert mask.dtype == jnp.float32
        apply, params = make_linen(SAGE)
        exact, _ = make_linen(nn.dot_product_attention)
        assert relative_error(apply(params, x, mask=mask), exact(params, x, mask=mask)) <= 1e-5

    def test_bias(self, given):
        q, k, v = (normal(i, 2, 3, 9, HEADS, 16) for i in range(3))
        for bias in (normal(3, HEADS, 9, 9), normal(3, 3, 1, 9, 9), normal(3, 2, 3, HEADS, 9, 9)):
            got = attention_fn(q, k, v, bias)
            assert relative_error(got, nn.dot_product_attention(q, k, v, bias)) <= 1e-5

    def test_options(self, given):
        q = normal(0, 2, 9, HEADS, 16)
        config = SageConfig.mixed()
        attention_fn(q, q, q, is_causal=True, config=config, implementation="triton", scale=0.5)
        assert given | dict(query=None) == dict(
            query=None, is_causal=True, config=config, implementation="triton", scale=0.5, mask=None, bias=None
        )


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("precision", "highest"), ("precision", jax.lax.Precision.HIGHEST), ("module", object())]
        + [
            (name, jnp.einsum) for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum", "einsum_dot_general")
        ],
    )
    def test_by_name(self, name, value):
        q = normal(0, 1, 5, HEADS, 16)
        with pytest.raises(NotImplementedError, match=f"{name}.*None"):
            SAGE(q, q, q, **{name: value})

    def test_dropout(self, make):
        apply, params = make(SAGE, dropout_rate=0.1, deterministic=None)
        rng = {"dropout_rng": jax.random.key(1)} if make is make_linen else {"rngs": nnx.Rngs(1)}
        with pytest.raises(NotImplementedError, match="dropout_rate=0.1.*deterministic"):
            apply(params, x_of(1), deterministic=False, **rng)
        assert apply(params, x_of(1), deterministic=True).shape == (1, 65, WIDTH)

    def test_attention_itself(self, make):
        # What nnx passes more, Python refuses: attention has the parameters of jax.nn and cannot say what to use.
        apply, params = make(functools.partial(attention, implementation="xla"))
        message = (
            "mask has dtype float32.*sagebwd_jax.flax.attention_fn" if make is make_linen else "unexpected keyword"
        )
        with pytest.raises(TypeError, match=message):
            apply(params, x_of(1), mask=nn.make_causal_mask(x_of(1)[..., 0]))

    def test_weights_that_are_never_made(self, make):
        apply, params = make(SAGE)
        with pytest.raises(NotImplementedError, match="module.*sow_weights"):
            apply(params, x_of(1), sow_weights=True)

    def test_a_second_output(self):
        q = normal(0, 1, 5, HEADS, 16)
        with pytest.raises(NotImplementedError, match="return_residual"):
            SAGE(q, q, q, return_residual=True)

    def test_unknown_names(self):
        q = normal(0, 1, 5, HEADS, 16)
        with pytest.raises(TypeError, match="softcap"):
            SAGE(q, q, q, softcap=30.0)


class Layer(nn.Module):
    """A residual layer in the form that linen's scan takes."""

    @nn.compact
    def __call__(self, x, _):
        attend = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=functools.partial(SAGE, is_causal=True))
        return x + attend(x), None


def test_gradients_of_scanned_layers_do_not_depend_on_remat():
    x = x_of(1)

    def gradients(layer):
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
        params = Layer().init(jax.random.key(0), x, None)["params"]
        stacked = jax.tree.map(lambda p: jnp.stack([p * (1 + 0.1 * i) for i in range(4)]), params)
        return jax.jit(jax.grad(lambda p: jnp.sum(layers.apply({"params": p}, x, None)[0] ** 2)))(stacked)

    plain = gradients(Layer)
    for policy in (None, jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)):
        for a, b in zip(
            jax.tree.leaves(gradients(nn.remat(Layer, policy=policy))), jax.tree.leaves(plain), strict=True
        ):
            assert_bitwise(a, b)


class Model(nn.Module):
    """Tokens to logits, with one causal layer."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(16)(Layer()(nn.Embed(16, WIDTH)(tokens), None)[0])


class TestInit:
    def test_model_of_one_token_is_applied_to_many(self):
        params = Model().init(jax.random.key(0), jnp.ones((1, 1), jnp.int32))
        tokens = jax.random.randint(jax.random.key(1), (4, 257), 0, 16)
        logits = jax.jit(Model().apply)(params, tokens)
        assert logits.shape == (4, 257, 16) and jnp.isfinite(logits).all()
        shapes = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((1, 1), jnp.int32))
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)

    def test_linen_at_one_token_and_by_shape(self):
        module = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
        params = module.init(jax.random.key(0), jnp.ones((1, 1, WIDTH)))
        assert module.apply(params, normal(0, 2, 130, WIDTH)).shape == (2, 130, WIDTH)
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 1, WIDTH)))
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)

    def test_nnx_by_shape(self):
        def make():
            return nnx.MultiHeadAttention(
                num_heads=HEADS, in_features=WIDTH, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
            )

        assert nnx.eval_shape(lambda: make()(jnp.ones((1, 1, WIDTH)))).shape == (1, 1, WIDTH)
