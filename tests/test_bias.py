"""The additive bias and its gradient."""

import jax
import jax.numpy as jnp
import pytest
from helpers import (
    assert_cosines,
    assert_finite,
    assert_usable,
    assert_within,
    attend_and_grads,
    exact,
    make_inputs,
    normal,
    relative_error,
    using,
)

from sagebwd_jax import attention


@pytest.mark.parametrize(("batch", "least"), [(1, None), (2, -65504.0)], ids=["shared", "least-float16"])
def test_float32_bias_of_bfloat16_inputs(implementation, batch, least):
    # C31.
    inputs = make_inputs(66, 130, heads=2, kv_heads=1, depth=32, dtype=jnp.bfloat16)
    bias = normal(1, batch, 2, 66, 130)
    hidden = normal(2, batch, 2, 66, 130) > 0.5
    if least is not None:
        bias = jnp.where(hidden, least, bias)
    got, expected = attend_and_grads(implementation, *inputs, bias=bias), exact(*inputs, bias=bias)
    assert_finite(got, ("out", "lse", "dq", "dk", "dv", "dbias"))
    assert_usable(got, expected)
    assert_within(got, expected, dbias=0.08)
    assert_cosines(got, expected, dbias=0.997)
    assert got.dbias.shape == bias.shape and got.dbias.dtype == jnp.float32
    assert least is None or not got.dbias[hidden].any()


LEAST = {
    "float16": (jnp.float16, -65504.0),
    "bfloat16": (jnp.bfloat16, float(jnp.finfo(jnp.bfloat16).min)),
    "float32": (jnp.float32, float(jnp.finfo(jnp.float32).min)),
    "-inf": (jnp.float32, -jnp.inf),
    "-1e30": (jnp.float32, -1e30),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("float16", "triton-interpreted"),
        ("bfloat16", "xla"),
        ("float32", "xla"),
        ("-inf", "xla"),
        *(pytest.param(name, "triton-interpreted", marks=pytest.mark.slow) for name in LEAST if name != "float16"),
        *(pytest.param(name, "xla", marks=pytest.mark.slow) for name in ("float16", "-1e30")),
        *(pytest.param(name, "triton", marks=pytest.mark.gpu) for name in LEAST),
    ],
    indirect=["implementation"],
)
def test_the_least_bias_is_a_mask(implementation, name):
    # C31: also of whole rows, and of tiles that are skipped.
    dtype, least = LEAST[name]
    inputs = make_inputs(140, 260, batch=1, heads=2, kv_heads=1, depth=16, dtype=jnp.float16)
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, (1, 1, 140, 260)).at[:, :, 9].set(False)
    mask = mask.at[..., 128:].set(False)
    bias = jnp.where(mask, jnp.zeros((), dtype), jnp.asarray(least, dtype))
    got = attend_and_grads(implementation, *inputs, bias=bias)
    expected = attend_and_grads(implementation, *inputs, mask=mask)
    assert ((got.lse == -jnp.inf) == (expected.lse == -jnp.inf)).all() and (got.lse[:, 9] == -jnp.inf).all()
    for field in ("out", "dq", "dk", "dv"):
        assert relative_error(getattr(got, field), getattr(expected, field)) <= 2e-3, field
    assert got.dbias.dtype == dtype and jnp.isfinite(got.dbias).all() and got.dbias.any()
    assert not jnp.where(mask, 0, got.dbias).any()


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        ((2, 66, 70), "triton-interpreted"),
        ((1, 1, 1, 70), "xla"),
        ((2, 1, 66, 1), "triton-interpreted"),
        ((), "xla"),
        pytest.param((2, 66, 70), "xla", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 70), "triton-interpreted", marks=pytest.mark.slow),
        pytest.param((2, 1, 66, 1), "xla", marks=pytest.mark.slow),
        pytest.param((), "triton-interpreted", marks=pytest.mark.slow),
        *(
            pytest.param(shape, "triton", marks=pytest.mark.gpu)
            for shape in ((2, 66, 70), (1, 1, 1, 70), (2, 1, 66, 1), ())
        ),
    ],
    ids=str,
    indirect=["implementation"],
)
def test_gradient_is_summed_over_what_was_broadcast(implementation, shape):
    inputs = make_inputs(66, 70, heads=2, kv_heads=1, depth=16)
    bias = normal(1, *shape)
    got, expected = attend_and_grads(implementation, *inputs, bias=bias), exact(*inputs, bias=bias)
    assert got.dbias.shape == shape
    assert_usable(got, expected)
    assert_within(got, expected, lse=3e-3)
    if shape and shape[-1] > 1:
        assert_within(got, expected, dbias=0.08)
    else:
        # All keys of a query alike: the softmax does not change, and each sum of dS is 0 but for rounding.
        whole = attend_and_grads(implementation, *inputs, bias=jnp.broadcast_to(bias, (2, 2, 66, 70)))
        assert relative_error(got.dbias + 1, jnp.ones(shape)) <= 0.01 * jnp.abs(whole.dbias).sum()


