"""Every kernel that the default and the mixed preset launch fits the GPUs it is meant for, without one being there."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import kernel_cost
from benchmarks.cases import Case
from benchmarks.gpu_targets import TARGETS
from benchmarks.kernel_cost import CompilerRefusal, compile_kernel, kernel_names
from benchmarks.methods import both_passes
from benchmarks.traces import single_kernels
from pallas_kernels import tiles
from pallas_kernels.hopper.tiles import MIN_JAX
from pallas_kernels.launch import Tile
from sagebwd_jax import RESIDUAL_NAMES, SageConfig, attention, ring_attention

pytestmark = pytest.mark.compile

# Bytes of shared memory that one block can have: CUDA programming guide, compute capabilities 8.0, 8.6, 8.9, 9.0, 10.0
# and 12.0.
SHARED_LIMITS = {
    "a100": 166912,
    "rtx3090": 101376,
    "rtx4090": 101376,
    "h200": 232448,
    "b200": 232448,
    "rtx5090": 101376,
}
# Those whose tiles, or whose limits, another one shares are not part of make test.
GPUS = [pytest.param(gpu, marks=pytest.mark.slow) if gpu in ("rtx3090", "b200") else gpu for gpu in SHARED_LIMITS]
SLOW = pytest.mark.slow
PRESETS = {"default": SageConfig(), "mixed": SageConfig.mixed()}
# Hopper kernels whose programs stay keep so many bytes of addresses, of what a block begins and ends with, in memory
# while they are in the block's loop. The loop itself spills nothing.
STAYS = dict(forward=8, grad_k=4, grad_q=48, grad_qkv=4)
ATTENTION = ("forward", "grad_v", "grad_k", "grad_kv", "grad_q", "grad_qkv")


@pytest.fixture
def fresh_traces():
    """Traces made with other tiles must not be met again."""
    kernel_cost._trace.cache_clear()
    yield
    kernel_cost._trace.cache_clear()


def problems(gpu, depth, causal, config, kernels, masks=None, spill_allowed=0, dtype="bfloat16"):
    """What keeps each of these kernels from running well, by name.

    Causal kernels have a loop over whole tiles and one over others at any length, the rest at a ragged one alone, where
    they take more shared memory.
    """
    found = {}
    for kernel in kernels:
        stays = gpu == "h200" and kernel in STAYS and masks is None
        try:
            options = dict(dtype=dtype, with_loop=stays, ragged=not causal)
            cost = compile_kernel(gpu, kernel, depth, causal, config, masks, **options)
        except CompilerRefusal as refusal:
            found[kernel] = str(refusal)
            continue
        in_loop = cost.instructions.get("STL", 0) + cost.instructions.get("LDL", 0)
        allowed = STAYS[kernel] if stays and not in_loop else spill_allowed
        if cost.spilled > max(allowed, spill_allowed) or cost.shared_bytes > SHARED_LIMITS[gpu]:
            found[kernel] = f"{cost.spilled} bytes spilled, {cost.shared_bytes} of {SHARED_LIMITS[gpu]} bytes shared"
    return found


# At depth 64 only causal, whose kernels hold the loop of the others and one with masks; both are tight at 128.
@pytest.mark.parametrize("depth,causal", [(64, True), (128, False), (128, True)])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("gpu", GPUS)
def test_attention_kernels_fit_without_spills(gpu, preset, depth, causal):
    names = set(kernel_names(gpu, depth, causal, PRESETS[preset])) & set(ATTENTION)
    assert {"forward", "grad_q"} < names or names == {"forward", "grad_qkv"}
    assert problems(gpu, depth, causal, PRESETS[preset], names) == {}


def masked_kernels_fit(gpu, preset, depth, masks, **options):
    names = set(kernel_names(gpu, depth, True, PRESETS[preset], masks)) & set(ATTENTION)
    assert {"forward", "grad_q"} < names
    assert problems(gpu, depth, True, PRESETS[preset], names, masks, **options) == {}


# One kind of masks for each generation, at the depth that is tight; all combinations take minutes.
@pytest.mark.parametrize(
    ("gpu", "masks"),
    [("a100", "segments"), ("rtx4090", "bias"), ("h200", "mask"), ("rtx5090", "window"), ("rtx5090", "mask")],
)
def test_kernels_with_masks_fit_without_spills(gpu, masks):
    masked_kernels_fit(gpu, "default", 128, masks)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["window", "segments", "mask", "bias"])
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("gpu", GPUS)
def test_all_kernels_with_masks_fit(gpu, preset, depth, masks):
    # 4 bytes: one value of one kernel, see tiles.py.
    masked_kernels_fit(gpu, preset, depth, masks, spill_allowed=8 if masks == "segments" else 4)


# Inputs of other dtypes have other 16-bit operands, and never the kernels for Hopper.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("depth", [32, 64, 128, 256])
@pytest.mark.slow
@pytest.mark.parametrize("gpu", SHARED_LIMITS)
def test_any_head_dim_and_dtype_fits_in_shared_memory(gpu, depth, causal, dtype):
    names = kernel_names(gpu, depth, causal, SageConfig(), dtype=dtype)
    assert "forward" in names and {"quantize_tokens", "quantize_inputs"} & set(names)
    assert problems(gpu, depth, causal, SageConfig(), names, spill_allowed=1 << 20, dtype=dtype) == {}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("gpu", GPUS)
def test_quantisation_kernels_fit_without_spills(gpu, depth, preset):
    names = set(kernel_names(gpu, depth, False, PRESETS[preset])) - set(ATTENTION)
    assert {"quantize_tokens", "quantize_inputs"} & names
    assert problems(gpu, depth, False, PRESETS[preset], names) == {}


# Two GPUs in every run: one with wgmma, and of the others that with the least shared memory and no registers to spare.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "gpu", [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("rtx3090", "h200"))) for x in SHARED_LIMITS]
)
def test_wide_heads_fit_without_spills(gpu, causal):
    for config in PRESETS.values():
        names = set(kernel_names(gpu, 256, causal, config))
        kernels = names if config == SageConfig() else {"grad_kv", "grad_q"}
        assert problems(gpu, 256, causal, config, kernels) == {}


# Each asks for a tile that no row lists, or reads one of its operands in 16 bits where the row was chosen for int8.
UNLISTED = {
    "dk128": SageConfig(dk_span=128),
    "dq128": SageConfig(dq_span=128),
    "pv16": SageConfig(sixteen_bit={"pv"}),
    "dv16": SageConfig(sixteen_bit={"dv"}),
    "mixed32": dataclasses.replace(SageConfig.mixed(), block_k=32, pv_span=32, dq_span=32),
}


@pytest.mark.parametrize("gpu", ["rtx4090", pytest.param("a100", marks=SLOW), pytest.param("h200", marks=SLOW)])
@pytest.mark.parametrize("config", UNLISTED)
def test_any_config_fits_in_shared_memory(gpu, config):
    config = UNLISTED[config]
    names = set(kernel_names(gpu, 256, False, config)) & set(ATTENTION)
    assert problems(gpu, 256, False, config, names, spill_allowed=1 << 20) == {}


# Nothing says that these run well: at this depth some spill, and none has been timed.
@pytest.mark.parametrize("masks", ["mask", "bias", "everything"])
@pytest.mark.parametrize("gpu", [pytest.param(x, marks=[pytest.mark.slow] * (x != "h200")) for x in SHARED_LIMITS])
def test_wide_heads_with_masks_fit_in_shared_memory(gpu, masks):
    fast = gpu == "h200"
    configs = [SageConfig.precise()] if fast else [*PRESETS.values(), SageConfig.precise(), SageConfig.faithful()]
    for config in configs:
        for causal in [False] if fast else [False, True]:
            names = set(kernel_names(gpu, 256, causal, config, masks)) & set(ATTENTION)
            assert problems(gpu, 256, causal, config, names, masks, spill_allowed=1 << 20) == {}


def test_more_heads_than_a_grid_axis_has_programs(tmp_path):
    # CUDA has 65535 of them along the second and third axis, and 2^31 - 1 along the first.
    mesh = topologies.make_mesh(kernel_cost._topology(TARGETS["h200"].description()), (1,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        case = Case(depth=32, length=128, causal=False, batch=70000, heads=1)
        kernels = single_kernels(*both_passes(case, SageConfig()))
    for kernel in ("forward", "statistics"):
        folder = tmp_path / kernel
        folder.mkdir()
        kernel_cost._compile(*kernels[kernel], mesh, folder)
        [sequence] = folder.glob("*thunk_sequence.txt")
        [grid] = re.findall(rf"sagebwd_{kernel} grid: \[([^]]+)\]", sequence.read_text())
        programs, *rest = map(int, grid.split(","))
        assert programs >= 70000 and rest == [1, 1]


def test_shared_memory_is_what_the_kernel_turns_around_in_it():
    # One program of `turn` transposes 128 tokens of `depth` bytes through shared memory, and uses it for nothing else.
    for depth in (64, 128):
        cost = compile_kernel("rtx4090", "turn", depth, False, SageConfig())
        assert (cost.shared_bytes, cost.threads, cost.spilled) == (128 * depth, 128, 0)


def test_a_tile_that_needs_too_much_shared_memory_is_refused(fresh_traces, monkeypatch):
    # K and V of 128 keys in seven buffers: 7 * 2 * 128 * 128 bytes are more than twice the limit.
    tile = Tile(block_q=64, block_k=128, num_warps=4, num_stages=8)
    monkeypatch.setattr(tiles, "forward_tile", lambda *args, **kwargs: tile)
    with pytest.raises(CompilerRefusal, match="[Ss]hared memory"):
        compile_kernel("rtx4090", "forward", 128, False, SageConfig())


def test_a_tile_that_needs_too_many_registers_spills(fresh_traces, monkeypatch):
    # The scores and the output of 128 queries in four warps take 2 * 128 float32 registers of a thread, of 255.
    tile = Tile(block_q=128, block_k=128, num_warps=4, num_stages=2)
    monkeypatch.setattr(tiles, "forward_tile", lambda *args, **kwargs: tile)
    assert problems("a100", 128, False, SageConfig(), ["forward"]).keys() == {"forward"}


def test_a_kernel_that_is_not_launched_is_named():
    with pytest.raises(ValueError, match="grad_kv.* is not launched .*grad_k"):
        compile_kernel("h200", "grad_kv", 64, False, SageConfig.faithful())


# At depth 128 Hopper's kernels alone run, from JAX 0.11 on, whose calls JAX promises to load in later releases.
@pytest.mark.parametrize("depth", [64, 128])
def test_export_needs_checks_disabled(depth):
    mesh = topologies.make_mesh(kernel_cost._topology(TARGETS["h200"].description()), (1,), ("x",))
    function = jax.jit(functools.partial(attention, implementation="triton"))
    inputs = [jax.ShapeDtypeStruct((2, 256, 4, depth), jnp.bfloat16)] * 3
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if depth == 64 or jax.__version_info__ < MIN_JAX:
            with pytest.raises(ValueError, match="triton"):
                jax.export.export(function, platforms=["cuda"])(*inputs)
        else:
            checks = []
        exported = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(*inputs)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == ("cuda",) and [x.shape for x in loaded.out_avals] == [(2, 256, 4, depth)]


@pytest.mark.parametrize(
    ("names", "forwards"), [((), 8), (RESIDUAL_NAMES, 4)], ids=["nothing-saved", "residuals-saved"]
)
def test_checkpoint_runs_forward_kernels_as_its_policy_says(names, forwards):
    mesh = topologies.make_mesh(kernel_cost._topology(TARGETS["a100"].description()), (1,), ("x",))

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*names))
    def layer(x, kv):
        return x + attention(x, kv, kv, implementation="triton", is_causal=True)

    def loss(x, layers):
        for kv in layers:
            x = layer(x, kv)
        return (x * x).astype(jnp.float32).sum()

    x, kv = (
        jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P())) for heads in (4, 2)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(jax.grad(loss)).lower(x, [kv] * 4).compile().as_text()
    assert len(re.findall(r"custom-call\([^\n]*sagebwd_forward\b", text)) == forwards


TWO_SHAPES = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from benchmarks import kernel_cost
from benchmarks.gpu_targets import TARGETS
from sagebwd_jax import attention
mesh = topologies.make_mesh(kernel_cost._topology(TARGETS["a100"].description()), (1,), ("x",))
gradient = jax.grad(lambda q, k, v: attention(q, k, v, implementation="triton").astype(jnp.float32).sum())
for length in (128, 256):
    inputs = [jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)] * 3
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(gradient).trace(*inputs).lower(lowering_platforms=("cuda",))
    print(lowered.as_text().count('name = "sagebwd_forward"'))
"""


