"""JAX's transformations: jit, grad, vmap, jvp, eval_shape, and what is not recompiled."""

import fractions
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    COMPILED,
    as_float64,
    assert_bitwise,
    assert_usable,
    attend_and_grads,
    cosine,
    exact,
    forward_and_backward,
    make_inputs,
    normal,
    relative_error,
    using,
)

from sagebwd_jax import SageConfig, attention
from sagebwd_jax.reference import exact_attention


def loss_of(implementation, dout, **options):
    """A scalar function of query, key, value with a random gradient."""

    def loss(query, key, value):
        with using(implementation) as name:
            out = attention(query, key, value, implementation=name, **options)
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32))

    return loss


class TestJitAndGrad:
    def test_without_jit(self, cpu_implementation):
        *inputs, dout = make_inputs(70, 65, batch=1, heads=2, kv_heads=1, depth=32)
        gradients = jax.value_and_grad(loss_of(cpu_implementation, dout, is_causal=True), argnums=(0, 1, 2))
        eager, jitted = gradients(*inputs), jax.jit(gradients)(*inputs)
        for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
            # Fused or not, a product of scales may be rounded differently, and INT8 then too.
            assert relative_error(a, b) <= 3e-3

    def test_gradients_of_one_argument(self, cpu_implementation):
        q, k, v, dout = make_inputs(70, 65, batch=1, heads=2, kv_heads=1, depth=32)
        loss = loss_of(cpu_implementation, dout)
        alone = [jax.jit(jax.grad(loss, argnums=i))(q, k, v) for i in range(3)]
        for a, b in zip(alone, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v), strict=True):
            # Another program, so XLA may sum in another order; see test_against_oracle.py.
            assert relative_error(a, b) <= 3e-3

    def test_self_attention_sums_the_three_gradients(self, cpu_implementation):
        x, _, _, dout = make_inputs(70, 70, batch=1, heads=2, kv_heads=2, depth=32)
        loss = loss_of(cpu_implementation, dout)
        parts = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
        assert relative_error(jax.jit(jax.grad(lambda x: loss(x, x, x)))(x), sum(parts)) <= 1e-6

    def test_without_residual_is_the_same(self, cpu_implementation):
        *inputs, dout = make_inputs(70, 65, batch=1, heads=2, kv_heads=1, depth=32)
        with_lse = forward_and_backward(cpu_implementation)(*inputs, dout)
        gradients = jax.jit(jax.grad(loss_of(cpu_implementation, dout), argnums=(0, 1, 2)))(*inputs)
        assert_bitwise(list(gradients), [with_lse.dq, with_lse.dk, with_lse.dv])

    def test_inference_has_the_output_of_training(self, cpu_implementation):
        # Forward alone keeps nothing, another path through the kernel.
        *inputs, dout = make_inputs(70, 65, batch=1, heads=2, kv_heads=1, depth=32)
        with using(cpu_implementation) as name:
            out, lse = jax.jit(functools.partial(attention, implementation=name, return_residual=True))(*inputs)
        trained = forward_and_backward(cpu_implementation)(*inputs, dout)
        if cpu_implementation == "xla":
            # Two programs, which XLA may fuse and so round in two ways.
            assert relative_error(out, trained.out) <= 1e-4 and relative_error(lse, trained.lse) <= 1e-6
        else:
            assert_bitwise([out, lse], [trained.out, trained.lse])

    def test_jvp_says_that_it_is_a_custom_vjp(self):
        q, k, v, _ = make_inputs(4, 4, depth=8)
        for transform in (
            lambda f: jax.jvp(f, (q,), (q,)),
            lambda f: jax.linearize(f, q)[1](q),
            lambda f: jax.jacfwd(f)(q),
        ):
            with pytest.raises(TypeError, match="custom_vjp"):
                transform(lambda q: attention(q, k, v, implementation="xla"))

    @pytest.mark.parametrize("second", [jax.jacfwd, jax.jacrev])
    def test_second_derivatives_are_refused(self, cpu_implementation, second):
        q, k, v, _ = make_inputs(4, 4, batch=1, heads=1, kv_heads=1, depth=8)
        with using(cpu_implementation) as name, pytest.raises(NotImplementedError, match="second derivatives"):
            gradient = jax.grad(lambda q: attention(q, k, v, implementation=name).sum())
            jax.make_jaxpr(second(gradient))(q)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_eval_shape(self, dtype):
        q, k, v, _ = make_inputs(5, 7, depth=8, dtype=dtype)
        call = functools.partial(attention, implementation="xla", return_residual=True)
        out, lse = jax.eval_shape(call, q, k, v)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], jnp.float32)
        grads = jax.eval_shape(jax.grad(lambda *x: call(*x)[0].astype(jnp.float32).sum(), argnums=(0, 1, 2)), q, k, v)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


