"""The gradients of SwiGLU that are written by hand, and that pairs read as words are the pairs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative_error

from train.swiglu import _apart, _together, gated

DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])


def draw(dtype, *shape, seed=0):
    return (3 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def plain(pairs):
    return jax.nn.silu(pairs[..., 0]) * pairs[..., 1]


@DTYPES
def test_words_hold_the_pairs(dtype):
    pairs = draw(dtype, 3, 5, 7, 2).at[0, 0, 0].set(jnp.array([-0.0, jnp.inf], dtype))
    first, second = jax.jit(_apart)(pairs)
    chex.assert_trees_all_equal((first, second), (pairs[..., 0], pairs[..., 1]))
    together = jax.jit(_together)(first, second)
    chex.assert_equal_shape([together, pairs])
    np.testing.assert_array_equal(np.asarray(together).view(np.uint8), np.asarray(pairs).view(np.uint8))


@DTYPES
def test_gradients_are_those_of_the_plain_formula(dtype):
    pairs, dout = draw(dtype, 3, 5, 64, 2), draw(dtype, 3, 5, 64, seed=1)
    out, vjp = jax.vjp(gated, pairs)
    wanted, plain_vjp = jax.vjp(plain, pairs.astype(jnp.float32))
    [got], [want] = vjp(dout), plain_vjp(dout.astype(jnp.float32))
    assert (out.dtype, got.dtype) == (dtype, dtype)
    bound = 2 * float(jnp.finfo(dtype).eps)
    assert relative_error(out, wanted) < bound
    for half in (0, 1):
        assert relative_error(got[..., half], want[..., half]) < bound


def test_large_gates_give_no_nan():
    pairs = jnp.array([[-3e4, 2.0], [3e4, 2.0]], jnp.bfloat16)
    out, vjp = jax.vjp(gated, pairs)
    [grads] = vjp(jnp.ones(2, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(out, np.float32), [0, 6e4], rtol=1e-2)
    np.testing.assert_allclose(np.asarray(grads, np.float32), [[0, 0], [2, 3e4]], rtol=1e-2)
