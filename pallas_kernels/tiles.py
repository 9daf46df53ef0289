"""Which tile each kernel uses: a table of what was measured or reported, and the rule for what it does not list.

May be changed: any row, with its date, GPU and time. A row changes speed, never numbers: along the summed axis an INT8
kernel's tile is a span of `SageConfig`, and a row only applies where that span is the one it was found with.
"""

import dataclasses

from pallas_kernels.launch import Tile, target_capability


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One entry: a kernel at a depth, on GPUs of one compute capability.

    Attributes:
      kernel: "forward", "grad_v", "grad_k", "grad_q", or with the gradients' products in 16 bits "grad_kv_16",
        "grad_q_16".
      depth: channels of a head, padded.
      is_causal: None where one tile suits both.
      rows: queries (forward, grad_q) or keys that one program owns.
      summed: the tile's other side.
      dp_ahead: see `Tile`; for grad_k and grad_q.
      last_first: see `Tile`; for grad_q and grad_q_16.
      int8_scores: whether Q K^T is in INT8 or 16 bits; None where one tile suits both.
      milliseconds: of the kernel at B*T = 16384, 2048 channels, T = 8192, bfloat16; None if it was not timed, but
        chosen by benchmarks.kernel_report.
    """

    kernel: str
    depth: int
    is_causal: bool | None = None
    rows: int
    summed: int
    num_warps: int
    num_stages: int
    dp_ahead: bool = False
    last_first: bool = False
    int8_scores: bool | None = None
    milliseconds: float | None = None


def _row(kernel, depth, is_causal, rows, summed, num_warps, num_stages, milliseconds=None, **options):
    return Row(
        kernel=kernel,
        depth=depth,
        is_causal=is_causal,
        rows=rows,
        summed=summed,
        num_warps=num_warps,
        num_stages=num_stages,
        milliseconds=milliseconds,
        **options,
    )


# H200, 2026-11-29, JAX 0.11.2. Those without a time were chosen like WITHOUT_WGMMA's: for what Hopper's own kernels do
# not take.
HOPPER = (
    _row("forward", 64, False, 64, 128, 4, 3, 2.14),
    _row("forward", 64, True, 64, 128, 4, 3, 1.19),
    _row("forward", 128, False, 64, 128, 4, 2, 1.48),
    _row("forward", 128, True, 64, 128, 4, 3, 0.89),
    _row("grad_v", 64, None, 128, 64, 4, 2),
    _row("grad_v", 64, False, 64, 128, 4, 2, 2.19),
    _row("grad_v", 64, True, 64, 128, 4, 3, 1.24),
    _row("grad_v", 128, False, 64, 128, 4, 3, 1.65),
    _row("grad_v", 128, True, 64, 128, 4, 3, 0.90),
    _row("grad_k", 64, False, 128, 64, 4, 3, 3.61),
    _row("grad_k", 64, True, 128, 64, 4, 3, 1.97),
    _row("grad_k", 128, False, 128, 64, 8, 3, 3.28, dp_ahead=True),
    _row("grad_k", 128, True, 128, 64, 8, 3, 1.79, dp_ahead=True),
    _row("grad_q", 64, False, 128, 64, 8, 3, 3.43),
    _row("grad_q", 64, True, 64, 64, 4, 2, 1.83, last_first=True),
    _row("grad_q", 128, False, 128, 64, 8, 3, 2.96, dp_ahead=True),
    _row("grad_q", 128, True, 128, 64, 8, 3, 1.60, dp_ahead=True, last_first=True),
    _row("grad_kv_16", 64, False, 64, 64, 4, 2, 4.50),
    _row("grad_kv_16", 64, True, 64, 64, 4, 2, 2.45),
    _row("grad_kv_16", 128, False, 128, 64, 8, 3, 3.94),
    _row("grad_kv_16", 128, True, 128, 64, 8, 3, 2.09),
    _row("grad_q_16", 64, False, 128, 64, 8, 3, 3.26),
    _row("grad_q_16", 64, True, 128, 64, 8, 3, 1.67),
    _row("grad_q_16", 128, False, 128, 64, 8, 3, 2.96),
    _row("grad_q_16", 128, True, 128, 64, 8, 3, 1.68),
)
# Not timed: chosen with benchmarks.kernel_report by 2026-11-30 for A100, RTX 4090 and RTX 5090, which have no wgmma: no
# spills, within 101376 bytes of shared memory, and of those the fewest instructions a score.
WITHOUT_WGMMA = (
    _row("forward", 64, None, 64, 128, 4, 2),
    _row("forward", 128, None, 32, 128, 4, 2),
    _row("grad_v", 64, False, 128, 64, 4, 3),
    _row("grad_v", 64, True, 128, 64, 4, 2),
    _row("grad_v", 64, None, 64, 128, 4, 2),
    _row("grad_v", 128, None, 64, 128, 4, 2),
    _row("grad_k", 64, None, 64, 64, 4, 2),
    _row("grad_k", 128, None, 128, 64, 8, 2),
    _row("grad_q", 64, None, 64, 64, 4, 2),
    _row("grad_q", 128, None, 128, 64, 8, 2),
    _row("grad_kv_16", 64, None, 64, 32, 4, 2),
    _row("grad_kv_16", 128, None, 64, 32, 4, 2),
    _row("grad_q_16", 64, None, 64, 64, 4, 2),
    _row("grad_q_16", 128, None, 128, 64, 8, 2),
)
# Not timed: Hopper's, but for two that spill on a B200 (benchmarks.kernel_report, 2026-11-29). The first that fits is
# taken.
BLACKWELL = (
    _row("grad_k", 64, None, 64, 64, 4, 2),
    _row("grad_v", 128, None, 64, 128, 4, 2),
    *(dataclasses.replace(row, milliseconds=None) for row in HOPPER),
)
# Not timed: chosen with benchmarks.kernel_report on 2026-11-29 for heads of 129 to 256 channels: with none of the four
# presets a kernel spills on any of the six GPUs, and of those tiles it is the one with most rows that fits. Without
# wgmma the joint kernel of dK and dV has all of 255 registers.
WIDE = (
    _row("forward", 256, None, 64, 128, 8, 2),
    _row("grad_v", 256, None, 64, 128, 8, 2),
    _row("grad_k", 256, None, 64, 64, 8, 2, int8_scores=True),
    _row("grad_k", 256, None, 64, 64, 8, 3, int8_scores=False),
    _row("grad_q", 256, None, 64, 64, 8, 2, int8_scores=True),
    _row("grad_q", 256, None, 64, 64, 8, 3, int8_scores=False),
    _row("grad_kv_16", 256, None, 64, 32, 8, 2),
    # 64 keys would do at a length that they divide; otherwise a second loop takes 32 KiB more shared memory.
    _row("grad_q_16", 256, False, 64, 32, 8, 2),
    _row("grad_q_16", 256, True, 64, 64, 8, 2),
)
WIDE_WITHOUT_WGMMA = (
    _row("forward", 256, None, 32, 128, 4, 2),
    _row("grad_v", 256, None, 64, 128, 8, 2),
    _row("grad_k", 256, None, 64, 64, 8, 1),
    _row("grad_q", 256, None, 64, 64, 8, 1),
    _row("grad_kv_16", 256, None, 64, 32, 8, 2),
    _row("grad_q_16", 256, None, 64, 32, 8, 2),
)
# By compute capability; another one uses the nearest below.
TABLE = {
    (8, 0): WITHOUT_WGMMA + WIDE_WITHOUT_WGMMA,
    (9, 0): HOPPER + WIDE,
    (10, 0): BLACKWELL + WIDE,
    (12, 0): WITHOUT_WGMMA + WIDE_WITHOUT_WGMMA,
}


def forward_tile(spec, depth, visibility=None) -> Tile:
    """The tile of the forward kernel, whose masks and bias are `visibility`'s."""
    return _find("forward", spec, depth, spec.config.pv_span, visibility)


