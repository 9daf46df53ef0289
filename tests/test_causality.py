"""Causal attention is top-left: query i sees keys 0..i, and nothing flows back to a key that it does not see."""

import jax
import jax.numpy as jnp
import pytest
from helpers import exact, make_inputs, normal, relative_error
from helpers import shared_forward_and_backward as forward_and_backward

from sagebwd_jax import SageConfig
from sagebwd_jax.reference import exact_attention


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (5, 2), (4, 4)])
def test_weights_of_hidden_keys_are_zero(implementation, queries, keys):
    q, k, _, dout = make_inputs(queries, keys, batch=2, heads=2, kv_heads=2, depth=16)
    v = jnp.broadcast_to(jnp.eye(keys, 16)[None, :, None], k.shape)
    got = forward_and_backward(implementation, is_causal=True)(q, k, v, dout)
    assert not got.dk[:, queries:].any() and not got.dv[:, queries:].any()
    weights = got.out[..., :keys]
    seen = jnp.tri(queries, keys, dtype=bool)[None, :, None, :]
    assert (jnp.where(seen, 0, weights) == 0).all()
    assert (jnp.where(seen, weights, 1) > 1e-3).all()
    assert jnp.abs(weights.sum(-1) - 1).max() <= 0.01


def test_corner_is_that_of_jax(implementation):
    for queries, keys in ((3, 7), (7, 3)):
        q, k, v, dout = make_inputs(queries, keys, heads=2, kv_heads=2, depth=16)
        theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        got = forward_and_backward(implementation, is_causal=True)(q, k, v, dout)
        assert relative_error(got.out, theirs) <= 0.03


@pytest.mark.parametrize(
    "config", [SageConfig(), SageConfig.faithful(), SageConfig.mixed()], ids=["default", "faithful", "mixed"]
)
def test_gradient_of_one_query_reaches_what_it_sees(implementation, config):
    check_reach(implementation, 257, 257, config)


@pytest.mark.parametrize(("queries", "keys"), [(260, 150), (150, 260)])
def test_the_same_of_unequal_lengths(implementation, queries, keys):
    check_reach(implementation, queries, keys, SageConfig())


def check_reach(implementation, queries, keys, config):
    """For queries around the edges of tiles of 64 and 128: which gradients are zero, and which are not."""
    q, k, v, dout = make_inputs(queries, keys, batch=1, heads=2, kv_heads=1, depth=32)
    run = forward_and_backward(implementation, is_causal=True, config=config)
    for query in (0, 1, 63, 64, 127, 128, 129, queries - 1):
        got = run(q, k, v, jnp.zeros_like(dout).at[:, query].set(dout[:, query]))
        reach = min(query + 1, keys)
        for name in ("dk", "dv"):
            assert not getattr(got, name)[:, reach:].any(), (name, query)
        others = jnp.arange(queries) != query
        assert not got.dq[:, others].any(), query
        # A key that is seen gets weight; where a whole tile shares a scale, the smallest are rounded to zero.
        touched = (got.dv != 0).any((0, 2, 3))[:reach]
        assert touched.all() or (config.grad_scale == "tile" and touched.mean() > 0.8), (query, touched)
        if query:
            assert got.dq[:, query].any() and got.dk[:, : query + 1].any()


@pytest.mark.parametrize("edge", [1, 64, 128])
def test_output_barely_depends_on_hidden_keys(implementation, edge):
    # Not bitwise: the mean that is taken off K, and the scales of its block, are over all keys.
    q, k, v, dout = make_inputs(257, 257, batch=1, heads=2, kv_heads=1, depth=32)
    run = forward_and_backward(implementation, is_causal=True, config=SageConfig())
    plain = run(q, k, v, dout).out[:, :edge]
    changed = run(q, k.at[:, edge:].set(-k[:, edge:]), v.at[:, edge:].set(normal(9, 1, 257 - edge, 1, 32)), dout)
    assert relative_error(changed.out[:, :edge], plain) <= 0.03


def test_first_query_copies_the_first_value(implementation):
    q, k, v, dout = make_inputs(257, 257, batch=1, heads=2, kv_heads=1, depth=32)
    got = forward_and_backward(implementation, is_causal=True, config=SageConfig())(q, k, v, dout)
    assert relative_error(got.out[:, 0], jnp.repeat(v[:, 0], 2, axis=1)) <= 0.01
    assert jnp.abs(got.dq[:, 0]).max() <= 0.02 * jnp.abs(got.dq).max()


def test_causal_differs_from_full_attention_by_the_mask_alone(implementation):
    # The last query of square attention sees every key.
    q, k, v, dout = make_inputs(130, 130, depth=32)
    causal, full = (forward_and_backward(implementation, is_causal=x)(q, k, v, dout) for x in (True, False))
    assert relative_error(causal.out[:, -1], full.out[:, -1]) <= 1e-6
    assert relative_error(causal.out, full.out) > 0.3


def test_oracle_of_causality():
    # The oracle itself, against softmax of what the definition leaves.
    q, k, v, dout = make_inputs(5, 7, batch=1, heads=1, kv_heads=1, depth=8)
    out, _ = exact_attention(q, k, v, is_causal=True)
    for i in range(5):
        weights = jax.nn.softmax(q[0, i, 0] @ k[0, : i + 1, 0].T / 8**0.5)
        assert relative_error(out[0, i, 0], weights @ v[0, : i + 1, 0]) <= 1e-5
    assert relative_error(exact(q, k, v, dout, is_causal=True).out, out) <= 1e-6
