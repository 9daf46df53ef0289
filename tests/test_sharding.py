"""Attention over a mesh: the numbers of one device, and nothing gathered that batch or heads keep apart."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import make_inputs, normal, relative_error, using
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sagebwd_jax import _sharding, attention

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
COLLECTIVE = r"\b(?:all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
multi_device = pytest.mark.usefixtures("eight_devices")


def make_mesh(kind="auto"):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(KINDS[kind],) * 2)


def inputs():
    return make_inputs(70, 66, batch=4, heads=4, kv_heads=2, depth=32)


def forward(implementation):
    """(query, key, value) -> output."""

    def run(*inputs):
        with using(implementation) as name:
            return attention(*inputs, implementation=name, is_causal=True)

    return run


def both_passes(implementation, **options):
    """(query, key, value, dout) -> output, log-sum-exp and three gradients."""

    def run(query, key, value, dout):
        with using(implementation) as name:
            call = functools.partial(attention, implementation=name, is_causal=True, return_residual=True, **options)
            (out, lse), vjp = jax.vjp(call, query, key, value)
            return out, lse, *vjp((dout, jnp.ones_like(lse)))

    return run


def masked_inputs(bias_shape=(1, 4, 70, 66)):
    """query, key, value, dout, and segment ids, a bias and a mask."""
    segments = jnp.arange(70)[None, :] // jnp.array([[70], [30], [25], [20]])
    return *inputs(), segments, normal(9, *bias_shape), normal(8, 4, 1, 1, 66) > -1


def masked_both_passes(implementation):
    """The arrays of masked_inputs() -> output and the gradients of query, key, value and bias."""

    def run(query, key, value, dout, segments, bias, mask):
        with using(implementation) as name:

            def call(query, key, value, bias):
                ids = dict(query_segment_ids=segments, key_value_segment_ids=segments[:, :66])
                return attention(query, key, value, bias, mask, implementation=name, **ids)

            out, vjp = jax.vjp(call, query, key, value, bias)
            return out, *vjp(dout)

    return run


@functools.cache
def on_one_device(implementation):
    return jax.jit(both_passes(implementation))(*inputs())


@functools.cache
def masked_on_one_device(implementation, bias_shape=(1, 4, 70, 66)):
    return jax.jit(masked_both_passes(implementation))(*masked_inputs(bias_shape))


def compile_for(mesh, function, arrays, specs):
    """The compiled function, and what it makes of the arrays when they lie so."""
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*arrays).compile()
    return compiled, compiled(*arrays)


def collectives(compiled):
    return [line.strip() for line in compiled.as_text().splitlines() if re.search(COLLECTIVE, line)]


def assert_close(got, expected, bound=1e-6):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert relative_error(a, b) <= bound, index


@multi_device
class TestPlainJit:
    @pytest.mark.parametrize("kind", KINDS)
    def test_batch_and_heads_stay_apart(self, cpu_implementation, kind):
        spec = P("x", None, "y")
        compiled, got = compile_for(make_mesh(kind), both_passes(cpu_implementation), inputs(), (spec,) * 4)
        assert collectives(compiled) == []
        for x, of in ((x, spec) for x in got):
            assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, P(*of)), x.ndim)
        assert_close(got, on_one_device(cpu_implementation))

    def test_heads_that_do_not_divide_the_keys_heads(self):
        # Four shards of four query heads for two key heads.
        specs = P("y", None, "x"), P("y"), P("y"), P("y", None, "x")
        _, got = compile_for(make_mesh(), both_passes("triton-interpreted"), inputs(), specs)
        assert_close(got, on_one_device("triton-interpreted"))

    def test_time_and_channels_are_gathered(self):
        specs = P(None, "y", None, "x"), P(None, "y"), P()
        compiled, got = compile_for(make_mesh("explicit"), forward("triton-interpreted"), inputs()[:3], specs)
        assert collectives(compiled)
        assert_close([got], on_one_device("triton-interpreted")[:1])

    def test_the_platform_may_choose(self):
        compiled, got = compile_for(make_mesh(), both_passes(None), inputs(), (P("x", None, "y"),) * 4)
        assert collectives(compiled) == []
        assert_close(got, on_one_device("xla"))

    def test_checkpoint(self):
        def loss(*inputs):
            return jnp.sum(jax.checkpoint(forward("triton-interpreted"))(*inputs) ** 2)

        gradients = jax.grad(loss, argnums=(0, 1, 2))
        with using("triton-interpreted"):
            compiled, got = compile_for(make_mesh(), gradients, inputs()[:3], (P("x", None, "y"),) * 3)
            expected = jax.jit(gradients)(*inputs()[:3])
        assert collectives(compiled) == []
        assert_close(got, expected)

    def test_vmap(self):
        query, key, value, dout = (x[:2] for x in inputs())
        query, dout = (jnp.stack([x * (1 + i) for i in range(4)]) for x in (query, dout))
        run = jax.vmap(both_passes("triton-interpreted"), (0, None, None, 0))
        specs = P("x", None, None, "y"), P(None, None, "y"), P(None, None, "y"), P("x", None, None, "y")
        compiled, got = compile_for(make_mesh(), run, (query, key, value, dout), specs)
        assert collectives(compiled) == []
        assert_close(got, jax.jit(run)(query, key, value, dout))

    @pytest.mark.slow
    def test_nested_vmap(self):
        arrays = [x.reshape(2, 1, 2, *x.shape[1:]) for x in inputs()[:3]]
        run = jax.vmap(jax.vmap(forward("triton-interpreted")))
        compiled, got = compile_for(make_mesh(), run, arrays, (P("y", None, None, None, None),) * 3)
        assert collectives(compiled) == []
        assert_close([got.reshape(4, *got.shape[3:])], on_one_device("triton-interpreted")[:1])


@multi_device
class TestMasks:
    """Masks lie where batch and heads do; a bias that devices share gets its gradient from all of them."""

    @pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
    def test_agree_with_one_device(self, cpu_implementation, kind):
        self.check(cpu_implementation, kind, (1, 4, 70, 66), P(None, "y"))

    # By batch, by head, by neither: devices add up what is theirs of the gradient, and gather nothing.
    @pytest.mark.parametrize(("shape", "spec"), [((4, 1, 70, 66), P("x")), ((70, 66), P())], ids=str)
    @pytest.mark.parametrize("kind", [pytest.param("auto"), pytest.param("explicit", marks=pytest.mark.slow)])
    def test_a_bias_that_heads_share(self, kind, shape, spec):
        self.check("triton-interpreted", kind, shape, spec)

    def check(self, implementation, kind, shape, spec):
        specs = *[P("x", None, "y")] * 4, P("x"), spec, P("x")
        compiled, got = compile_for(make_mesh(kind), masked_both_passes(implementation), masked_inputs(shape), specs)
        # With explicit axes ids and masks of keys are wanted whole, for a search.
        assert not [line for line in collectives(compiled) if not re.search(r"all-reduce|(s32|pred)\[4,\d+\]", line)]
        assert_close(got, masked_on_one_device(implementation, shape), 1e-5)

    def test_in_a_checked_shard_map(self):
        # The bias is every row's of devices, so that its gradient is the sum over them.
        split = P("x", None, "y")
        specs = *[split] * 4, P("x"), P(None, "y"), P("x")
        outputs = *[split] * 4, P(None, "y")
        run = jax.shard_map(masked_both_passes("xla"), mesh=make_mesh(), in_specs=specs, out_specs=outputs)
        assert_close(jax.jit(run)(*masked_inputs()), masked_on_one_device("xla"), 1e-5)


@multi_device
class TestShardMap:
    SPEC = P("x", None, "y")

    def run(self, implementation, specs, **options):
        outputs = specs[3], P(specs[3][0], None, *specs[3][2:]), *specs[:3]
        return jax.shard_map(
            both_passes(implementation), mesh=make_mesh(), in_specs=specs, out_specs=outputs, **options
        )

    def test_with_its_checks(self):
        assert_close(jax.jit(self.run("xla", (self.SPEC,) * 4))(*inputs()), on_one_device("xla"))

    def test_kernels_without_them(self):
        # Pallas' interpreter mixes constants with values that vary, which these checks refuse.
        run = jax.jit(self.run("triton-interpreted", (self.SPEC,) * 4, check_vma=False))
        assert_close(run(*inputs()), on_one_device("triton-interpreted"))

    def test_types_of_kernels_are_checked(self):
        # Traced with the checks, where the types of all results must say over which axes they vary.
        for key_spec in (self.SPEC, P("x")):
            arrays = inputs() if key_spec == self.SPEC else make_inputs(70, 66, batch=4, heads=4, kv_heads=1, depth=32)
            run = self.run("triton-interpreted", (self.SPEC, key_spec, key_spec, self.SPEC))
            got = jax.eval_shape(run, *arrays)
            assert [x.shape for x in got[2:]] == [x.shape for x in arrays[:3]]

    def test_keys_that_all_devices_share_sum_their_gradients(self):
        arrays = make_inputs(70, 66, batch=4, heads=2, kv_heads=1, depth=32)
        got = jax.jit(self.run("xla", (self.SPEC, P("x"), P("x"), self.SPEC)))(*arrays)
        assert_close(got, jax.jit(both_passes("xla"))(*arrays))

    def test_over_some_axes_of_the_mesh(self, cpu_implementation):
        checked = cpu_implementation == "xla"
        run = self.run(cpu_implementation, (P("x", None, None),) * 4, axis_names={"x"}, check_vma=checked)
        assert_close(jax.jit(run)(*inputs()), on_one_device(cpu_implementation))


@multi_device
class TestDecode:
    @pytest.mark.parametrize("shape", [(4, 2), (2, 3), (8,), (1, 6)], ids=str)
    def test_is_what_the_sharding_says(self, shape):
        names = "xy"[: len(shape)]
        count = functools.reduce(lambda a, b: a * b, shape)
        mesh = jax.make_mesh(
            shape, tuple(names), devices=jax.devices()[:count], axis_types=(AxisType.Auto,) * len(shape)
        )
        refined = _sharding._refine(mesh)
        assert list(refined.devices.flat) == list(mesh.devices.flat)
        for spec in [P(), P("x"), P(None, names[-1]), P(tuple(names)), P(tuple(reversed(names))), P(*names)]:
            sharding = NamedSharding(mesh, spec)
            decoded = NamedSharding(refined, _sharding._decode(sharding, (24, 24), refined))
            assert decoded.devices_indices_map((24, 24)) == sharding.devices_indices_map((24, 24))
