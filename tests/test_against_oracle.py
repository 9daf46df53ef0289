"""Each implementation computes the quantised algorithm: equal to its dense form but for the order of sums.

Bounds in float32: sums in another order move a value by 1e-7, but where that lies between two INT8 values it is rounded
the other way now and then, which costs 1/127 of one entry: up to 6e-5 of O and 1.4e-3 of a gradient were seen. Other
differences (a scale, a span, a mask) cost 1e-2. In 16 bits the rounding of the result itself comes on top, and inputs
of few bits lie exactly between two INT8 values more often.
"""

import jax.numpy as jnp
import pytest
from helpers import (
    assert_within,
    attend_and_grads,
    forward_and_backward,
    make_inputs,
    normal,
    oracle,
    relative_error,
)

from sagebwd_jax import SageConfig

BOUNDS = {
    "float32": dict(out=3e-4, lse=1e-5, dq=3e-3, dk=3e-3, dv=3e-3),
    "float16": dict(out=1e-3, lse=1e-4, dq=4e-3, dk=4e-3, dv=4e-3),
    "bfloat16": dict(out=4e-3, lse=1e-4, dq=5e-3, dk=5e-3, dv=5e-3),
}
ALL_16 = SageConfig(sixteen_bit=("qk", "pv", "dv", "dq", "dk"))
# name: queries, keys, (query heads, key heads), depth, dtype, causal, config, scale
CASES = {
    "default": (130, 257, (6, 3), 64, "float32", False, SageConfig(), None),
    "default-causal": (129, 129, (6, 3), 40, "float32", True, SageConfig(), None),
    "bfloat16-depth-32": (192, 333, (6, 2), 32, "bfloat16", False, SageConfig(), None),
    "float16-depth-128-causal-more-keys": (65, 193, (2, 2), 128, "float16", True, SageConfig(), None),
    "bfloat16-depth-96-causal-more-queries": (257, 127, (4, 1), 96, "bfloat16", True, SageConfig(), None),
    "depth-136-causal": (66, 70, (2, 1), 136, "float32", True, SageConfig(), None),
    "depth-192-mixed": (66, 130, (2, 1), 192, "bfloat16", False, SageConfig.mixed(), None),
    "depth-256-precise-causal": (130, 66, (2, 2), 256, "float16", True, SageConfig.precise(), None),
    "depth-1": (130, 70, (4, 2), 1, "float32", False, SageConfig(), None),
    "depth-3-causal": (70, 130, (2, 1), 3, "bfloat16", True, SageConfig(), None),
    "shorter-than-a-tile-causal": (7, 5, (6, 3), 16, "float32", True, SageConfig(), None),
    "one-query": (1, 300, (6, 3), 64, "float32", False, SageConfig(), None),
    "one-key-more-than-a-tile": (128, 129, (3, 1), 8, "float32", False, SageConfig(), 0.7),
    "negative-scale": (70, 128, (2, 1), 64, "float32", False, SageConfig(), -0.2),
    "faithful": (150, 257, (6, 3), 64, "float32", False, SageConfig.faithful(), None),
    "faithful-causal": (193, 193, (4, 2), 128, "bfloat16", True, SageConfig.faithful(), None),
    "mixed": (130, 257, (6, 3), 128, "float16", False, SageConfig.mixed(), None),
    "mixed-causal": (257, 257, (6, 3), 64, "bfloat16", True, SageConfig.mixed(), None),
    "precise": (130, 257, (6, 3), 64, "float32", False, SageConfig.precise(), None),
    "precise-causal": (193, 193, (4, 2), 80, "bfloat16", True, SageConfig.precise(), None),
    "all-in-16-bits-causal": (129, 200, (6, 3), 64, "float32", True, ALL_16, None),
    "token-keys-causal": (257, 129, (6, 3), 64, "float32", True, SageConfig(key_scale="token"), None),
    "block-queries-and-values": (
        193,
        257,
        (6, 3),
        64,
        "float32",
        False,
        SageConfig(query_scale="block", value_scale="block", block_q=64),
        None,
    ),
    "other-spans-causal": (
        257,
        257,
        (4, 2),
        64,
        "float32",
        True,
        SageConfig(pv_span=64, dv_span=64, dk_span=128, dq_span=128),
        None,
    ),
    "without-smoothing": (130, 257, (6, 3), 64, "float32", False, SageConfig(smooth_k=False), None),
}


