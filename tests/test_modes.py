"""What JAX can be asked for or set to around attention: export, 64 bits, checks for NaN, a fresh process, sizes."""

import functools
import logging
import math
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    COMPILED,
    assert_bitwise,
    assert_usable,
    attend_and_grads,
    exact,
    forward_and_backward,
    make_inputs,
    normal,
    relative_error,
    using,
)
from jax import export

from pallas_kernels import steps
from sagebwd_jax import _config, attention
from sagebwd_jax.reference import Attended


def loss(query, key, value, implementation="xla", **options):
    with using(implementation) as name:
        out = attention(query, key, value, implementation=name, **options)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


class TestVmapOfGrad:
    @pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
    def test_equals_a_loop(self, cpu_implementation, in_axes):
        q, k, v, _ = make_inputs(17, 9, batch=1, heads=2, kv_heads=1, depth=16)
        inputs = [x if a is None else jnp.stack([x, x + 1, -2 * x]) for x, a in zip((q, k, v), in_axes, strict=True)]
        gradients = jax.grad(functools.partial(loss, implementation=cpu_implementation), argnums=(0, 1, 2))
        got = jax.jit(jax.vmap(gradients, in_axes))(*inputs)
        one = jax.jit(gradients)
        for i in range(3):
            expected = one(*(x if a is None else x[i] for x, a in zip(inputs, in_axes, strict=True)))
            for a, b in zip(got, expected, strict=True):
                assert relative_error(a[i], b) <= 1e-6

    def test_jacobian_equals_a_loop(self, cpu_implementation):
        inputs = make_inputs(4, 4, batch=1, heads=1, kv_heads=1, depth=8)[:3]

        def call(*inputs):
            with using(cpu_implementation) as name:
                return attention(*inputs, implementation=name)

        got = jax.jit(jax.jacrev(call, argnums=(0, 1, 2)))(*inputs)
        one_row = jax.jit(lambda dout, *inputs: jax.vjp(call, *inputs)[1](dout))
        units = jnp.eye(4 * 8).reshape(4 * 8, *inputs[0].shape)
        rows = [one_row(dout, *inputs) for dout in units]
        for jacobian, *expected in zip(got, *rows, strict=True):
            assert relative_error(jacobian.reshape(4 * 8, *inputs[0].shape), jnp.stack(expected)) <= 1e-6

    def test_jacobian_of_the_keys(self):
        q, k, v, _ = make_inputs(4, 4, batch=1, heads=1, kv_heads=1, depth=8)
        got = jax.jit(jax.jacrev(lambda k: attention(q, k, v, implementation="xla")))(k)
        expected = jax.jacrev(lambda k: jax.nn.dot_product_attention(q, k, v))(k)
        assert got.shape == (1, 4, 1, 8, 1, 4, 1, 8) and relative_error(got, expected) <= 0.04


class TestCompiledOnce:
    def compilations(self, caplog, calls):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            for call in calls:
                call()
        return [x for x in caplog.messages if x.startswith("Compiling")]

    def test_for_any_value_of_a_traced_scale(self, caplog):
        q, k, v, _ = make_inputs(5, 7, depth=8)
        step = jax.jit(jax.value_and_grad(lambda scale, *x: loss(*x, scale=scale)))
        step(jnp.float32(0.5), q, k, v)
        later = [functools.partial(step, jnp.float32(0.1 * i), q + i, k, v) for i in range(1, 5)]
        # Once traced, a Python number in the place of a 0-d array only has another type.
        assert len(self.compilations(caplog, [*later, lambda: step(0.3, q, k, v)])) <= 1
        assert self.compilations(caplog, [lambda: step(0.7, q, k, v)]) == []

    def test_outside_of_jit_too(self, caplog):
        q, k, v, _ = make_inputs(5, 7, depth=8)

        def call(scale):
            jax.grad(lambda q: loss(q, k, v, scale=scale))(q)

        call(jnp.float32(0.5)), call(0.5)
        assert self.compilations(caplog, [lambda: call(jnp.float32(0.25)), lambda: call(0.5)] * 3) == []

    # The bound is that of an impatient user; what it measures is the machine too, so it is not part of make test.
    @pytest.mark.parametrize(
        "implementation", [pytest.param("xla", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.gpu)]
    )
    def test_within_a_minute(self, implementation):
        jax.clear_caches()
        inputs = make_inputs(4096, 4096, batch=1, heads=8, kv_heads=2, depth=128, dtype=jnp.bfloat16)
        start = time.monotonic()
        forward_and_backward(implementation, is_causal=True).lower(*inputs).compile()
        assert time.monotonic() - start <= 60