def test_one_process_is_warned_of_a_deprecation_once_at_most():
    # JAX 0.10 has no such warning; from 0.11 on Python repeats it once anything in the process touches its filters.
    root = Path(__file__).parent.parent
    environment = os.environ | dict(PYTHONPATH=str(root), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-W", "default", "-c", TWO_SHAPES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n1\n", done.stderr
    warned = [
        line for line in done.stderr.splitlines() if re.search(r"DeprecationWarning.*(pallas|triton)", line, re.I)
    ]
    assert len(warned) <= 1, warned


class TestSeveralGpus:
    """Both passes over two GPUs: every kernel works on its own part, under plain jit and in a checked shard_map."""

    @pytest.fixture
    def mesh(self):
        devices = kernel_cost._topology(TARGETS["h200"].description(), "1x2x1").devices
        return Mesh(devices, ("x",), axis_types=(AxisType.Auto,))

    def compile(self, mesh, function, *specs, kv_heads=2, depth=64):
        query, key = (jax.ShapeDtypeStruct((2, 256, heads, depth), jnp.bfloat16) for heads in (4, kv_heads))
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip((query, key, key, query), specs, strict=True)
        ]
        # One device's abstract mesh says which GPU; without it nothing does.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(function).lower(*placed).compile().as_text()

    def both_passes(self, query, key, value, dout, function=attention, **options):
        call = functools.partial(function, implementation="triton", is_causal=True, **options)
        out, vjp = jax.vjp(call, query, key, value)
        return out, *vjp(dout)

    # At depth 128 the Hopper kernels run, from JAX 0.11 on.
    @pytest.mark.parametrize(
        ("spec", "part"), [(P("x"), "1,256,4"), (P(None, None, "x"), "2,256,2")], ids=["batch", "heads"]
    )
    @pytest.mark.parametrize("depth", [64, 128])
    def test_plain_jit_gathers_nothing(self, mesh, depth, spec, part):
        text = self.compile(mesh, self.both_passes, *[spec] * 4, depth=depth)
        # One of two sequences, or two of four query heads.
        assert re.search(rf"\(bf16\[{part},{depth}\][^=]*\) custom-call\([^\n]*sagebwd_forward", text)
        assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)

    @pytest.mark.parametrize("depth", [64, 128])
    def test_shard_map_with_its_checks(self, mesh, depth):
        # One key head for both GPUs: its gradient is the sum over them, and nothing else is sent.
        heads, whole = P(None, None, "x"), P()
        run = jax.shard_map(
            self.both_passes,
            mesh=mesh.abstract_mesh,
            in_specs=(heads, whole, whole, heads),
            out_specs=(heads, heads, whole, whole),
        )
        text = self.compile(mesh, run, heads, whole, whole, heads, kv_heads=1, depth=depth)
        assert "sagebwd_forward" in text and "all-reduce" in text
        assert not re.search(r"all-gather|all-to-all|collective-permute", text)

    def test_ring_does_not_attend_again_in_the_backward_pass(self, mesh):
        time = P(None, "x")
        run = functools.partial(self.both_passes, function=ring_attention, axis_name="x")
        run = jax.shard_map(run, mesh=mesh.abstract_mesh, in_specs=(time,) * 4, out_specs=(time,) * 4)
        text = self.compile(mesh, run, *[time] * 4)
        # A device's own part, and the loop over the others.
        for kernel in ("forward", "grad_q", "grad_k", "grad_v"):
            assert len(re.findall(rf"custom-call\([^\n]*sagebwd_{kernel}\b", text)) == 2, kernel
