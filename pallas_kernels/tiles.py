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
    milliseconds: float | None = None


def _row(kernel, depth, is_causal, rows, summed, num_warps, num_stages, milliseconds=None):
    return Row(
        kernel=kernel,
        depth=depth,
        is_causal=is_causal,
        rows=rows,
        summed=summed,
        num_warps=num_warps,
        num_stages=num_stages,
        milliseconds=milliseconds,
    )


# H200, 2026-11-29, JAX 0.11.2.
HOPPER = (
    _row("forward", 64, False, 64, 128, 4, 3, 2.11),
    _row("forward", 64, True, 64, 128, 4, 3, 1.17),
    _row("forward", 128, False, 64, 128, 4, 2, 1.48),
    _row("forward", 128, True, 64, 128, 4, 3, 0.89),
    _row("grad_v", 64, False, 64, 128, 4, 2, 2.19),
    _row("grad_v", 64, True, 64, 128, 4, 3, 1.24),
    _row("grad_v", 128, False, 64, 128, 4, 3, 1.62),
    _row("grad_v", 128, True, 64, 128, 4, 3, 0.90),
    _row("grad_k", 64, False, 128, 64, 4, 3, 3.52),
    _row("grad_k", 64, True, 128, 64, 4, 3, 1.93),
    _row("grad_k", 128, False, 128, 64, 8, 3, 3.62),
    _row("grad_k", 128, True, 128, 64, 8, 3, 1.94),
    _row("grad_q", 64, False, 128, 64, 8, 3, 3.45),
    _row("grad_q", 64, True, 64, 64, 4, 2, 1.83),
    _row("grad_q", 128, False, 128, 64, 8, 3, 3.11),
    _row("grad_q", 128, True, 128, 64, 8, 3, 1.72),
    _row("grad_kv_16", 64, False, 64, 64, 4, 2, 4.62),
    _row("grad_kv_16", 64, True, 64, 64, 4, 2, 2.39),
    _row("grad_kv_16", 128, False, 128, 64, 8, 3, 3.99),
    _row("grad_kv_16", 128, True, 128, 64, 8, 3, 2.10),
    _row("grad_q_16", 64, False, 128, 64, 8, 3, 3.18),
    _row("grad_q_16", 64, True, 128, 64, 8, 3, 1.55),
    _row("grad_q_16", 128, False, 128, 64, 8, 3, 2.95),
    _row("grad_q_16", 128, True, 128, 64, 8, 3, 1.63),
)
# Not timed: chosen with benchmarks.kernel_report on 2026-11-29 for A100, RTX 4090 and RTX 5090, which have no wgmma: no
# spills, within 101376 bytes of shared memory, and of those the fewest instructions a score.
WITHOUT_WGMMA = (
    _row("forward", 64, None, 64, 128, 4, 2),
    _row("forward", 128, None, 32, 128, 4, 2),
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
# By compute capability; another one uses the nearest below.
TABLE = {(8, 0): WITHOUT_WGMMA, (9, 0): HOPPER, (12, 0): WITHOUT_WGMMA}


def forward_tile(spec, depth) -> Tile:
    """The tile of the forward kernel."""
    rows, summed, warps, stages = _find("forward", spec, depth, spec.config.pv_span)
    return Tile(block_q=rows, block_k=summed, num_warps=warps, num_stages=stages)


def grad_kv_tiles(spec, depth) -> tuple[bool, Tile, Tile]:
    """Whether dK and dV come from one kernel, and the tiles of dK and dV."""
    config = spec.config
    if not spec.uses_int8("dk", "dv"):
        tile = _keys_tile("grad_kv_16", spec, depth, None)
        return True, tile, tile
    tile_k = _keys_tile("grad_k", spec, depth, config.dk_span)
    tile_v = _keys_tile("grad_v", spec, depth, config.dv_span)
    return False, tile_k, tile_v


def grad_q_tile(spec, depth) -> Tile:
    """The tile of the kernel of dQ."""
    int8 = spec.uses_int8("dq")
    kernel, span = ("grad_q", spec.config.dq_span) if int8 else ("grad_q_16", None)
    rows, summed, warps, stages = _find(kernel, spec, depth, span)
    return Tile(block_q=rows, block_k=summed, num_warps=warps, num_stages=stages)


def _keys_tile(kernel, spec, depth, span):
    rows, summed, warps, stages = _find(kernel, spec, depth, span)
    return Tile(block_q=summed, block_k=rows, num_warps=warps, num_stages=stages)


def _find(kernel, spec, depth, span) -> tuple[int, int, int, int]:
    """(rows, summed, num_warps, num_stages) for the GPU that the call is compiled for."""
    config = spec.config
    table = TABLE[_nearest(target_capability())]
    owns_keys = kernel not in ("forward", "grad_q", "grad_q_16")
    # A kernel reads one scale of K a tile, so a tile of keys may not be longer than the block that shares it.
    most_rows = config.block_k if owns_keys and config.key_scale == "block" else 128
    if config.grad_scale == "tile":
        most_rows = config.block_k if owns_keys else config.block_q
    for row in table:
        fits = (span is None or row.summed == span) and row.rows <= most_rows
        if row.kernel == kernel and row.depth == max(depth, 64) and row.is_causal in (None, spec.is_causal) and fits:
            # Scores in 16 bits read twice the bytes; one stage less keeps them in shared memory.
            stages = max(1, row.num_stages - spec.keeps_16_bits("qk"))
            return row.rows, row.summed, row.num_warps, stages
    return min(64, most_rows), 64 if span is None else span, 4, 2


def _nearest(capability) -> tuple[int, int]:
    """The listed capability that is closest below this one; Hopper's if there is no GPU."""
    if capability is None:
        return (9, 0)
    below = [listed for listed in TABLE if listed <= capability]
    return max(below, default=min(TABLE))
