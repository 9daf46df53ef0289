"""Memory: no score matrix, growth with the length and not its square, and what the backward pass keeps."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import make_inputs, using
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import kernel_cost
from benchmarks.gpu_targets import TARGETS
from sagebwd_jax import SageConfig, attention


def compile_gradients(length, implementation="xla", sharding=None, **options):
    """The compiled gradient of all three inputs and a cotangent, of shapes alone."""
    q, k, v, dout = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x in jax.eval_shape(lambda: make_inputs(length, length, batch=1, dtype=jnp.bfloat16, **options))
    )

    def loss(query, key, value, dout):
        out = attention(query, key, value, is_causal=True, implementation=implementation)
        return (out * dout).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v, dout).compile()


def sizes_of_buffers(compiled):
    """The axes of every array in the program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    assert shapes
    return [[int(x) for x in shape.split(",")] for shape in shapes]


@pytest.fixture(scope="module")
def compiled():
    return {length: compile_gradients(length, heads=2, kv_heads=1) for length in (2048, 4096)}


def test_no_buffer_holds_all_scores(compiled):
    sizes = sizes_of_buffers(compiled[2048])
    assert not [x for x in sizes if x.count(2048) > 1]
    # The largest is a tile of scores: every query of both heads against a span of 128 keys.
    assert max(map(math.prod, sizes)) <= 2 * 2048 * 128


def test_memory_grows_with_the_length(compiled):
    temporary = {length: x.memory_analysis().temp_size_in_bytes for length, x in compiled.items()}
    assert temporary[4096] <= 2.1 * temporary[2048]


@pytest.mark.parametrize("kv_heads", [4, 32])
def test_temporary_memory_is_a_few_times_that_of_the_inputs(kv_heads):
    # 3.8 times with JAX 0.10.2, of which 0.9 are dO in float32, which XLA makes of a 16-bit operand on a CPU; 2.6 with
    # 0.11. Scores of all queries and heads against one span were 7.4 times.
    length, heads, depth = 16384, 32, 128
    compiled = compile_gradients(length, heads=heads, kv_heads=kv_heads, depth=depth)
    of_inputs_and_output = 2 * length * depth * (2 * heads + 2 * kv_heads)
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * of_inputs_and_output


@pytest.mark.compile
@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_temporary_memory_of_the_kernels(gpu):
    # 0.72 times, little more than the residuals; keys and values repeated for all heads would be 0.8 more. From JAX
    # 0.11 on an H200 runs kernels of its own.
    length, heads, kv_heads, depth = 16384, 32, 4, 128
    mesh = topologies.make_mesh(kernel_cost._topology(TARGETS[gpu].description()), (1,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        placed = NamedSharding(mesh, PartitionSpec())
        compiled = compile_gradients(length, "triton", placed, heads=heads, kv_heads=kv_heads, depth=depth)
    of_inputs_and_output = 2 * length * depth * (2 * heads + 2 * kv_heads)
    assert compiled.memory_analysis().temp_size_in_bytes <= of_inputs_and_output
    assert not [x for x in sizes_of_buffers(compiled) if x.count(length) > 1]


def test_grouped_keys_and_values_are_not_repeated():
    # 16 query heads of 128 queries for one key head of 2048 keys: no operand is as large as K for every query head.
    q, k, v, _ = make_inputs(128, 2048, batch=1, heads=16, kv_heads=1, depth=32)

    def loss(*inputs):
        return attention(*inputs, implementation="xla").sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile().as_text()
    shapes = {(kind, tuple(map(int, x.split(",")))) for kind, x in re.findall(r"\b(s8|bf16|f32)\[([\d,]+)\]", text)}
    assert ("s8", (1, 1, 2048, 32)) in shapes
    assert not [x for kind, x in shapes if kind != "f32" and 32 in x and math.prod(x) >= 16 * k.size]


def residuals_of(implementation, dtype, heads, kv_heads, config=None):
    """What jax.vjp keeps, of T=256 and S=384, which need no padding."""
    q, k, v, _ = make_inputs(256, 384, batch=2, heads=heads, kv_heads=kv_heads, dtype=dtype)
    with using(implementation) as name:
        vjp = jax.eval_shape(
            lambda *x: jax.vjp(lambda *y: attention(*y, implementation=name, config=config), *x)[1], q, k, v
        )
    return jax.tree.leaves(vjp)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 3), (8, 1)])
def test_residuals_take_six_bytes_per_token_and_channel(cpu_implementation, dtype, heads, kv_heads):
    leaves = residuals_of(cpu_implementation, dtype, heads, kv_heads)
    queries, keys = 2 * 256 * heads, 2 * 384 * kv_heads
    # INT8 Q and INT16 O; INT8 K and 16-bit V; a float32 a token for the scales of Q and O and the log-sum-exp,
    # and at most one for the scales of K.
    six_bytes = (1 + 2) * queries * 64 + (1 + 2) * keys * 64
    total = sum(x.size * x.dtype.itemsize for x in leaves)
    assert six_bytes + 3 * 4 * queries < total <= six_bytes + 3 * 4 * queries + 4 * keys


@pytest.mark.parametrize("config", [SageConfig.mixed(), SageConfig.precise()], ids=["mixed", "precise"])
def test_residuals_of_presets_take_at_most_ten_bytes(cpu_implementation, config):
    leaves = residuals_of(cpu_implementation, jnp.bfloat16, 6, 3, config)
    queries, keys = 2 * 256 * 6, 2 * 384 * 3
    total = sum(x.size * x.dtype.itemsize for x in leaves)
    assert total <= 5 * queries * 64 + 5 * keys * 64 + 3 * 4 * queries + 4 * keys
    assert max(x.size for x in leaves) <= queries * 64
