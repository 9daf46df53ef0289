"""The Hopper kernels: which calls they take, and on such a GPU what they give, in bfloat16, which alone they read."""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Results, assert_within, call_spec, forward_and_backward, make_inputs, oracle, relative_error

from pallas_kernels import attention as kernels
from pallas_kernels import launch
from pallas_kernels.hopper import tiles
from sagebwd_jax import SageConfig, attention
from sagebwd_jax.reference import exact_attention_and_grads

CONFIGS = {
    "default": SageConfig(),
    "mixed": SageConfig.mixed(),
    "a scale a block of queries": SageConfig(query_scale="block", dout_scale="block"),
    "dK in 16 bits": SageConfig(sixteen_bit={"dk"}),
}
# What results in bfloat16 lose by that alone is 1.7e-3; scores at a tie are rounded either way.
BOUND = dict.fromkeys(("out", "dq", "dk", "dv"), 4e-3)
# The kernel of all three gradients hands dS on in bfloat16, of which more is rounded to the other side.
BOUND_QKV = BOUND | dict(dq=1e-2)


def bound(config, depth):
    return BOUND_QKV if depth == 64 and not config.sixteen_bit else BOUND


@pytest.fixture
def hopper(monkeypatch):
    """As if calls were compiled for a Hopper GPU."""
    for module in (launch, tiles):
        monkeypatch.setattr(module, "target_capability", lambda: tiles.CAPABILITY)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


def like(depth=128, dtype=jnp.bfloat16, heads=2):
    return jax.ShapeDtypeStruct((1, 256, heads, depth), dtype)


