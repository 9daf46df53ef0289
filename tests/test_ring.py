"""Ring attention over eight parts of a sequence: what one device makes of the whole, forward and backward."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import Attended, assert_usable, assert_within, exact, make_inputs, normal, oracle, relative_error, using
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sagebwd_jax import RESIDUAL_NAMES, SageConfig, attention, ring_attention

pytestmark = pytest.mark.usefixtures("eight_devices")
PARTS = P(None, "seq")


def make_mesh(devices=4):
    return jax.make_mesh((devices,), ("seq",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))


def ring(implementation, mesh=None, spec=PARTS, **options):
    """(query, key, value) -> output, of whole sequences, by ring attention over their parts."""

    def run(query, key, value):
        with using(implementation) as name:
            call = functools.partial(ring_attention, axis_name="seq", implementation=name, **options)
            # Pallas' interpreter mixes constants with values that vary, which a checked shard_map refuses.
            check = implementation != "triton-interpreted"
            parts = jax.shard_map(call, mesh=mesh or make_mesh(), in_specs=(spec,) * 3, out_specs=spec, check_vma=check)
            return parts(query, key, value)

    return run


def both_passes(function):
    def run(query, key, value, dout):
        out, vjp = jax.vjp(function, query, key, value)
        return Attended(out, jnp.zeros(()), *vjp(dout))

    return jax.jit(run)


def inputs(**options):
    """Keys with a mean, so that what smoothing takes matters."""
    q, k, v, dout = make_inputs(160, 160, batch=1, heads=4, kv_heads=2, depth=32, **options)
    return q, k.at[..., 3].add(8), v, dout


@functools.cache
def shared(implementation, is_causal):
    """Both passes of the default, compiled once for all tests."""
    return both_passes(ring(implementation, is_causal=is_causal))


class TestNumbers:
    # Causal has a causal part and whole ones, so it is enough for the kernels.
    @pytest.mark.parametrize(
        ("implementation", "is_causal"), [("xla", False), ("xla", True), ("triton-interpreted", True)]
    )
    def test_are_those_of_one_device(self, implementation, is_causal):
        with using(implementation):
            got = shared(implementation, is_causal)(*inputs())
        assert_usable(got, exact(*inputs(), is_causal=is_causal))
        # The quantised algorithm differs in V's scales alone, and in what is rounded with whom.
        assert_within(got, oracle(*inputs(), is_causal=is_causal), out=0.02, dq=0.025, dk=0.025, dv=0.025)

    @pytest.mark.parametrize("config", [SageConfig.precise(), SageConfig.mixed()], ids=["precise", "mixed"])
    def test_of_other_configs(self, config):
        arrays = inputs(dtype=jnp.bfloat16)
        got = both_passes(ring("xla", is_causal=True, config=config))(*arrays)
        assert [x.dtype for x in (got.out, got.dq, got.dk, got.dv)] == [jnp.bfloat16] * 4
        assert_usable(got, exact(*arrays, is_causal=True))

    def test_without_smoothing_and_with_more_keys_than_queries(self):
        arrays = make_inputs(32, 160, batch=1, heads=4, kv_heads=2, depth=32)
        got = both_passes(ring("xla", config=SageConfig(smooth_k=False)))(*arrays)
        assert_usable(got, exact(*arrays))

    def test_of_one_part_are_those_of_attention(self):
        got = both_passes(ring("xla", make_mesh(1), is_causal=True, scale=0.3))(*inputs())
        expected = both_passes(functools.partial(attention, implementation="xla", is_causal=True, scale=0.3))(*inputs())
        assert_within(got, expected, out=1e-4, dq=1e-3, dk=1e-3, dv=1e-3)

    def test_with_a_batch_axis_of_the_mesh_and_without_one_of_the_arrays(self):
        q, k, v, _ = make_inputs(64, 64, batch=2, heads=2, kv_heads=1, depth=32)
        mesh = jax.make_mesh((2, 4), ("batch", "seq"), axis_types=(AxisType.Auto,) * 2)
        expected = exact(q, k, v, q).out
        assert relative_error(jax.jit(ring("xla", mesh, P("batch", "seq")))(q, k, v), expected) <= 0.03
        assert relative_error(jax.jit(ring("xla", mesh, P("seq")))(q[0], k[0], v[0]), expected[0]) <= 0.03

    def test_with_a_traced_scale(self):
        q, k, v, dout = inputs()

        def loss(scale):
            return jnp.sum(ring("xla", scale=scale)(q, k, v) * dout)

        def exact_loss(scale):
            return jnp.sum(jax.nn.dot_product_attention(q * (scale * 32**0.5), k, v) * dout)

        got, expected = (jax.jit(jax.value_and_grad(f))(jnp.float32(0.25)) for f in (loss, exact_loss))
        assert relative_error(got[0], expected[0]) <= 0.1 and relative_error(got[1], expected[1]) <= 0.1


class TestNotFinite:
    def test_is_never_laundered_and_stays_in_its_head(self):
        q, k, v, dout = inputs()
        got = shared("xla", True)(q, k.at[0, 50, 0, 0].set(jnp.nan), v, dout)
        whole = shared("xla", True)(q, k, v, dout)
        # Key head 0 serves query heads 0 and 1.
        assert not jnp.isfinite(got.out[0, 50:, :2]).any()
        for a, b, heads in (
            (got.out, whole.out, 2),
            (got.dq, whole.dq, 2),
            (got.dk, whole.dk, 1),
            (got.dv, whole.dv, 1),
        ):
            assert relative_error(a[:, :, heads:], b[:, :, heads:]) <= 1e-6


class TestCommunicationAndMemory:
    def compiled(self, devices, **options):
        shapes = [jax.ShapeDtypeStruct((1, 128 * devices, heads, 32), jnp.float32) for heads in (2, 1, 1, 2)]
        run = both_passes(ring("xla", make_mesh(devices), is_causal=True, **options))
        return run.lower(*shapes).compile()

    def test_a_device_holds_its_part_whatever_their_number(self):
        two, eight = self.compiled(2), self.compiled(8)
        assert eight.memory_analysis().temp_size_in_bytes <= 1.1 * two.memory_analysis().temp_size_in_bytes
        # Nothing of a whole sequence, 1024 tokens.
        assert not re.findall(r"\[[\d,]*\b1024\b[\d,]*\]", eight.as_text())

    def test_only_neighbours_speak(self):
        text = self.compiled(4).as_text()
        assert "collective-permute(" in text
        assert "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}" in text
        assert not re.search(r"\b(all-gather|all-to-all|reduce-scatter)(-start)?\(", text)
        # K's mean, and nothing larger.
        assert set(re.findall(r"= f32\[([\d,]+)\]\S* all-reduce\(", text)) == {"1,1,32"}

    def test_checkpoint_saves_the_ring(self):
        names = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

        def permutes(policy):
            def loss(*inputs):
                return jnp.sum(jax.checkpoint(ring("xla"), policy=policy)(*inputs))

            return str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*inputs()[:3])).count("= ppermute[")

        # Forward K and V before and in the loop; backward these, dK and dV in the loop, and dK and dV after it.
        assert (permutes(names), permutes(None)) == (12, 16)


class TestRefusals:
    def test_causal_parts_of_unequal_lengths(self):
        q, k, v, _ = make_inputs(64, 128, batch=1, heads=2, kv_heads=1, depth=32)
        with pytest.raises(ValueError, match=r"is_causal.*query \(1, 16, 2, 32\) and key \(1, 32, 1, 32\)"):
            jax.eval_shape(ring("xla", is_causal=True), q, k, v)

    def test_an_axis_that_is_none(self):
        q, k, v, _ = make_inputs(64, 64, batch=1, heads=2, kv_heads=1, depth=32)
        with pytest.raises(ValueError, match="axis_name='seq'.*shard_map"):
            ring_attention(q, k, v, axis_name="seq", implementation="xla")

    def test_what_attention_refuses(self):
        q, k, v, _ = make_inputs(64, 64, batch=1, heads=2, kv_heads=1, depth=32)
        with pytest.raises(TypeError, match="query has dtype int8"):
            ring_attention(*(x.astype(jnp.int8) for x in (q, k, v)), axis_name="seq")
        with pytest.raises(ValueError, match="one batch size"):
            ring_attention(q, *(jnp.concatenate([x, x]) for x in (k, v)), axis_name="seq")
        with pytest.raises(TypeError, match="config='mixed'"):
            ring_attention(q, k, v, axis_name="seq", config="mixed")
        with pytest.raises(TypeError, match="scale='a' is a str"):
            ring_attention(q, k, v, axis_name="seq", scale="a")
        with pytest.raises(TypeError, match="is_causal='no' is a str"):
            ring_attention(q, k, v, axis_name="seq", is_causal="no")
        with pytest.raises(TypeError, match="mask"):
            ring_attention(q, k, v, axis_name="seq", mask=normal(0, 1, 1, 64, 64) > 0)

    def test_nothing_to_attend_to(self):
        q, k, v, _ = make_inputs(8, 0, batch=1, heads=2, kv_heads=1, depth=32)
        assert not jax.jit(ring("xla"))(q, k, v).any()