class TestVmap:
    @pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (0, None, None, 0), (None, 0, 0, 0), (2, 1, None, 0)])
    def test_of_forward_and_backward_equals_a_loop(self, cpu_implementation, in_axes):
        self.check(cpu_implementation, in_axes)

    @pytest.mark.gpu
    def test_of_compiled_kernels_equals_a_loop(self):
        self.check("triton", (0, None, None, 0))

    def check(self, implementation, in_axes):
        mapped = 3
        inputs = [
            x if axis is None else jnp.stack([x * (1 + i) for i in range(mapped)], axis)
            for x, axis in zip(make_inputs(66, 70, batch=2, heads=4, kv_heads=2, depth=32), in_axes, strict=True)
        ]
        run = forward_and_backward(implementation, is_causal=True)
        got = jax.jit(jax.vmap(run, in_axes))(*inputs)
        for i in range(mapped):
            at = [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(inputs, in_axes, strict=True)]
            for name, expected in run(*at)._asdict().items():
                assert relative_error(getattr(got, name)[i], expected) <= 1e-6, name

    def test_of_bias_and_lengths(self):
        inputs = make_inputs(17, 19, batch=1, heads=2, kv_heads=1, depth=16)
        bias, lengths = normal(9, 2, 1, 2, 17, 19), jnp.array([[7], [19]])

        def run(bias, lengths):
            options = dict(bias=bias, key_value_seq_lengths=lengths)
            return attend_and_grads("triton-interpreted", *inputs, **options)

        with using("triton-interpreted"):
            got = jax.vmap(run)(bias, lengths)
        for i in range(2):
            expected = exact(*inputs, bias=bias[i], key_value_seq_lengths=lengths[i])
            for name, x in expected._asdict().items():
                assert relative_error(getattr(got, name)[i], x) <= 0.04, name

    def test_nested(self, cpu_implementation):
        if cpu_implementation == "xla" and tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
            pytest.skip("XLA of jax 0.10 crashes on a CPU, in products with this many batch axes")
        inputs = [x.reshape(2, 2, 2, *x.shape[1:]) for x in make_inputs(5, 7, batch=8, heads=2, kv_heads=1, depth=8)]
        run = forward_and_backward(cpu_implementation)
        got = jax.jit(jax.vmap(jax.vmap(run)))(*inputs)
        for i in range(2):
            for j in range(2):
                for name, expected in run(*(x[i, j] for x in inputs))._asdict().items():
                    assert relative_error(getattr(got, name)[i, j], expected) <= 1e-6, name

    def test_of_the_unbatched_form(self):
        inputs = make_inputs(5, 7, batch=3, heads=2, kv_heads=1, depth=8)
        run = forward_and_backward("xla")
        for a, b in zip(jax.jit(jax.vmap(run))(*inputs), run(*inputs), strict=True):
            assert relative_error(a, b) <= 3e-3

    def test_jacrev(self):
        q, k, v, _ = make_inputs(4, 4, batch=1, heads=1, kv_heads=1, depth=8)
        sage = jax.jit(jax.jacrev(lambda q: attention(q, k, v, implementation="xla")))(q)
        assert relative_error(sage, jax.jacrev(lambda q: exact_attention(q, k, v)[0])(q)) <= 0.03


