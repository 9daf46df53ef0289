"""``python -m benchmarks.kernel_report``: what each kernel costs on GPUs that are not there.

Registers, spilled bytes and shared memory, how many blocks a multiprocessor holds, and of the hottest loop how many
instructions each score takes, by kind. IGMMA and IMMA are INT8 matrix instructions, HGMMA and HMMA 16-bit ones, UTCIMMA
and UTCHMMA Blackwell's; I2FP converts integers to floats, F2IP and F2I floats to integers; STL and LDL are spills.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# A CUDA plugin without a GPU would only complain.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import records
from benchmarks.gpu_targets import TARGETS
from benchmarks.kernel_cost import CompilerRefusal, KernelCost, compile_kernel, kernel_names
from benchmarks.methods import MASKS
from sagebwd_jax import SageConfig

PRESETS = {
    "default": SageConfig(),
    "mixed": SageConfig.mixed(),
    "faithful": SageConfig.faithful(),
    "precise": SageConfig.precise(),
}
DEPTHS = (64, 128)
NO_MASKS = "none"
_HEADINGS = (
    "GPU",
    "preset",
    "H",
    "causal",
    "masks",
    "kernel",
    "registers",
    "spilled",
    "shared memory",
    "limit",
    "blocks",
    "loop",
)
_KINDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel for one GPU; `cost` is None where the compiler refuses it, with the reason in `refusal`."""

    gpu: str
    preset: str
    depth: int
    causal: bool
    masks: str
    kernel: str
    cost: KernelCost | None
    refusal: str = ""

    def is_bad(self) -> bool:
        """Whether the kernel cannot run or spills."""
        return self.cost is None or self.cost.spilled > 0 or self.cost.shared_bytes > self.cost.shared_limit

    def cells(self) -> list[str]:
        """The row as text, in the order of the headings."""
        first = [self.gpu, self.preset, str(self.depth), "yes" if self.causal else "no", self.masks, self.kernel]
        if self.cost is None:
            return [*first, "-", "-", "-", str(TARGETS[self.gpu].shared_per_block), "-", self.refusal]
        cost = self.cost
        numbers = (cost.registers, cost.spilled, cost.shared_bytes, cost.shared_limit, cost.blocks_per_core)
        return [*first, *map(str, numbers), describe_loop(cost.instructions)]


def describe_loop(instructions: dict[str, float]) -> str:
    """Instructions per score: the sum, then the commonest kinds."""
    if not instructions:
        return ""
    commonest = sorted(instructions.items(), key=lambda item: -item[1])[:_KINDS]
    return f"{sum(instructions.values()):.1f}: " + " ".join(f"{kind} {count:.2f}" for kind, count in commonest)


def measure(options) -> Iterator[Row]:
    """Compile what the options choose, a few kernels at a time; rows come in order."""
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        pending = []
        choices = options.gpu, options.preset, options.depth, options.causal, options.masks
        for gpu, preset, depth, causal, masks in itertools.product(*choices):
            for kernel in kernel_names(gpu, depth, causal, PRESETS[preset], _known(masks)):
                if not options.kernel or kernel in options.kernel:
                    pending.append(pool.submit(_measure_one, gpu, preset, depth, causal, masks, kernel))
        for future in pending:
            yield future.result()


def _known(masks) -> str | None:
    """The masks as `compile_kernel` takes them."""
    return None if masks == NO_MASKS else masks


def _measure_one(gpu, preset, depth, causal, masks, kernel) -> Row:
    """One row."""
    row = Row(gpu=gpu, preset=preset, depth=depth, causal=causal, masks=masks, kernel=kernel, cost=None)
    try:
        cost = compile_kernel(gpu, kernel, depth, causal, PRESETS[preset], _known(masks), with_loop=True)
    except CompilerRefusal as refusal:
        return dataclasses.replace(row, refusal=str(refusal))
    return dataclasses.replace(row, cost=cost)


def as_markdown(rows: list[Row]) -> str:
    """The report as a page."""
    versions = ", ".join(f"{package} {version}" for package, version in records.versions().items())
    bad = [row for row in rows if row.is_bad()]
    lines = [
        "# What the kernels cost",
        "",
        "Compiled for GPUs that were not there by `python -m benchmarks.kernel_report --markdown`,",
        f"{records.today()}, commit {records.commit()}, {versions}.",
        "bfloat16, with the tiles that the product chooses.",
        "",
        "Spilled: bytes a thread. Shared memory, limit: bytes a block. Blocks: how many one multiprocessor holds.",
        f"Loop: instructions per score in the hottest loop, then its {_KINDS} commonest kinds.",
        "",
        f"{len(rows)} kernels; {len(bad)} spill or do not fit (in bold).",
        "",
        "| " + " | ".join(_HEADINGS) + " |",
        "| --- | --- | --: | --- | --- | --- | --: | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        cells = row.cells()
        if row.is_bad():
            cells[5] = f"**{cells[5]}**"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse(arguments) -> argparse.Namespace:
    """The command line; every option takes several values and stands for all if it is left out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_report", description="What each kernel costs on GPUs that are not there."
    )
    parser.add_argument("--gpu", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernel", nargs="+", help="forward, grad_v, grad_k, grad_kv, grad_q, quantize_tokens, ...")
    parser.add_argument("--depth", nargs="+", type=int, choices=DEPTHS, default=DEPTHS, help="head dim")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--mask", choices=("full", "causal", "both"), default="both")
    parser.add_argument("--masks", nargs="+", choices=(NO_MASKS, *MASKS), default=[NO_MASKS], help="beyond causality")
    parser.add_argument("--markdown", action="store_true", help="also write results/kernels.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="kernels compiled at a time")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the page")
    options = parser.parse_args(arguments)
    options.causal = {"full": (False,), "causal": (True,), "both": (False, True)}[options.mask]
    return options


def main(arguments=None) -> int:
    """Print the rows as they come; the exit status is 1 if a kernel spills or does not fit."""
    options = parse(arguments)
    template = "{:8} {:9} {:>4} {:6} {:10} {:18} {:>9} {:>8} {:>14} {:>7} {:>7}  {}"
    print(template.format(*_HEADINGS))
    rows = []
    for row in measure(options):
        rows.append(row)
        print(template.format(*row.cells()) + ("  <--" if row.is_bad() else ""), flush=True)
    bad = sum(row.is_bad() for row in rows)
    print(f"{len(rows)} kernels; {bad} spill or do not fit")
    if options.markdown:
        path = options.output / "kernels.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_markdown(rows))
        print(path)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