def _pad(x):
    """Zeros after the last token up to the next 128, as kernels get their inputs."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 128), (0, 0), (0, 0)))


def find(kernel, spec, *tensors, dtype=jnp.bfloat16):
    return tiles.find(kernel, spec, None, dtype, *(tensors or [like(dtype=dtype)]))


class TestWhichCalls:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize(
        "kernel,config",
        [
            ("forward", SageConfig()),
            ("grad_v", SageConfig()),
            ("grad_k", SageConfig()),
            ("grad_q", SageConfig()),
            ("grad_kv_16", SageConfig.mixed()),
            ("grad_q_16", SageConfig.mixed()),
        ],
    )
    def test_depth_128_in_bfloat16_is_taken(self, hopper, kernel, config, is_causal):
        assert find(kernel, call_spec(config=config, is_causal=is_causal)) is not None

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_one_kernel_makes_all_gradients_of_64_channels(self, hopper, is_causal):
        spec = call_spec(depth=64, is_causal=is_causal)
        assert find("grad_qkv", spec, like(depth=64)) is not None
        for changes in (dict(dv_span=128), dict(dk_span=128), dict(dq_span=128), dict(sixteen_bit={"dk"})):
            other = dataclasses.replace(spec, config=dataclasses.replace(spec.config, **changes))
            assert find("grad_qkv", other, like(depth=64)) is None
        # It would lose what a cotangent of the log-sum-exp adds where that of the output is 0.
        assert find("grad_qkv", dataclasses.replace(spec, differentiates_lse=True), like(depth=64)) is None
        assert find("grad_qkv", call_spec(), like()) is None

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
    def test_other_dtypes_are_not(self, hopper, dtype):
        assert find("forward", call_spec(), dtype=dtype) is None

    @pytest.mark.parametrize("config", ["default", "mixed"])
    def test_float32_runs_on_triton_although_its_operands_are_in_bfloat16(self, hopper, config):
        inputs = [like(dtype=jnp.float32)] * 4

        def run(query, key, value, dout):
            call = functools.partial(attention, implementation="triton", config=CONFIGS[config])
            return jax.vjp(call, query, key, value)[1](dout)

        assert [x.dtype for x in jax.eval_shape(run, *inputs)] == [jnp.float32] * 3
        assert "mpmd_map" not in str(jax.make_jaxpr(run)(*inputs))

    @pytest.mark.skipif(jax.__version_info__ < tiles.MIN_JAX, reason="the kernels are traced")
    @pytest.mark.parametrize(("calls", "kernels"), [(2, True), (70, False)])
    def test_more_programs_than_an_axis_holds_under_vmap_are_not(self, hopper, calls, kernels):
        run = jax.vmap(functools.partial(attention, implementation="triton"))
        inputs = [jax.ShapeDtypeStruct((calls, 1000, 128, 1, 128), jnp.bfloat16)] * 3
        text = str(jax.make_jaxpr(run)(*inputs))
        assert ("mpmd_map" in text) == kernels

    @pytest.mark.skipif(jax.__version_info__ < tiles.MIN_JAX, reason="the kernels are traced")
    def test_mapped_calls_share_no_counters_of_blocks_that_wait(self, hopper):
        def run(*inputs):
            return jax.vjp(functools.partial(attention, implementation="triton"), *inputs)[1](inputs[0])

        query = jax.ShapeDtypeStruct((3, 2, 1100, 4, 64), jnp.bfloat16)
        key = jax.ShapeDtypeStruct((3, 2, 1100, 2, 64), jnp.bfloat16)
        text = str(jax.make_jaxpr(jax.vmap(run))(query, key, key))
        counters = set(re.findall(r"semaphore\[([\d,]+)\]", text))
        assert len(counters) == 2 and all(shape.startswith("6,") for shape in counters)

    def test_other_depths_are_not(self, hopper):
        assert find("forward", call_spec(), like(depth=32)) is None

    @pytest.mark.parametrize(
        "kernel,config",
        [
            ("forward", SageConfig.faithful()),
            ("forward", SageConfig.precise()),
            ("forward", SageConfig(pv_span=64)),
            ("forward", SageConfig(key_scale="token")),
            ("grad_v", SageConfig(dv_span=64)),
            ("grad_k", SageConfig(dk_span=128)),
            ("grad_q", SageConfig(dq_span=128)),
            ("grad_q_16", dataclasses.replace(SageConfig.mixed(), dq_span=128)),
        ],
    )
    def test_other_scales_and_spans_are_not(self, hopper, kernel, config):
        assert find(kernel, call_spec(config=config)) is None

    @pytest.mark.parametrize("depth", [64, 128])
    @pytest.mark.parametrize("config", ["default", "mixed", "dK in 16 bits"])
    def test_inputs_are_rounded_by_one_kernel(self, hopper, config, depth):
        inputs = [like(depth=depth, heads=4), like(depth=depth)]
        spec = call_spec(depth=depth, config=CONFIGS[config])
        assert tiles.takes_inputs(spec, None, *inputs)
        assert not tiles.takes_inputs(spec, object(), *inputs)
        other_block = SageConfig(block_k=64, pv_span=64)
        assert tiles.takes_inputs(call_spec(depth=depth, config=other_block), None, *inputs)
        for other in (CONFIGS["a scale a block of queries"], SageConfig.faithful(), SageConfig.precise()):
            assert not tiles.takes_inputs(call_spec(depth=depth, config=other), None, *inputs)
        assert not tiles.takes_inputs(call_spec(depth=depth), None, *[like(depth=depth, dtype=jnp.float32)] * 2)
        assert not tiles.takes_inputs(call_spec(depth=32), None, *[like(depth=32)] * 2)

    def test_inputs_of_more_blocks_than_fit_at_once_are_not(self, hopper, monkeypatch):
        spec, inputs = call_spec(512, 512), [jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)] * 2
        for cores, takes in ((4, True), (3, False)):
            monkeypatch.setattr(tiles, "target_cores", lambda cores=cores: cores)
            assert tiles.takes_inputs(spec, None, *inputs) == takes
        long = [jax.ShapeDtypeStruct((1, 32768, 2, 128), jnp.bfloat16)] * 2
        monkeypatch.setattr(tiles, "target_cores", lambda: 132)
        assert not tiles.takes_inputs(call_spec(32768, 32768), None, *long)

    def test_nothing_is_without_such_a_gpu(self):
        if launch.target_capability() == tiles.CAPABILITY:
            pytest.skip("there is one")
        assert find("forward", call_spec()) is None

    def test_nothing_is_by_the_interpreter(self, hopper):
        with launch.interpreted():
            assert find("forward", call_spec()) is None

    def test_nothing_is_by_an_older_jax(self, hopper, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
        assert find("forward", call_spec()) is None


@pytest.mark.parametrize("row", tiles.TABLE, ids=lambda row: f"{row.kernel}-{row.depth}-{row.is_causal}")
def test_a_block_is_not_asked_to_hold_more_registers_than_it_was_launched_with(row):
    # Groups that ask for more wait for it forever.
    hopper_launch = pytest.importorskip("pallas_kernels.hopper.launch", exc_type=ImportError)
    registers = [hopper_launch.REGISTERS[row.groups]] * row.groups
    if row.kernel == "grad_qkv":
        kernel = importlib.import_module("pallas_kernels.hopper.grad_qkv")
        assert row.groups == kernel.OWNERS
        registers = [kernel.OWNER_REGISTERS] * row.groups + [kernel.SUM_REGISTERS]
    registers.append(hopper_launch.COPY_REGISTERS)
    threads = 128 * len(registers)
    launched = min(65536 // threads // 8 * 8, 255) * threads
    assert 128 * sum(registers) <= launched


@pytest.mark.gpu
@pytest.mark.skipif("not tiles.available()", reason="needs a Hopper GPU and JAX 0.11")
class TestResults:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("depth", [64, 128])
    @pytest.mark.parametrize("config", CONFIGS)
    def test_agree_with_the_oracle(self, config, depth, is_causal):
        # A causal query that sees one key has no gradient to compare.
        shapes = (300, 700, 4, 2), (200, 1100, 2, 2), (1300, 1200, 2, 1), (700, 100, 3, 3), (1, 513, 2, 1)
        for queries, keys, heads, kv_heads in shapes[: len(shapes) - is_causal]:
            inputs = make_inputs(
                queries, keys, batch=2, heads=heads, kv_heads=kv_heads, depth=depth, dtype=jnp.bfloat16
            )
            options = dict(is_causal=is_causal, config=CONFIGS[config])
            got = forward_and_backward("triton", training=True, **options)(*inputs)
            expected = oracle(*(x.astype(jnp.float32) for x in inputs), **options)
            assert_within(got, expected, lse=2e-4, **bound(CONFIGS[config], depth))

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_of_a_call_with_log_sum_exp_agree_with_the_oracle(self, is_causal):
        # At depth 64 its gradients are made by a kernel each.
        inputs = make_inputs(300, 700, batch=2, heads=4, kv_heads=2, depth=64, dtype=jnp.bfloat16)
        got = forward_and_backward("triton", is_causal=is_causal)(*inputs)
        expected = oracle(*(x.astype(jnp.float32) for x in inputs), is_causal=is_causal)
        assert_within(got, expected, lse=2e-4, **BOUND)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("depth", [64, 128])
    @pytest.mark.parametrize("config", ["default", "mixed"])
    def test_of_programs_that_take_many_blocks_agree_with_the_oracle(self, config, depth, is_causal, monkeypatch):
        # As if there were three multiprocessors, which the caches of what was traced do not know of.
        for name in ("queries", "grad_kv", "grad_qkv"):
            module = importlib.import_module(f"pallas_kernels.hopper.{name}")
            monkeypatch.setattr(module, "target_cores", lambda: 3)
        for queries, keys in ((700, 430), (450, 700))[: 2 - is_causal]:
            sizes = dict(batch=2, heads=4, kv_heads=2, depth=depth, dtype=jnp.bfloat16)
            inputs = make_inputs(queries, keys, **sizes)
            options = dict(is_causal=is_causal, config=CONFIGS[config])
            jax.clear_caches()
            got = forward_and_backward("triton", training=True, **options)(*inputs)
            expected = oracle(*(x.astype(jnp.float32) for x in inputs), **options)
            assert_within(got, expected, lse=2e-4, **bound(CONFIGS[config], depth))
        jax.clear_caches()

    @pytest.mark.parametrize("depth", [64, 128])
    @pytest.mark.parametrize("lengths", [(700, 4500, 4, 2), (1100, 100, 3, 3), (64, 64, 1, 1)], ids=str)
    def test_inputs_are_rounded_as_by_a_kernel_for_each(self, lengths, depth):
        queries, keys, heads, kv_heads = lengths
        sizes = dict(batch=2, heads=heads, kv_heads=kv_heads, depth=depth, dtype=jnp.bfloat16)
        inputs = [_pad(x) for x in make_inputs(queries, keys, **sizes)[:3]]
        # The mean matters.
        inputs[1] = inputs[1].at[:, :keys].add(3)
        spec = call_spec(queries, keys, depth=depth, config=SageConfig.mixed())
        assert tiles.takes_inputs(spec, None, *inputs[:2])
        separate = functools.partial(kernels._quantize_inputs, visibility=None, mean=None, spec=spec, keep=True)
        expected = jax.jit(separate)(*inputs)
        joint = importlib.import_module("pallas_kernels.hopper.quantize_inputs").quantize_inputs
        got = kernels._Quantized(*jax.jit(functools.partial(joint, spec=spec, keep_16_bits=True))(*inputs))
        for name, one, other in zip(got._fields, got, expected, strict=True):
            one, other = (np.asarray(x, np.float32) for x in (one, other))
            assert one.shape == other.shape, name
            if name in ("q", "q_scale", "v", "v_scale"):
                np.testing.assert_array_equal(one, other, name)
            # K's mean is summed in another order.
            elif name == "k":
                assert np.abs(one - other).max() <= 1 and (one != other).mean() < 1e-4
            else:
                np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-5, err_msg=name)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_are_as_close_to_exact_attention_as_the_oracle(self, is_causal):
        inputs = make_inputs(1000, 1000, batch=1, heads=4, kv_heads=2, depth=64, dtype=jnp.bfloat16)
        inputs_32 = [x.astype(jnp.float32) for x in inputs]
        got = forward_and_backward("triton", training=True, is_causal=is_causal)(*inputs)
        quantized = oracle(*inputs_32, is_causal=is_causal)
        exact = exact_attention_and_grads(*inputs_32, is_causal=is_causal)
        for name in ("dq", "dk", "dv"):
            error, expected = (relative_error(getattr(x, name), getattr(exact, name)) for x in (got, quantized))
            assert error < 1.05 * expected, name

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("depth", [64, 128])
    @pytest.mark.parametrize("config", ["default", "mixed"])
    def test_are_repeatable_and_independent_of_the_batch(self, config, depth, is_causal):
        # At depth 64 blocks of 128 keys add to one dQ: more of them than run at a time must keep their turns.
        inputs = make_inputs(4500, 4500, batch=3, heads=8, kv_heads=4, depth=depth, dtype=jnp.bfloat16)
        run = forward_and_backward("triton", training=True, is_causal=is_causal, config=CONFIGS[config])
        whole, again, alone = run(*inputs), run(*inputs), run(*(x[1:2] for x in inputs))
        for name in Results._fields:
            first = np.asarray(getattr(whole, name).astype(jnp.float32))
            np.testing.assert_array_equal(first, np.asarray(getattr(again, name).astype(jnp.float32)), name)
            np.testing.assert_array_equal(first[1:2], np.asarray(getattr(alone, name).astype(jnp.float32)), name)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_of_zeros_in_q_and_dout(self, is_causal):
        inputs = make_inputs(300, 300, batch=1, heads=4, kv_heads=2, depth=64, dtype=jnp.bfloat16)
        inputs[0] = inputs[0].at[:, 20:90].set(0).at[:, :, 3].set(0)
        inputs[3] = inputs[3].at[:, 64:200].set(0).at[:, :, 1].set(0)
        got = forward_and_backward("triton", training=True, is_causal=is_causal)(*inputs)
        expected = oracle(*(x.astype(jnp.float32) for x in inputs), is_causal=is_causal)
        assert_within(got, expected, lse=2e-4, **BOUND_QKV)

    @pytest.mark.parametrize("power", [-27, 27])
    def test_scale_with_the_cotangent(self, power):
        inputs = make_inputs(300, 300, batch=1, heads=2, kv_heads=2, depth=64, dtype=jnp.bfloat16)
        run = forward_and_backward("triton", training=True, is_causal=True)
        plain, scaled = run(*inputs), run(*inputs[:3], inputs[3] * 2.0**power)
        for name in ("dq", "dk", "dv"):
            assert relative_error(getattr(scaled, name) * 2.0**-power, getattr(plain, name)) < 1e-3, name

    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("depth", [64, 128])
    @pytest.mark.parametrize("config", ["default", "mixed"])
    def test_keep_what_is_not_finite_in_its_head(self, config, depth, place):
        inputs = make_inputs(256, 256, batch=2, heads=2, kv_heads=2, depth=depth, dtype=jnp.bfloat16)
        run = forward_and_backward("triton", training=True, config=CONFIGS[config])
        clean = run(*inputs)
        inputs[place] = inputs[place].at[0, 5, 1, 3].set(jnp.nan)
        got = run(*inputs)
        assert not bool(jnp.isfinite(got.out[0, 5, 1]).all())
        for name in ("out", "dq", "dk", "dv"):
            before, after = (np.asarray(getattr(x, name).astype(jnp.float32)) for x in (clean, got))
            for head in ((0, 0), (1, 0), (1, 1)):
                np.testing.assert_array_equal(after[head[0], :, head[1]], before[head[0], :, head[1]], name)

    @pytest.mark.parametrize("depth", [64, 128])
    def test_are_those_of_a_loop_under_vmap(self, depth):
        # Blocks of a head wait for each other, and several of them.
        inputs = make_inputs(1100, 1100, batch=6, depth=depth, dtype=jnp.bfloat16)
        inputs = [x.reshape(3, 2, *x.shape[1:]) for x in inputs]

        def run(query, key, value, dout):
            call = functools.partial(attention, implementation="triton", is_causal=True)
            return jax.vjp(call, query, key, value)[1](dout)

        got = jax.jit(jax.vmap(run))(*inputs)
        for i in range(3):
            for one, expected in zip(got, jax.jit(run)(*(x[i] for x in inputs)), strict=True):
                assert relative_error(one[i], expected) == 0