class TestResidual:
    def test_is_the_log_sum_exp_of_jax(self, cpu_implementation):
        q, k, v, dout = make_inputs(130, 140, depth=64)
        k = k.at[..., 2].add(4)
        out, lse = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True, implementation="xla")
        got = forward_and_backward(cpu_implementation, is_causal=True)(q, k, v, dout)
        assert got.lse.shape == lse.shape == q.shape[:3]
        # Of logits whose deviation is 1, rounded to 1/127 of their largest.
        assert jnp.abs(got.lse - lse).max() <= 0.05
        assert relative_error(got.lse, lse) <= 0.005

    @pytest.mark.parametrize(
        "config",
        [
            SageConfig(),
            SageConfig(smooth_k=False, sixteen_bit=("qk", "dq")),
            SageConfig.precise(),
        ],
        ids=["default", "unsmoothed", "precise"],
    )
    def test_gradients_through_it(self, cpu_implementation, config):
        self.check_gradients(cpu_implementation, config)

    @pytest.mark.gpu
    def test_gradients_through_it_of_compiled_kernels(self):
        self.check_gradients("triton", SageConfig())

    def test_gradients_through_it_of_one_key(self, cpu_implementation):
        # All that reaches Q and K then, as the softmax is constant.
        self.check_gradients(cpu_implementation, SageConfig(), keys=1)

    def check_gradients(self, implementation, config, keys=140):
        q, k, v, dout = make_inputs(130, keys, depth=64)
        k = k.at[..., 2].add(4)
        dlse = normal(9, 2, 130, 6)

        def gradients(call):
            return jax.jit(lambda *x: jax.vjp(call, *x[:3])[1](x[3:]))(q, k, v, dout, dlse)

        with using(implementation) as name:
            got = gradients(lambda *x: attention(*x, implementation=name, return_residual=True, config=config))
        expected = gradients(exact_attention)
        for name, a, b in zip(("dq", "dk", "dv"), got, expected, strict=True):
            assert relative_error(a, b) <= 0.03, name

    def test_gradient_of_it_alone(self, cpu_implementation):
        q, k, v, _ = make_inputs(70, 65, batch=1, heads=2, kv_heads=1, depth=32)
        weights = normal(9, 1, 70, 2)

        def lse(*inputs):
            with using(cpu_implementation) as name:
                return attention(*inputs, implementation=name, return_residual=True)[1]

        dq, dk, dv = jax.jit(jax.grad(lambda *x: jnp.sum(lse(*x) * weights), argnums=(0, 1, 2)))(q, k, v)
        expected = jax.grad(lambda *x: jnp.sum(exact_attention(*x)[1] * weights), argnums=(0, 1, 2))(q, k, v)
        assert relative_error(dq, expected[0]) <= 0.03 and relative_error(dk, expected[1]) <= 0.03
        assert not dv.any()

    def test_joins_two_halves_of_the_keys(self):
        # What ring attention does with it: softmax over all keys from softmax over parts.
        q, k, v, dout = make_inputs(66, 128, depth=32)
        run = forward_and_backward("xla")
        parts = [run(q, k[:, half], v[:, half], dout) for half in (slice(0, 50), slice(50, 128))]
        weights = jax.nn.softmax(jnp.stack([x.lse for x in parts]), axis=0)[..., None]
        joined = sum(weights[i] * parts[i].out for i in range(2))
        assert relative_error(joined, exact(q, k, v, dout).out) <= 0.02


class TestScale:
    def test_traced_equals_static(self, cpu_implementation):
        *inputs, dout = make_inputs(66, 70, depth=32)

        def call(scale, *inputs):
            with using(cpu_implementation) as name:
                return attention(*inputs, implementation=name, scale=scale, return_residual=True)

        out, lse = jax.jit(call)(jnp.float32(0.25), *inputs)
        static = forward_and_backward(cpu_implementation, scale=0.25)(*inputs, dout)
        assert relative_error(out, static.out) <= 1e-3 and relative_error(lse, static.lse) <= 1e-4

    def test_its_gradient(self):
        *inputs, _ = make_inputs(130, 140, depth=32)
        douts = normal(9, 12, 2, 130, 6, 32)

        def gradients(call):
            _, vjp = jax.vjp(lambda scale: call(*inputs, scale=scale), jnp.float32(0.3))
            return jax.vmap(lambda dout: vjp(dout)[0])(douts)

        got = gradients(functools.partial(attention, implementation="xla"))
        expected = gradients(lambda *x, **options: exact_attention(*x, **options)[0])
        assert got.shape == (12,) and cosine(got, expected) >= 0.99
        assert relative_error(got, expected) <= 0.1

    @pytest.mark.parametrize("scale", [0.0, 1, 2.5])
    def test_any_number(self, scale):
        *inputs, dout = make_inputs(66, 70, depth=32)
        got = forward_and_backward("xla", scale=scale)(*inputs, dout)
        expected = exact(*inputs, dout, scale=scale)
        assert relative_error(got.out, expected.out) <= 0.05
        assert relative_error(got.dv, expected.dv) <= 0.05
        if not scale:
            assert not as_float64(got.dq).any() and not as_float64(got.dk).any()

    @pytest.mark.parametrize(
        "scale",
        [
            np.float64(0.5),
            fractions.Fraction(1, 2),
            np.array(0.5),
            [0.5],
            np.full((1, 1, 1, 1), 0.5, np.float16),
            jnp.full(1, 0.5, jnp.bfloat16),
            jnp.float8_e4m3fn(0.5),
        ],
        ids=repr,
    )
    def test_any_kind_of_real_number(self, scale):
        *inputs, _ = make_inputs(3, 5, depth=8)
        got = attention(*inputs, scale=scale, implementation="xla")
        # A power of two, so that no rounding of the query tells a number from an array.
        assert relative_error(got, attention(*inputs, scale=0.5, implementation="xla")) <= 1e-5

    @pytest.mark.parametrize(("kind", "scale"), [(np.int32, 1), (np.uint8, 2), (np.int64, -1)])
    def test_integers_in_arrays(self, kind, scale):
        *inputs, _ = make_inputs(3, 5, depth=8)
        got = attention(*inputs, scale=np.array(scale, kind), implementation="xla")
        assert relative_error(got, attention(*inputs, scale=scale, implementation="xla")) <= 1e-3


