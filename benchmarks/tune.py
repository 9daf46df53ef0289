"""``python -m benchmarks.tune --kernel grad_k --depth 128``: times a kernel's tiles, for pallas_kernels/tiles.py.

Every combination of rows, warps, stages and options that can be compiled is timed as the product launches it, on the
operands that the product makes for it, and must give what the first of them gives. The length along the summed axis
is a span of `SageConfig` and not searched, except where the products are in 16 bits.
"""

import argparse
import concurrent.futures
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator
from unittest import mock

import jax

from benchmarks import cases, timing
from benchmarks.methods import PRESETS, both_passes
from benchmarks.oracle import relative_error
from benchmarks.speed import draw_inputs
from benchmarks.traces import one_kernel
from pallas_kernels import launch, tiles
from pallas_kernels.hopper import tiles as hopper_tiles

# The kernel's name in the tile table: the kernel that a profiler shows, and the preset that launches it.
KERNELS = {
    "forward": ("forward", "sagebwd"),
    "grad_v": ("grad_v", "sagebwd"),
    "grad_k": ("grad_k", "sagebwd"),
    "grad_q": ("grad_q", "sagebwd"),
    "grad_qkv": ("grad_qkv", "sagebwd"),
    "grad_kv_16": ("grad_kv", "sagebwd mixed"),
    "grad_q_16": ("grad_q", "sagebwd mixed"),
}
# A tile computes the same sums in another order, and now and then rounds a tie the other way.
MAX_DIFFERENCE = 5e-3


def candidates(kernel: str, depth: int, causal: bool, config) -> Iterator[tiles.Row | hopper_tiles.Row]:
    """Rows that the product would accept; on a Hopper GPU also those of its own kernels."""
    counts = (2,) if kernel == "grad_qkv" else (2, 3, 4)
    layouts = itertools.product(counts, (2, 3)) if hopper_tiles.available() else ()
    for groups, stages in layouts:
        yield hopper_tiles.Row(
            kernel=kernel, depth=depth, is_causal=causal, groups=groups, stages=stages, milliseconds=0.0
        )
    # There is no Triton kernel that makes all three.
    if kernel == "grad_qkv":
        return
    span = dict(forward=config.pv_span, grad_v=config.dv_span, grad_k=config.dk_span, grad_q=config.dq_span).get(kernel)
    summed = (64, 128) if span is None else (span,)
    ahead = (False, True) if kernel in ("grad_k", "grad_q") else (False,)
    last = (False, True) if causal and kernel in ("grad_q", "grad_q_16") else (False,)
    for rows, length, (warps, stages), dp_ahead, last_first in itertools.product(
        (64, 128), summed, itertools.product((4, 8), (2, 3, 4)), ahead, last
    ):
        if rows // 16 < warps:
            continue
        yield tiles.Row(
            kernel=kernel,
            depth=depth,
            is_causal=causal,
            rows=rows,
            summed=length,
            num_warps=warps,
            num_stages=stages,
            dp_ahead=dp_ahead,
            last_first=last_first,
        )


def trace_row(row: tiles.Row | hopper_tiles.Row, case: cases.Case):
    """(prepare, run): what makes the kernel's operands, and the kernel alone, with this row's tile."""
    name, preset = KERNELS[row.kernel]
    if isinstance(row, hopper_tiles.Row):
        with mock.patch.object(hopper_tiles, "TABLE", (row,)):
            return one_kernel(*both_passes(case, PRESETS[preset]), name)
    # The first row that fits is taken, whatever the GPU.
    table = {capability: (row, *rows) for capability, rows in tiles.TABLE.items()}
    with mock.patch.dict(tiles.TABLE, table), mock.patch.object(hopper_tiles, "TABLE", ()):
        return one_kernel(*both_passes(case, PRESETS[preset]), name)


def measure(rows: list, case: cases.Case, *, calls=None, note=print) -> list:
    """The rows that work, each with its milliseconds, the fastest first; `note` hears of the others."""
    calls = calls or timing.calls_per_execution(cases.flops(case, "forward"))
    traced = [trace_row(row, case) for row in rows]
    operands = jax.jit(traced[0][0])(*draw_inputs(case))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(contextvars.copy_context().run, timing.compile_repeated, run, operands, calls)
            for _, run in traced
        ]
    timed, wanted = [], None
    for row, job in zip(rows, jobs, strict=True):
        try:
            seconds, results = timing.time_compiled(job.result(), operands, calls)
        except Exception as error:  # A tile that does not compile must not end the run, whatever is raised.
            note(f"{describe(row)}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            continue
        wanted = results[0] if wanted is None else wanted
        difference = relative_error(results[0], wanted)
        if not difference <= MAX_DIFFERENCE:
            note(f"{describe(row)}: differs from the first by {difference:.3g}")
            continue
        timed.append(dataclasses.replace(row, milliseconds=1e3 * seconds))
    return sorted(timed, key=lambda row: row.milliseconds)


def describe(row: tiles.Row | hopper_tiles.Row) -> str:
    """The row as the table in tiles.py, or hopper/tiles.py, writes it."""
    if isinstance(row, hopper_tiles.Row):
        values = [f'"{row.kernel}"', row.depth, row.is_causal, row.groups, row.stages, f"{row.milliseconds:.3f}"]
        return f"Row({', '.join(map(str, values))})"
    values = [f'"{row.kernel}"', row.depth, row.is_causal, row.rows, row.summed, row.num_warps, row.num_stages]
    values += [] if row.milliseconds is None else [f"{row.milliseconds:.2f}"]
    options = [f"{name}=True" for name in ("dp_ahead", "last_first") if getattr(row, name)]
    return f"_row({', '.join(map(str, [*values, *options]))})"


def main(arguments=None):
    """Time what is asked for and print the rows, the fastest first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description="Times one kernel's tiles.")
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=list(KERNELS))
    parser.add_argument("--depth", type=int, choices=cases.DEPTHS, nargs="+", default=cases.DEPTHS)
    parser.add_argument("--mask", choices=("full", "causal", "both"), default="both")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--top", type=int, default=3, help="rows to print of each kernel")
    options = parser.parse_args(arguments)
    launch.check_target()
    masks = dict(full=(False,), causal=(True,), both=(False, True))[options.mask]
    for case in cases.make_cases((options.length,), options.depth, masks):
        for kernel in options.kernel:
            rows = list(candidates(kernel, case.depth, case.causal, PRESETS[KERNELS[kernel][1]]))
            for row in measure(rows, case)[: options.top]:
                print(f"    {describe(row)},", flush=True)


if __name__ == "__main__":
    main()
