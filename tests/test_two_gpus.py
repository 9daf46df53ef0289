"""Attention over two real GPUs: the numbers of one of them, and nothing gathered that batch or heads keep apart.

tests/test_sharding.py and tests/test_ring.py have the same on eight CPU devices, tests/test_compile_kernels.py for GPUs
that are not there.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import Results, assert_bitwise, assert_usable, assert_within, exact, make_inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sagebwd_jax import SageConfig, attention, ring_attention

BATCH, HEADS, TIME = P("x"), P(None, None, "x"), P(None, "x")
COLLECTIVE = r"\b(?:all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


def inputs(depth, kv_heads=4):
    return make_inputs(1024, 1024, batch=2, heads=8, kv_heads=kv_heads, depth=depth, dtype=jnp.bfloat16)


def both_passes(function=attention, **options):
    """(query, key, value, dout) -> Results."""
    call = functools.partial(function, is_causal=True, **options)

    def run(query, key, value, dout):
        out, vjp = jax.vjp(call, query, key, value)
        return Results(out, jnp.zeros((), jnp.float32), *vjp(dout))

    return run


def over(mesh, function, arrays, specs):
    """What the function makes of arrays that lie so, and its text as compiled."""
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    return compiled(*placed), compiled.as_text()


@pytest.mark.parametrize("config", [SageConfig(), SageConfig.mixed()], ids=["default", "mixed"])
@pytest.mark.parametrize("depth", [64, 128])
class TestSplit:
    @pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
    def test_plain_jit(self, mesh, spec, depth, config):
        arrays, run = inputs(depth), both_passes(config=config)
        got, text = over(mesh, run, arrays, (spec,) * 4)
        assert "sagebwd_forward" in text and not re.search(COLLECTIVE, text)
        # A head's result does not depend on how many there are.
        assert_bitwise(got, jax.jit(run)(*arrays))
        assert_usable(got, exact(*arrays, is_causal=True))

    @pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
    def test_shard_map_with_its_checks(self, mesh, spec, depth, config):
        arrays, run = inputs(depth), both_passes(config=config)
        specs = Results(spec, P(), *(spec,) * 3)
        got, text = over(
            mesh, jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=specs), arrays, (spec,) * 4
        )
        assert "sagebwd_forward" in text and not re.search(COLLECTIVE, text)
        # There another kernel makes the gradients at depth 64, which rounds dS where this one hands it on in bfloat16.
        assert_within(got, jax.jit(run)(*arrays), out=0.0, dq=1e-2, dk=1e-2, dv=1e-2)

    def test_keys_that_both_share_sum_their_gradients(self, mesh, depth, config):
        arrays, run = inputs(depth, kv_heads=1), both_passes(config=config)
        out_specs = Results(HEADS, P(), HEADS, P(), P())
        split = jax.shard_map(run, mesh=mesh, in_specs=(HEADS, P(), P(), HEADS), out_specs=out_specs)
        got, text = over(mesh, split, arrays, (HEADS, P(), P(), HEADS))
        assert "all-reduce" in text
        assert_usable(got, exact(*arrays, is_causal=True))

    def test_ring(self, mesh, depth, config):
        arrays, run = inputs(depth), both_passes(ring_attention, axis_name="x", config=config)
        split = jax.shard_map(run, mesh=mesh, in_specs=(TIME,) * 4, out_specs=Results(TIME, P(), *(TIME,) * 3))
        got, text = over(mesh, split, arrays, (TIME,) * 4)
        assert "collective-permute" in text
        assert_usable(got, exact(*arrays, is_causal=True))
