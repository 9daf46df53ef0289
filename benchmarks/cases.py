"""The shapes that are timed, what they cost in floating-point operations, and the record of one measurement."""

import dataclasses
import itertools

from benchmarks import records

TOKENS = 16384
CHANNELS = 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (1024, 8192)
DEPTHS = (64, 128)
# Floating-point operations of a pass, as a multiple of the forward pass's two products: the backward pass has five.
# The passes called "kernels" leave out the quantisation, which does no product.
PASSES = {"forward": 1.0, "forward+backward": 3.5, "forward kernels": 1.0, "backward kernels": 2.5}
# Relative l2 error above which a method is wrong, not imprecise: standard normal inputs, worst of O, dQ, dK, dV.
ERROR_BOUND = {"int8": 0.05, "16-bit": 0.02}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One shape, [batch, length, heads, depth], queries and keys alike."""

    depth: int
    length: int
    causal: bool
    batch: int
    heads: int

    def __str__(self):
        return f"H={self.depth} T={self.length}" + (" causal" if self.causal else "")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, T, N, H]."""
        return self.batch, self.length, self.heads, self.depth


def make_cases(lengths, depths, causal=(False, True), *, tokens=TOKENS, channels=CHANNELS) -> list[Case]:
    """Every combination, with batch * length = `tokens` (or one sequence, if longer) and heads * depth = `channels`."""
    return [
        Case(depth=d, length=t, causal=c, batch=max(1, tokens // t), heads=channels // d)
        for d, t, c in itertools.product(depths, lengths, causal)
    ]


def flops(case: Case, pass_: str) -> float:
    """Floating-point operations: 4 B N T S H forward, 2.5 times that backward, half of it if causal."""
    forward = 4 * case.batch * case.heads * case.length * case.length * case.depth
    return PASSES[pass_] * forward * (0.5 if case.causal else 1.0)


def make_record(
    case: Case, method: str, pass_: str, provenance: dict, *, seconds=None, max_error=None, error=None
) -> dict:
    """One row of the results; `seconds` is the median device time of one call, or None with the reason in `error`."""
    milliseconds = None if seconds is None else 1e3 * seconds
    return {
        "method": method,
        "pass": pass_,
        "depth": case.depth,
        "length": case.length,
        "causal": case.causal,
        "batch": case.batch,
        "heads": case.heads,
        "milliseconds": milliseconds,
        "tflops": None if seconds is None else flops(case, pass_) / seconds / 1e12,
        "max_error": max_error,
        "error": error,
        **provenance,
    }


def make_provenance(device: str, commit: str | None) -> dict:
    """What every row of one run shares."""
    return {
        "device": device,
        "versions": records.versions(),
        "commit": commit or records.commit(),
        "date": records.today(),
    }