def grad_kv_tiles(spec, depth, visibility=None) -> tuple[bool, Tile, Tile]:
    """Whether dK and dV come from one kernel, and the tiles of dK and dV."""
    if not spec.uses_int8("dk", "dv"):
        tile = _find("grad_kv_16", spec, depth, None, visibility)
        return True, tile, tile
    tile_k = _find("grad_k", spec, depth, spec.config.dk_span, visibility)
    tile_v = _find("grad_v", spec, depth, spec.config.dv_span, visibility)
    return False, tile_k, tile_v


def grad_q_tile(spec, depth, visibility=None) -> Tile:
    """The tile of the kernel of dQ."""
    if not spec.uses_int8("dq"):
        return _find("grad_q_16", spec, depth, None, visibility)
    return _find("grad_q", spec, depth, spec.config.dq_span, visibility)


# The product beside S that the rows of a kernel were chosen for in int8.
_OWN_PRODUCT = {"forward": ("pv",), "grad_v": ("dv",), "grad_k": ("dk",)}


def _find(kernel, spec, depth, span, visibility) -> Tile:
    """The tile for the GPU that the call is compiled for; `span` is None where no rounding asks for one."""
    config = spec.config
    owns_keys = kernel in ("grad_v", "grad_k", "grad_kv_16")
    # A kernel reads one scale of K a tile, so a tile of keys may not be longer than the block that shares it.
    most_rows = config.block_k if owns_keys and config.key_scale == "block" else 128
    if config.grad_scale == "tile":
        most_rows = config.block_k if owns_keys else config.block_q
    for row in TABLE[_nearest(target_capability())]:
        fits = (span is None or row.summed == span) and row.rows <= most_rows
        fits = fits and row.int8_scores in (None, spec.uses_int8("qk"))
        if row.kernel == kernel and row.depth == max(depth, 64) and row.is_causal in (None, spec.is_causal) and fits:
            break
    else:
        summed = 64 if span is None else span
        stages = 2 if depth <= 128 and visibility is None else 1
        row = _row(kernel, depth, None, min(64, most_rows), summed, 4 if depth <= 128 else 8, stages)
    # What is in 16 bits, where the row was chosen for int8, takes twice the shared memory: one stage less keeps it.
    fewer = spec.keeps_16_bits("qk") + (depth > 128 and spec.keeps_16_bits(*_OWN_PRODUCT.get(kernel, ())))
    queries, keys = (row.summed, row.rows) if owns_keys else (row.rows, row.summed)
    tile = Tile(
        block_q=queries,
        block_k=keys,
        num_warps=row.num_warps,
        num_stages=max(1, row.num_stages - fewer),
        dp_ahead=row.dp_ahead,
        last_first=row.last_first,
    )
    if visibility is None:
        return tile
    has_bias = visibility.bias is not None
    # With that many channels, two stages of a tile with a bias, or of 16-bit Q and K, are more than GPUs have.
    stages = 1 if depth > 128 and (has_bias or spec.keeps_16_bits("qk")) else 2
    tile = _with_masks(tile, owns_keys, has_bias, stages)
    if owns_keys and visibility.mask is not None and _nearest(target_capability()) == (12, 0):
        # An INT8 mask that comes through a pipeline is turned by ldmatrix.trans.b8, which LLVM, fatally, has not there.
        # Without one fewer warps spill more, but at depth 64 with a bias.
        warps = tile.num_warps if has_bias and depth <= 64 else 8
        tile = dataclasses.replace(tile, block_k=min(64, tile.block_k), num_warps=warps, num_stages=1)
    return tile


def _with_masks(tile, owns_keys, has_bias, most_stages) -> Tile:
    """The tile for a kernel with masks, where nothing says which tile comes next or is the largest.

    Not timed. A tile of bias in float32 takes as much shared memory as K and V, and registers: with 64 rows, and two
    stages in all, the kernels of the default and mixed presets with one kind of masks fit (2026-11-29;
    tests/test_compile_kernels.py). One of them, dK and dV of causal segments in 16 bits at depth 128 without wgmma,
    spills 4 bytes; half its tile would take a fifth more instructions a score.
    """
    tile = dataclasses.replace(tile, dp_ahead=False, last_first=False, num_stages=min(most_stages, tile.num_stages))
    if not has_bias:
        return tile
    side = "block_k" if owns_keys else "block_q"
    rows = min(64, getattr(tile, side))
    return dataclasses.replace(tile, **{side: rows}, num_warps=4)


def _nearest(capability) -> tuple[int, int]:
    """The listed capability that is closest below this one; Hopper's if there is no GPU."""
    if capability is None:
        return (9, 0)
    below = [listed for listed in TABLE if listed <= capability]
    return max(below, default=min(TABLE))
