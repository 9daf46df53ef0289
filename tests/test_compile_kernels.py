"""Every kernel that the default and the mixed preset launch fits the GPUs it is meant for, without one being there."""

import pytest

from benchmarks import kernel_cost
from benchmarks.kernel_cost import CompilerRefusal, compile_kernel, kernel_names
from pallas_kernels import tiles
from pallas_kernels.launch import Tile
from sagebwd_jax import SageConfig

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
PRESETS = {"default": SageConfig(), "mixed": SageConfig.mixed()}
ATTENTION = ("forward", "grad_v", "grad_k", "grad_kv", "grad_q")


@pytest.fixture
def fresh_traces():
    """Traces made with other tiles must not be met again."""
    kernel_cost._trace.cache_clear()
    yield
    kernel_cost._trace.cache_clear()


def problems(gpu, depth, causal, config, kernels, masks=None, spill_allowed=0):
    """What keeps each of these kernels from running well, by name."""
    found = {}
    for kernel in kernels:
        try:
            cost = compile_kernel(gpu, kernel, depth, causal, config, masks)
        except CompilerRefusal as refusal:
            found[kernel] = str(refusal)
            continue
        if cost.spilled > spill_allowed or cost.shared_bytes > SHARED_LIMITS[gpu]:
            found[kernel] = f"{cost.spilled} bytes spilled, {cost.shared_bytes} of {SHARED_LIMITS[gpu]} bytes shared"
    return found


# At depth 64 only causal, whose kernels hold the loop of the others and one with masks; both are tight at 128.
@pytest.mark.parametrize("depth,causal", [(64, True), (128, False), (128, True)])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("gpu", SHARED_LIMITS)
def test_attention_kernels_fit_without_spills(gpu, preset, depth, causal):
    names = set(kernel_names(gpu, depth, causal, PRESETS[preset])) & set(ATTENTION)
    assert {"forward", "grad_q"} < names
    assert problems(gpu, depth, causal, PRESETS[preset], names) == {}


def masked_kernels_fit(gpu, preset, depth, masks, **options):
    names = set(kernel_names(gpu, depth, True, PRESETS[preset], masks)) & set(ATTENTION)
    assert {"forward", "grad_q"} < names
    assert problems(gpu, depth, True, PRESETS[preset], names, masks, **options) == {}


# One kind of masks for each generation, at the depth that is tight; all combinations take minutes.
@pytest.mark.parametrize(
    ("gpu", "masks"), [("a100", "segments"), ("rtx4090", "bias"), ("h200", "mask"), ("rtx5090", "window")]
)
def test_kernels_with_masks_fit_without_spills(gpu, masks):
    masked_kernels_fit(gpu, "default", 128, masks)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["window", "segments", "mask", "bias"])
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("gpu", SHARED_LIMITS)
def test_all_kernels_with_masks_fit(gpu, preset, depth, masks):
    # 4 bytes: one value of one kernel, see tiles.py.
    masked_kernels_fit(gpu, preset, depth, masks, spill_allowed=4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("gpu", SHARED_LIMITS)
def test_quantisation_kernels_fit_without_spills(gpu, depth, preset):
    names = set(kernel_names(gpu, depth, False, PRESETS[preset])) - set(ATTENTION)
    assert "quantize_tokens" in names
    assert problems(gpu, depth, False, PRESETS[preset], names) == {}


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
    assert problems("h200", 128, False, SageConfig(), ["forward"]).keys() == {"forward"}


def test_a_kernel_that_is_not_launched_is_named():
    with pytest.raises(ValueError, match="grad_kv.* is not launched .*grad_k"):
        compile_kernel("h200", "grad_kv", 64, False, SageConfig.faithful())
