"""Sizes at which an INT32 sum or a 32-bit offset would be too small: the real ones, so most need a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Results, assert_usable, exact, forward_and_backward, make_inputs, normal

from pallas_kernels import steps

LONG = 262144


def one_sign(queries, keys):
    """Inputs whose products of all sums over queries or keys, of O, dQ, dK and dV, are of one sign.

    Every score has nearly the same weight, and its key, value and dS have one sign in common.
    """
    sign = jnp.sign(normal(0, 1, keys, 1, 1))
    noise = [normal(i + 1, 1, length, 1, 64) / 10 for i, length in enumerate((queries, keys, keys, queries))]
    inputs = (1 + noise[0]) / 20, sign * (1 + noise[1]), 1 + sign / 2 + noise[2], 1 + noise[3]
    return [x.astype(jnp.bfloat16) for x in inputs]


@pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("queries", "keys"), [(128, LONG), (LONG, 128)])
def test_a_quarter_of_a_million_products_of_one_sign(implementation, queries, keys):
    # One INT32 sum over all of them would overflow.
    assert steps.INT8_MAX**2 * LONG > 2**31
    inputs = one_sign(queries, keys)
    got, expected = forward_and_backward(implementation)(*inputs), exact(*inputs)
    assert_usable(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("batch", [4096, 8193], ids=["2^31", "more-than-2^32"])
def test_offsets_beyond_32_bits(batch, dtype):
    # [batch, 256, 16, 128] is the largest INT8 tensor that Pallas takes by offsets of 32 bits, and one that it takes by
    # 64; float16 has no kernels of Hopper's own.
    heads, length, depth = 16, 256, 128
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    needed = 16 * batch * length * heads * depth
    if memory < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory: there are {memory / 1e9:.0f}")
    # Of three sequences in turn: 2^10 to 2^13 of them, where an offset would wrap, are no multiple of three.
    three = make_inputs(length, length, batch=3, heads=heads, kv_heads=2, depth=depth, dtype=dtype)
    inputs = [jnp.take(x, jnp.arange(batch) % 3, axis=0) for x in three]
    run = forward_and_backward("triton", is_causal=True)
    got = jax.device_get(jax.tree.map(lambda x: x[-3:], run(*inputs)))
    last = np.arange(batch - 3, batch) % 3
    assert_usable(Results(*map(jnp.asarray, got)), exact(*(x[last] for x in three), is_causal=True))
