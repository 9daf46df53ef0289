"""``python -m benchmarks.tables``: the README's tables of speed and accuracy, from the files in results/."""

import json

from benchmarks import records
from benchmarks.accuracy import TENSORS
from benchmarks.cases import DEPTHS

METHODS = {
    "`SageConfig()`": "sagebwd",
    "`mixed()`": "sagebwd mixed",
    "FlashAttention-2 (PyTorch)": "FlashAttention-2 (PyTorch)",
    "Pallas mha": "Pallas mha",
    "tokamax Triton": "tokamax Triton",
    "tokamax Mosaic GPU": "tokamax Mosaic GPU",
    "cuDNN (JAX)": "cuDNN",
}
# Of those measured.
LENGTHS = (512, 1024, 4096, 8192, 32768)
PRESETS = {"`SageConfig()`": "default", "`mixed()`": "mixed", "`precise()`": "precise", "`faithful()`": "faithful"}


def speed_table(rows, pass_, columns) -> list[str]:
    """TFLOP/s of one pass, a line a shape and a column a method; - where there is no time."""
    speeds = {(r["depth"], r["causal"], r["length"], r["method"]): r["tflops"] for r in rows if r["pass"] == pass_}
    lines = [f"| {pass_} | T | {' | '.join(columns)} |", "| --- " * (len(columns) + 2) + "|"]
    for depth, causal, length in sorted({key[:3] for key in speeds}, key=lambda shape: (-shape[0], *shape[1:])):
        found = (speeds.get((depth, causal, length, METHODS[name])) for name in columns)
        cells = ("-" if x is None else f"{x:.0f}" for x in found)
        lines.append(f"| H={depth}{', causal' if causal else ''} | {length} | {' | '.join(cells)} |")
    return lines


def accuracy_table(cells, sigmas=(1, 5, 10)) -> list[str]:
    """Relative l2 errors of the four tensors, a line a preset and a column a sigma, below those of the paper."""
    lines = [
        f"| {' / '.join(TENSORS)} | {' | '.join(f'sigma {sigma}' for sigma in sigmas)} |",
        "| --- " * (len(sigmas) + 1) + "|",
    ]
    for label, preset in {"paper, Table 1": None, **PRESETS}.items():
        texts = []
        for sigma in sigmas:
            found = {r["tensor"]: r for r in cells if r["sigma"] == sigma and r["preset"] == (preset or "default")}
            errors = (found[tensor]["l2" if preset else "paper_l2"] for tensor in TENSORS)
            texts.append(" / ".join(f"{error:.4f}".removeprefix("0") for error in errors))
        lines.append(f"| {label} | {' | '.join(texts)} |")
    return lines


def tables(device="h200") -> list[list[str]]:
    """Accuracy, then speed forward and backward together, then forward."""
    names = f"accuracy_{device}", f"speed_{device}"
    accuracy, speed = (json.loads((records.RESULTS / f"{name}.json").read_text()) for name in names)
    speed = [row for row in speed if row["length"] in LENGTHS and row["depth"] in DEPTHS]
    # Its forward kernel is that of the default.
    forward = [name for name in METHODS if name != "`mixed()`"]
    return [
        accuracy_table(accuracy["cells"]),
        speed_table(speed, "forward+backward", list(METHODS)),
        speed_table(speed, "forward", forward),
    ]


if __name__ == "__main__":
    print("\n\n".join("\n".join(lines) for lines in tables()))
