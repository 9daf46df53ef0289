"""Any shape, dtype, grouping and mask: "xla" is as close to exact attention as quantisation allows."""

import jax.numpy as jnp
import pytest
from helpers import (
    assert_cosines,
    assert_finite,
    assert_usable,
    exact,
    forward_and_backward,
    make_inputs,
)

from sagebwd_jax import SageConfig

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

# Each example compiles, so they are few; derandomised, so that a failure is everyone's.
few = hypothesis.settings(max_examples=8, deadline=None, derandomize=True, database=None)
CONFIGS = [SageConfig(), SageConfig.faithful(), SageConfig.mixed(), SageConfig.precise()]


@few
@hypothesis.given(
    queries=st.integers(2, 200),
    keys=st.integers(2, 200),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    depth=st.integers(4, 128),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    is_causal=st.booleans(),
    config=st.sampled_from(CONFIGS),
    seed=st.integers(0, 99),
)
def test_close_to_exact_attention(queries, keys, kv_heads, group, depth, dtype, is_causal, config, seed):
    inputs = make_inputs(
        queries, keys, batch=2, heads=group * kv_heads, kv_heads=kv_heads, depth=depth, dtype=dtype, seed=seed
    )
    got = forward_and_backward("xla", is_causal=is_causal, config=config)(*inputs)
    assert_usable(got, exact(*inputs, is_causal=is_causal))


@few
@hypothesis.given(
    exponents=st.tuples(*[st.integers(-20, 3)] * 2, *[st.integers(-20, 20)] * 2),
    offset=st.floats(-50, 50),
    is_causal=st.booleans(),
)
def test_any_size_of_the_inputs(exponents, offset, is_causal):
    # One shape, so that it compiles twice.
    q, k, v, dout = (x * 2.0**e for x, e in zip(make_inputs(66, 70, depth=32), exponents, strict=True))
    inputs = q, k + offset * 2.0 ** exponents[1], v, dout
    got, expected = RUN[is_causal](*inputs), exact(*inputs, is_causal=is_causal)
    assert_finite(got)
    assert_cosines(got, expected, out=0.99, dv=0.99)


RUN = {is_causal: forward_and_backward("xla", is_causal=is_causal) for is_causal in (False, True)}