class TestExport:
    @pytest.mark.parametrize("implementation", [*COMPILED, None])
    def test_of_both_passes(self, implementation):
        *inputs, _ = make_inputs(66, 70, depth=32)
        function = jax.jit(functools.partial(attention, implementation=implementation, is_causal=True))
        # JAX promises no other release can load the Triton kernels; see the README.
        checks = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")] if implementation == "triton" else []
        exported = export.export(function, disabled_checks=checks)(*inputs)
        loaded = export.deserialize(exported.serialize(vjp_order=1))
        assert_bitwise(loaded.call(*inputs), function(*inputs))
        gradients = [
            jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), argnums=(0, 1, 2)))(*inputs)
            for f in (loaded.call, function)
        ]
        for got, expected in zip(*gradients, strict=True):
            assert relative_error(got, expected) <= 3e-3

    def test_with_masks(self):
        q, k, v, dout = make_inputs(66, 66, heads=2, kv_heads=1, depth=16)
        ids = jnp.arange(66)[None, :] // jnp.array([[30], [40]])
        options = dict(
            bias=normal(3, 1, 2, 66, 66),
            mask=normal(4, 2, 1, 66, 66) > -0.5,
            key_value_seq_lengths=jnp.array([60, 66]),
            query_segment_ids=ids,
            key_value_segment_ids=ids,
        )

        @jax.jit
        def both_passes(*inputs):
            return tuple(attend_and_grads("xla", *inputs[:4], **inputs[4], local_window_size=20))

        loaded = export.deserialize(export.export(both_passes)(q, k, v, dout, options).serialize())
        got = Attended(*loaded.call(q, k, v, dout, options))
        assert_usable(got, exact(q, k, v, dout, local_window_size=20, **options))

    def test_of_the_interpreted_kernels(self):
        *inputs, _ = make_inputs(66, 70, depth=32)
        with using("triton-interpreted") as name:
            function = jax.jit(functools.partial(attention, implementation=name))
            loaded = export.deserialize(export.export(function)(*inputs).serialize())
            assert_bitwise(loaded.call(*inputs), function(*inputs))


# One of each argument that hides keys, for 17 queries and 9 keys; every query sees some.
SEEN_BY_ALL_QUERIES: dict[str, dict] = {
    "none": {},
    "window": dict(local_window_size=(16, 3)),
    "lengths": dict(query_seq_lengths=np.array([17]), key_value_seq_lengths=np.array([5])),
    "segments": dict(
        query_segment_ids=np.array([[4] * 4 + [7] * 13]), key_value_segment_ids=np.array([[4] * 4 + [7] * 5])
    ),
    "mask of keys": dict(mask=np.arange(9)[None, None, None] < 6),
    "mask that hides nothing": dict(mask=np.ones((17, 9), bool)),
    "bias": dict(bias=normal(5, 1, 2, 17, 9)),
    "bias of float16": dict(bias=normal(5, 17, 9, dtype=jnp.float16).at[:, 1].set(jnp.finfo(jnp.float16).min)),
    "bias that hides": dict(bias=jnp.zeros((17, 9)).at[:, 1].set(jnp.finfo(jnp.float32).min)),
}
SEEN_BY_ALL_QUERIES["all"] = functools.reduce(
    lambda a, b: a | SEEN_BY_ALL_QUERIES[b], ("window", "lengths", "segments", "bias"), dict(mask=np.tri(17, 9) > 0)
)


