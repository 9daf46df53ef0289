"""Zeros, extremes, NaN and Inf: what quantised attention elsewhere turns into NaN, zeros, or healthy numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    GRADS,
    as_float64,
    assert_bitwise,
    assert_finite,
    assert_usable,
    assert_within,
    attend_and_grads,
    exact,
    make_inputs,
    normal,
    relative_error,
    without_empty_rows,
)
from helpers import shared_forward_and_backward as forward_and_backward

from sagebwd_jax import SageConfig
from sagebwd_jax._config import LENGTH_MULTIPLE

# One shape for the whole module, so that each implementation is compiled once: two tiles of each axis, both ragged.
SHAPE = dict(queries=160, keys=140, batch=2, heads=4, kv_heads=2)


def make(seed=0, **overrides):
    return make_inputs(**(SHAPE | overrides), seed=seed)


def of_dtype(implementation, dtype, **options):
    """In bfloat16 as models train: on some GPUs other kernels run then."""
    return forward_and_backward(implementation, training=dtype == "bfloat16", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestZeros:
    def test_zero_channel_of_values(self, implementation, dtype):
        q, k, v, dout = make(dtype=dtype)
        got = of_dtype(implementation, dtype)(q, k, v.at[..., 9].set(0), dout)
        assert_finite(got)
        assert not got.out[..., 9].any()
        assert_usable(got, exact(q, k, v.at[..., 9].set(0), dout))

    def test_zero_values(self, implementation, dtype):
        q, k, v, dout = make(dtype=dtype)
        got = of_dtype(implementation, dtype)(q, k, jnp.zeros_like(v), dout)
        assert_finite(got)
        assert not got.out.any() and not got.dq.any() and not got.dk.any()
        assert relative_error(got.dv, exact(q, k, v, dout).dv) <= 0.03

    def test_zero_queries(self, implementation, dtype):
        q, k, v, dout = make(dtype=dtype)
        got = of_dtype(implementation, dtype)(jnp.zeros_like(q), k, v, dout)
        expected = exact(jnp.zeros_like(q), k, v, dout)
        assert_within(got, expected, out=0.03, dq=0.03, dv=0.03, lse=1e-6)
        assert not got.dk.any()

    def test_some_zero_queries(self, implementation, dtype):
        q, k, v, dout = make(dtype=dtype)
        q = q.at[:, 5:150:7].set(0)
        assert_usable(of_dtype(implementation, dtype)(q, k, v, dout), exact(q, k, v, dout))

    @pytest.mark.parametrize("key", [0.0, 3.0])
    def test_equal_keys(self, implementation, dtype, key):
        q, k, v, dout = make(dtype=dtype)
        got = of_dtype(implementation, dtype)(q, jnp.full_like(k, key), v, dout)
        expected = exact(q, jnp.full_like(k, key), v, dout)
        assert_finite(got)
        assert_within(got, expected, out=0.03, dk=0.03, dv=0.03, lse=1e-6)
        assert jnp.abs(got.dq).max() <= 1e-3

    def test_zero_cotangent(self, implementation, dtype):
        q, k, v, dout = make(dtype=dtype)
        got = of_dtype(implementation, dtype)(q, k, v, jnp.zeros_like(dout))
        assert not any(getattr(got, name).any() for name in GRADS)

    def test_cotangent_of_some_rows(self, implementation, dtype):
        q, k, v, dout = make(dtype=dtype)
        dout = dout.at[:, 3:].set(0)
        got = of_dtype(implementation, dtype)(q, k, v, dout)
        assert not got.dq[:, 3:].any()
        assert_usable(got, exact(q, k, v, dout))


class TestExtremes:
    @pytest.mark.parametrize("size", [2.0**-27, 2.0**40])
    def test_gradients_scale_with_the_cotangent(self, implementation, size):
        # No scale has an additive epsilon. Not bitwise: a scale that is added as a logarithm is rounded differently.
        q, k, v, dout = make()
        run = forward_and_backward(implementation)
        plain, scaled = run(q, k, v, dout), run(q, k, v, dout * size)
        for name in GRADS:
            assert relative_error(getattr(scaled, name) / size, getattr(plain, name)) <= 3e-3, name

    @pytest.mark.parametrize("size", [2.0**-27, 2.0**40])
    def test_output_scales_with_the_values(self, implementation, size):
        q, k, v, dout = make()
        run = forward_and_backward(implementation)
        plain, scaled = run(q, k, v, dout), run(q, k, v * size, dout)
        assert_bitwise(scaled.out / size, plain.out)
        for name in ("dq", "dk"):
            assert relative_error(getattr(scaled, name) / size, getattr(plain, name)) <= 3e-3, name

    @pytest.mark.parametrize(("dtype", "depth"), [("float32", 64), ("bfloat16", 64), ("bfloat16", 128)])
    def test_logits_far_below_any_sentinel(self, implementation, dtype, depth):
        # The first 64 queries see keys whose logits are all about -1e5; no constant stands for minus infinity there.
        _, _, v, dout = make_inputs(128, 128, batch=1, heads=1, kv_heads=1, depth=depth, dtype=dtype)
        unit = jnp.zeros(depth).at[0].set(1)
        # 448 and 1880 are the same in 16 bits.
        q = jnp.broadcast_to(448 * unit, (1, 128, 1, depth)).astype(dtype)
        k = jnp.where(jnp.arange(128)[:, None, None] < 64, -1880.0, 1880.0) * unit[None, None, :]
        got = of_dtype(implementation, dtype, is_causal=True)(q, k[None].astype(dtype), v, dout)
        assert_finite(got)
        weights = np.tri(128)
        weights[64:, :64] = 0
        expected = np.einsum("ts,bsnh->btnh", weights / weights.sum(1, keepdims=True), as_float64(v))
        for rows in (slice(0, 64), slice(64, 128)):
            assert relative_error(got.out[:, rows], expected[:, rows]) <= 0.03

    @pytest.mark.parametrize("config", [SageConfig(), SageConfig.mixed()], ids=["default", "mixed"])
    def test_float16_does_not_overflow_inside(self, implementation, config):
        q, k, v, dout = make(dtype=jnp.float16, depth=128)
        run = forward_and_backward(implementation, config=config)
        assert relative_error(run(q, k, jnp.full_like(v, 3e4), dout).out, jnp.full_like(q, 3e4)) <= 0.01
        # dP has a standard deviation of 5.7e4 and tails above 65504, the largest float16.
        v = (v.astype(jnp.float32) * 5000).astype(jnp.float16)
        assert_usable(run(q, k, v, dout), exact(q, k, v, dout))

    @pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])
    def test_float16_does_not_overflow_over_a_long_row(self, implementation):
        # As reported: rows of P over 4096 keys, whose products with V would be summed in 16 bits elsewhere.
        q, k, v, dout = make_inputs(4096, 4096, batch=1, heads=1, kv_heads=1, depth=128, dtype=jnp.float16)
        run = forward_and_backward(implementation)
        assert relative_error(run(q, k, jnp.full_like(v, 3e4), dout).out, jnp.full_like(q, 3e4)) <= 0.01
        v = (v.astype(jnp.float32) * 5000).astype(jnp.float16)
        got = run(q, k, v, dout)
        assert_finite(got)
        assert_usable(got, exact(q, k, v, dout))

    def test_large_logits_are_finite(self, implementation):
        q, k, v, dout = make()
        got = forward_and_backward(implementation)(q * 300, k * 300, v, dout)
        assert_finite(got)
        assert relative_error(got.lse, exact(q * 300, k * 300, v, dout).lse) <= 0.05

    def test_a_key_that_outgrows_all_before_it(self, implementation):
        # The softmax shift lags behind the running maximum; here a later tile lies 2^1000 higher, then lower.
        q, k, v, dout = make_inputs(160, 140, batch=2, heads=4, kv_heads=2)
        q = jnp.abs(q)
        for keys in (slice(130, 131), slice(3, 4)):
            high = k.at[:, keys].set(30.0)
            got, expected = forward_and_backward(implementation)(q, high, v, dout), exact(q, high, v, dout)
            assert_finite(got)
            assert relative_error(got.out, expected.out) <= 0.02


BAD = {
    "nan-query": (0, (0, 5, 0, 0), np.nan),
    "nan-query-last-tile": (0, (0, 159, 3, 7), np.nan),
    "inf-query": (0, (1, 5, 1, 0), np.inf),
    "nan-key": (1, (0, 9, 1, 3), np.nan),
    "inf-key": (1, (0, 9, 1, 0), np.inf),
    "nan-value": (2, (1, 9, 0, 3), np.nan),
    "inf-value": (2, (1, 139, 0, 3), -np.inf),
    "nan-cotangent": (3, (0, 5, 2, 1), np.nan),
    "inf-cotangent": (3, (0, 158, 2, 1), np.inf),
}


def spoil(inputs, name):
    """The inputs with the bad number of this name."""
    operand, index, number = BAD[name]
    return [x.at[index].set(number) if i == operand else x for i, x in enumerate(inputs)]


def assert_others_untouched(clean, got, name):
    """Outside of what may hold traces of the bad number of this name both are finite and bitwise equal.

    That is one batch, and there the head of a bad query or cotangent, or the query heads of a bad key or value. Key
    heads' gradients are sums over query heads, and what comes before a cotangent knows nothing of it.
    """
    operand, (batch, _, head, _), _ = BAD[name]
    (_, _, heads, _), (_, _, kv_heads, _) = clean.dq.shape, clean.dk.shape
    group = heads // kv_heads
    for field in ("out", "lse", *GRADS):
        x = getattr(got, field)
        touched = np.zeros((x.shape[0], heads), bool)
        if operand in (1, 2):
            touched[batch, head * group : (head + 1) * group] = True
        elif operand == 0 or field in GRADS:
            touched[batch, head] = True
        if field in ("dk", "dv"):
            touched = touched.reshape(-1, kv_heads, group).any(2)
        # [B, T, N, ...] -> what other batches and heads hold.
        before, after = (np.asarray(y).swapaxes(1, 2)[~touched] for y in (getattr(clean, field), x))
        assert np.isfinite(as_float64(after)).all(), (name, field)
        assert_bitwise(after, before)


def laundered(got, expected):
    """How many values of each field are finite where exact attention's are not."""
    lost = {
        field: np.isfinite(as_float64(getattr(got, field))) & ~np.isfinite(as_float64(getattr(expected, field)))
        for field in ("out", *GRADS)
    }
    return {field: int(x.sum()) for field, x in lost.items() if x.any()}