class TestCompilation:
    def compilations(self, caplog, function, inputs, calls):
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            for _ in range(calls):
                function(*inputs)
        return [x for x in caplog.messages if x.startswith("Compiling")]

    @pytest.mark.parametrize("implementation", COMPILED)
    def test_twenty_jitted_steps_are_compiled_once(self, caplog, implementation):
        *inputs, dout = make_inputs(5, 7, depth=8)
        step = jax.jit(jax.value_and_grad(loss_of(implementation, dout, is_causal=True), argnums=(0, 1, 2)))
        [compiled] = self.compilations(caplog, step, inputs, 20)
        assert "jit(loss)" in compiled

    @pytest.mark.parametrize("passes", ["forward", "forward and backward"])
    def test_twenty_calls_outside_jit_are_compiled_once(self, caplog, passes):
        *inputs, dout = make_inputs(5, 7, depth=8)
        call = functools.partial(attention, implementation="xla")
        call = call if passes == "forward" else jax.grad(loss_of("xla", dout))
        call(*inputs)
        assert self.compilations(caplog, call, inputs, 19) == []

    @pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
    @pytest.mark.parametrize("keys", [7, 128, 200])
    @pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
    def test_none_picks_by_the_platform_that_is_lowered_for(self, platform, keys, is_causal):
        q, k, v, _ = make_inputs(5, keys, depth=8)
        traced = jax.jit(lambda *x: attention(*x, is_causal=is_causal)).trace(q, k, v)
        try:
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        except RuntimeError as error:
            assert platform == "cuda" and "No supported GPU" in str(error)
            pytest.skip("this JAX lowers kernels only for a GPU that is present or described")
        assert text.count('name = "sagebwd_forward"') == (platform == "cuda")

    def test_one_device_is_not_partitioned(self):
        *inputs, dout = make_inputs(5, 7, depth=8)
        with using("triton-interpreted"):
            text = str(jax.make_jaxpr(jax.grad(loss_of("triton-interpreted", dout)))(*inputs))
        assert "pallas_call" in text
        for name in ("custom_partitioning", "shard_map", "pcast", "reshard"):
            assert name not in text

    @pytest.mark.parametrize("implementation", COMPILED)
    def test_prints_nothing(self, capfd, implementation):
        *inputs, dout = make_inputs(5, 7, depth=8)
        run = forward_and_backward(implementation)
        for step in range(100):
            jax.block_until_ready(run(*inputs, dout))
            if step == 0 and implementation == "triton":
                # What XLA says of a GPU as it compiles is its own.
                capfd.readouterr()
        assert capfd.readouterr() == ("", "")

    def test_none_on_a_cpu_is_xla(self):
        *inputs, dout = make_inputs(5, 7, depth=8)
        if jax.default_backend() != "cpu":
            pytest.skip("picks the kernels here")
        assert_bitwise(
            list(forward_and_backward(None)(*inputs, dout)), list(forward_and_backward("xla")(*inputs, dout))
        )
        assert_usable(forward_and_backward(None)(*inputs, dout), exact(*inputs, dout))