class TestModes:
    def test_64_bits_of_jax_change_no_dtype(self, implementation):
        inputs = [np.asarray(x) for x in make_inputs(66, 70, depth=32)]
        with jax.enable_x64(True):
            got = forward_and_backward(implementation, is_causal=True)(*map(jnp.asarray, inputs))
        assert {x.dtype.name for x in got} == {"float32"}
        assert_usable(got, exact(*inputs, is_causal=True))

    def test_64_bits_of_jax_change_no_dtype_with_masks(self, cpu_implementation):
        inputs = [np.asarray(x) for x in make_inputs(66, 66, heads=2, kv_heads=1, depth=16)]
        ids = np.arange(66, dtype=np.int64)[None, :] // np.array([[30], [40]])
        options = dict(
            bias=np.asarray(normal(3, 1, 2, 66, 66)),
            mask=np.asarray(normal(4, 2, 1, 66, 66)) > -0.5,
            key_value_seq_lengths=np.array([60, 66], np.int64),
            query_segment_ids=ids,
            key_value_segment_ids=ids,
        )
        with jax.enable_x64(True):
            arrays = {name: jnp.asarray(x) for name, x in options.items()}
            assert arrays["query_segment_ids"].dtype == arrays["key_value_seq_lengths"].dtype == jnp.int64
            got = attend_and_grads(cpu_implementation, *map(jnp.asarray, inputs), **arrays, local_window_size=20)
        assert {x.dtype.name for x in got} == {"float32"}
        assert_usable(got, exact(*inputs, **options, local_window_size=20))

    @pytest.mark.parametrize(
        ("options", "how"), [*((name, "eager") for name in SEEN_BY_ALL_QUERIES), ("none", "jit"), ("all", "jit")]
    )
    def test_checks_find_nothing(self, options, how):
        self.check("xla", how == "jit", **SEEN_BY_ALL_QUERIES[options])

    @pytest.mark.parametrize(("options", "how"), [("none", "jit"), ("all", "eager")])
    @pytest.mark.parametrize("implementation", ["triton-interpreted", COMPILED[1]])
    def test_checks_find_nothing_in_the_kernels(self, implementation, options, how):
        self.check(implementation, how == "jit", **SEEN_BY_ALL_QUERIES[options])

    def check(self, implementation, jit, bias=None, **options):
        # Masked scores are -inf inside, the sums of padding 0: none of it may show.
        *inputs, _ = make_inputs(17, 9, batch=1, heads=2, kv_heads=1, depth=16)
        with using(implementation) as name, jax.debug_nans(True), jax.debug_infs(True):
            options |= dict(implementation=name, is_causal=True, return_residual=True)

            def total(query, key, value, bias):
                out, lse = attention(query, key, value, bias, **options)
                return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

            gradients = jax.value_and_grad(total, argnums=(0, 1, 2) if bias is None else (0, 1, 2, 3))
            value, _ = (jax.jit(gradients) if jit else gradients)(*inputs, bias)
        assert jnp.isfinite(value)

    def test_checks_find_only_the_log_sum_exp_of_a_query_that_sees_no_key(self):
        # Which is -inf, so that a check for it cannot pass.
        q, k, v, _ = make_inputs(17, 9, batch=1, heads=2, kv_heads=1, depth=16)
        call = functools.partial(attention, q, k, v, implementation="xla", mask=np.arange(17)[:, None] != 3)
        with jax.debug_nans(True), jax.debug_infs(True):
            assert jnp.isfinite(call()).all()
            with pytest.raises(FloatingPointError):
                call(return_residual=True)
        assert (jnp.isneginf(call(return_residual=True)[1]) == (np.arange(17) == 3)[None, :, None]).all()

    @pytest.mark.parametrize("queries", [0, 2])
    def test_checks_find_nothing_where_there_is_nothing(self, queries):
        q, k, v, _ = make_inputs(queries, 0, batch=1, heads=2, kv_heads=1, depth=16)
        with jax.debug_infs(True):
            assert not attention(q, k, v, implementation="xla").any()

    def test_checks_find_a_nan(self):
        q, k, v, _ = make_inputs(17, 9, batch=1, heads=2, kv_heads=1, depth=16)
        bad = q.at[0, 0, 0, 0].set(jnp.nan)
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            jax.jit(loss)(bad, k, v)


FRESH = """
import hashlib, jax, numpy
from sagebwd_jax import attention
from helpers import make_inputs
q, k, v, _ = make_inputs(128, 128, heads=4, kv_heads=4, depth=32)
step = jax.jit(jax.value_and_grad(lambda *x: attention(*x, is_causal=True).sum(), argnums=(0, 1, 2)))
digests = set()
for _ in range(100):
    results = jax.tree.leaves(step(q, k, v))
    digests.add(hashlib.sha256(b"".join(numpy.asarray(x).tobytes() for x in results)).hexdigest())
assert all(numpy.isfinite(x).all() for x in results)
print(len(digests))
"""


def test_a_fresh_process_without_a_gpu_repeats_itself_silently():
    tests = Path(__file__).parent
    environment = dict(PYTHONPATH=f"{tests}:{tests.parent}", JAX_PLATFORMS="cpu")
    done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1\n", "")


class TestLargeSizes:
    def test_integer_sums_stay_exact(self):
        # A sum runs over a head's channels or over the span of a tile, never over a sequence: so no length matters.
        longest = max(256, *_config._SPANS)
        largest = steps.INT8_MAX**2 * longest
        assert largest < 2**31
        # Plain JAX adds in float32, which holds integers to 2^24.
        assert largest < 2**24

    def test_a_quarter_of_a_million_keys(self):
        # Keys and values at the end of INT8's range, of one sign: every sum is as large as it can be.
        keys = 262144
        q = jnp.full((1, 1, 1, 16), 3.0)
        k = jnp.full((1, keys, 1, 16), 5.0).at[0, 7].set(-5.0)
        v = jnp.abs(normal(0, 1, keys, 1, 16)) + 1
        out, lse = jax.jit(functools.partial(attention, implementation="xla", return_residual=True))(q, k, v)
        assert relative_error(out, v.mean(1, keepdims=True)) <= 0.005
        assert abs(float(lse[0, 0, 0]) - (60 + math.log(keys))) <= 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads"), [(10923, 6), (70000, 1), (2, 70000)])
def test_more_programs_than_a_grid_axis_holds(batch, heads):
    inputs = make_inputs(32, 32, batch=batch, heads=heads, kv_heads=heads, depth=16, dtype=jnp.bfloat16)
    got = forward_and_backward("triton")(*inputs)
    last = (slice(-8, None), slice(None), slice(-8, None))
    expected = exact(*(x[last] for x in inputs))
    assert_usable(type(got)(*(x[last] if x.ndim == 4 else x[-8:, :, -8:] for x in got)), expected)