def is_finite(got):
    return all(np.isfinite(as_float64(getattr(got, field))).all() for field in ("out", *GRADS))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", BAD)
class TestNotFinite:
    def test_is_never_laundered(self, implementation, name, is_causal):
        bad = spoil(make(), name)
        got = forward_and_backward(implementation, is_causal=is_causal)(*bad)
        assert not laundered(got, exact(*bad, is_causal=is_causal))
        assert not is_finite(got)

    def test_leaves_other_heads_bitwise_untouched(self, implementation, name, is_causal):
        run = forward_and_backward(implementation, is_causal=is_causal)
        assert_others_untouched(run(*make()), run(*spoil(make(), name)), name)


# As reported (a head of keys for each of queries), and with groups of heads. Each case holds every bad number, as the
# time goes into its compilation.
@pytest.mark.parametrize(("kv_heads", "depth", "is_causal"), [(4, 64, False), (2, 64, True), (2, 128, False)], ids=str)
def test_not_finite_in_16_bits(implementation, kv_heads, depth, is_causal):
    clean = make_inputs(256, 256, batch=2, heads=4, kv_heads=kv_heads, depth=depth, dtype=jnp.bfloat16)
    run = forward_and_backward(implementation, training=True, is_causal=is_causal)
    expected = run(*clean)
    for name in BAD:
        bad = spoil(clean, name)
        got = run(*bad)
        assert not laundered(got, exact(*bad, is_causal=is_causal)) and not is_finite(got), name
        assert_others_untouched(expected, got, name)