def check(implementation, queries, keys, heads, depth, dtype, is_causal, config, scale, batch=2):
    inputs = make_inputs(
        queries, keys, batch=batch, heads=heads[0], kv_heads=heads[1], depth=depth, dtype=jnp.dtype(dtype)
    )
    # A common component of the keys, as in trained models: without it nothing shows that smoothing is done right.
    inputs[1] = inputs[1].at[..., 1].add(1.5)
    options = dict(is_causal=is_causal, config=config, scale=scale)
    got = forward_and_backward(implementation, **options)(*inputs)
    for x, like in zip(got, [inputs[0], None, *inputs[:3]], strict=True):
        assert x.dtype == (jnp.float32 if like is None else like.dtype)
    assert_within(got, oracle(*inputs, **options), **BOUNDS[dtype])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_algorithm(implementation, name):
    check(implementation, *CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SageConfig(), SageConfig.precise()], ids=["default", "precise"])
def test_plain_jax_on_a_gpu(config):
    # Long enough for a library's matrix products, which are not the CPU's.
    check("xla", 1024, 1024, (4, 4), 64, "bfloat16", False, config, None, batch=1)


@pytest.mark.parametrize("length", [2, 17, 63, 65, 127, 192, 1000, 4092])
def test_any_length(length):
    check("xla", length, length, (1, 1), 32, "bfloat16", length != 192, SageConfig(), None, batch=1)


@pytest.mark.parametrize("config", [SageConfig(), SageConfig.mixed()], ids=["default", "mixed"])
def test_grouped_heads_equal_repeated_heads(implementation, config):
    q, k, v, dout = make_inputs(130, 131, heads=6, kv_heads=2, depth=32)
    run = forward_and_backward(implementation, is_causal=True, config=config)
    grouped = run(q, k, v, dout)
    repeated = run(q, jnp.repeat(k, 3, axis=2), jnp.repeat(v, 3, axis=2), dout)
    assert grouped.dk.shape == k.shape and grouped.dv.shape == v.shape
    for name in ("out", "lse", "dq"):
        assert relative_error(getattr(grouped, name), getattr(repeated, name)) <= 1e-6, name
    for name in ("dk", "dv"):
        summed = getattr(repeated, name).reshape(*k.shape[:2], 2, 3, -1).sum(3)
        # Other tiles of the kernels may round dS the other way on a tie.
        assert relative_error(getattr(grouped, name), summed) <= 1e-4, name


def test_a_call_without_batch_axis_is_a_batch_of_one(implementation):
    inputs = make_inputs(65, 70, batch=1, depth=32)
    batched = forward_and_backward(implementation)(*inputs)
    single = forward_and_backward(implementation)(*(x[0] for x in inputs))
    for name, x in single._asdict().items():
        assert relative_error(x, getattr(batched, name)[0]) == 0, name


def make_empty(empty):
    """Inputs with an axis of this name that is empty, and the sizes of all four."""
    sizes = dict(batch=2, queries=3, keys=5, heads=4) | {empty: 0}
    batch, queries, keys, heads = sizes.values()
    return make_inputs(queries, keys, batch=batch, heads=heads, kv_heads=2), (batch, queries, keys, heads)


def check_empty(got, inputs):
    for x, like in zip((got.out, got.dq, got.dk, got.dv), (inputs[0], *inputs[:3]), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype
        assert not x.any()
    assert got.lse.shape == inputs[0].shape[:3]
    assert (got.lse == -jnp.inf).all()


@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads"])
def test_empty_axes(implementation, empty):
    inputs, _ = make_empty(empty)
    check_empty(forward_and_backward(implementation, is_causal=True)(*inputs), inputs)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads"])
def test_empty_axes_with_masks_and_a_bias(cpu_implementation, empty):
    inputs, (batch, queries, keys, heads) = make_empty(empty)
    bias = normal(9, batch, heads, queries, keys)
    masks = dict(
        mask=jnp.ones((batch, 1, queries, keys), bool),
        query_seq_lengths=jnp.full(batch, queries),
        key_value_seq_lengths=jnp.full(batch, keys),
        query_segment_ids=jnp.zeros((batch, queries), jnp.int32),
        key_value_segment_ids=jnp.zeros((batch, keys), jnp.int32),
        local_window_size=2,
    )
    for options in ({}, dict(mask=masks["mask"]), masks):
        got = attend_and_grads(cpu_implementation, *inputs, bias=bias, **options)
        check_empty(got, inputs)
        assert got.dbias.shape == bias.shape and not got.dbias.any()
    check_empty(attend_and_grads(cpu_implementation, *inputs, **masks), inputs)