def test_bias_of_any_size(implementation):
    # A row whose bias is large is what it is without: the shift of the softmax takes it.
    inputs = make_inputs(66, 70, heads=2, kv_heads=1, depth=16)
    bias = normal(1, 1, 2, 66, 70)
    offset = jnp.array([0.0, 1e3, -1e3, 1e4, -1e4, -3e4])[jnp.arange(66) % 6][:, None]
    got = attend_and_grads(implementation, *inputs, bias=bias + offset[None, None])
    expected = attend_and_grads(implementation, *inputs, bias=(bias + offset[None, None]) - offset[None, None])
    assert_within(got, expected, out=0.01, dq=0.02, dk=0.02, dv=0.02, dbias=0.02)


def test_bias_of_one_key(cpu_implementation):
    inputs = make_inputs(66, 1, heads=2, kv_heads=1, depth=16)
    q, k, _, _ = inputs
    bias, dlse = normal(1, 2, 2, 66, 1), normal(2, 2, 66, 2)
    got = attend_and_grads(cpu_implementation, *inputs, bias=bias)
    # The softmax is constant, and the log-sum-exp is the score.
    assert not got.dq.any() and not got.dk.any() and not got.dbias.any()
    got = attend_and_grads(cpu_implementation, *inputs, bias=bias, dlse=dlse)
    dlse = dlse[..., None]
    assert relative_error(got.dbias, dlse.swapaxes(1, 2)) <= 1e-6
    assert relative_error(got.dq, dlse * k / 4) <= 0.03
    assert relative_error(got.dk, (dlse * q / 4).sum((1, 2), keepdims=True)) <= 0.03
    assert_within(got, exact(*inputs, bias=bias), out=0.03, dv=0.03)


def test_a_bias_that_is_not_finite_shows(implementation):
    q, k, v, dout = make_inputs(66, 70, heads=2, kv_heads=1, depth=16)
    for wrong in (jnp.nan, jnp.inf):
        bias = jnp.zeros((1, 2, 66, 70)).at[0, 1, 5, 7].set(wrong)
        out = attend_and_grads(implementation, q, k, v, dout, bias=bias).out
        assert not jnp.isfinite(out[:, 5, 1]).any()
        assert jnp.isfinite(out[:, :, 0]).all()


def scores_outputs(function, *inputs):
    """How many arrays of the scores' size, in float32, the kernels of a traced function write."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                total += sum(x.aval.shape[2:] == (128, 256) and x.aval.dtype == jnp.float32 for x in eqn.outvars)
            else:
                total += sum(count(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
        return total

    return count(jax.make_jaxpr(function)(*inputs).jaxpr)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_bias_without_gradient_costs_none(transform):
    q, k, v, _ = make_inputs(66, 140, heads=2, kv_heads=1, depth=32)
    bias = normal(1, 1, 1, 66, 140)

    def loss(q, bias):
        with using("triton-interpreted") as name:
            return transform(lambda q, bias: attention(q, k, v, bias, implementation=name))(q, bias).sum()

    assert scores_outputs(jax.grad(loss), q, bias) == 0
    assert scores_outputs(jax.grad(loss, argnums=1), q, bias) == 1
    assert scores_outputs(jax.grad(lambda x: loss(q, x)), bias) == 1


def test_gradient_under_scan_and_vmap():
    # Layers that share a bias, as relative position tables do: its gradient adds up.
    q, k, v, dout = make_inputs(66, 70, heads=2, kv_heads=1, depth=16)
    bias = normal(1, 1, 2, 66, 70)

    def loss(bias, layers):
        def layer(total, scale):
            out = attention(q * scale, k, v, bias, implementation="xla")
            return total + (out * dout).sum(), None

        return jax.lax.scan(jax.checkpoint(layer), 0.0, layers)[0]

    scales = jnp.array([1.0, 0.5])
    grad = jax.jit(jax.grad(loss))
    together = grad(bias, scales)
    each = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(bias, scales[:, None])
    assert relative_error(together, each.sum(0)) <= 1e-5
    assert relative_error(each[0], exact(q, k, v, dout, bias=bias).dbias) <= 0.08