def test_not_finite_beside_one_key(cpu_implementation):
    clean = make(keys=1)
    run = forward_and_backward(cpu_implementation)
    expected = run(*clean)
    for name in ("nan-query", "inf-query", "nan-cotangent", "inf-cotangent"):
        bad = spoil(clean, name)
        got = run(*bad)
        assert not laundered(got, exact(*bad)) and not is_finite(got), name
        assert_others_untouched(expected, got, name)


def test_not_finite_under_masks_stays_in_its_head(implementation):
    clean = make_inputs(70, 70, batch=2, heads=4, kv_heads=2, depth=16)
    ids = jnp.arange(70)[None, :] // jnp.array([[40], [20]])
    options = dict(
        mask=(normal(5, 2, 1, 70, 70) > -0.5) | jnp.eye(70, dtype=bool)[None, None],
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        key_value_seq_lengths=jnp.array([66, 70]),
        local_window_size=30,
    )

    def run(inputs):
        return without_empty_rows(attend_and_grads(implementation, *inputs, **options))

    expected = run(clean)
    for name in ("nan-query", "inf-key", "nan-value", "nan-cotangent"):
        got = run(spoil(clean, name))
        assert not is_finite(got), name
        assert_others_untouched(expected, got, name)


def test_inputs_are_not_written_to(implementation):
    # Arrays of the device, in 16 bits and whole tiles: padded, cast or moved there, the kernels would get copies.
    inputs = make_inputs(2 * LENGTH_MULTIPLE, LENGTH_MULTIPLE, batch=1, heads=2, kv_heads=1, dtype=jnp.bfloat16)
    before = [jnp.copy(x) for x in inputs]
    jax.block_until_ready(forward_and_backward(implementation)(*inputs))
    assert_bitwise(inputs, before)
