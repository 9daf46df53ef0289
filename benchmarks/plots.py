"""Bar plots of the results of `benchmarks.speed`, like the paper's Figures 2 and 3: speed against length."""

from pathlib import Path

from benchmarks.records import device_slug

_PASSES = ("forward", "forward+backward")
# Ours in one hue, Triton's and CUDA's 16-bit kernels in others; a method keeps its colour in every plot.
_COLOURS = {
    "sagebwd": "#c0392b",
    "sagebwd mixed": "#e59866",
    "FlashAttention-2 (PyTorch)": "#7f8c8d",
    "Pallas mha": "#aab7b8",
    "tokamax Triton": "#76a5af",
    "tokamax Mosaic GPU": "#31708f",
    "cuDNN": "#1f3a5f",
    "cuDNN (PyTorch)": "#5d7ea8",
}


def plot_speed(rows: list[dict], folder: Path) -> list[Path]:
    """One PNG a head dim: forward and forward+backward above each other, full and causal side by side."""
    # Imported here: the benchmark itself runs without it. No window is opened, so no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["pass"] in _PASSES and row["tflops"] is not None]
    paths = []
    for depth in sorted({row["depth"] for row in rows}):
        figure = Figure(figsize=(13, 7), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2, squeeze=False)
        for line, pass_ in zip(axes, _PASSES, strict=True):
            for panel, causal in zip(line, (False, True), strict=True):
                chosen = [r for r in rows if (r["depth"], r["pass"], r["causal"]) == (depth, pass_, causal)]
                _draw_bars(panel, chosen)
                panel.set_title(f"{pass_}, {'causal' if causal else 'full'}", fontsize=10)
        handles = {}
        for panel in axes.flat:
            bars, labels = panel.get_legend_handles_labels()
            handles |= dict(zip(labels, bars, strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        first = next(row for row in rows if row["depth"] == depth)
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
        figure.suptitle(
            f"Attention on {first['device']}, head dim {depth}, bfloat16, quantisation included ({commits})"
        )
        paths.append(folder / f"speed_{device_slug(first['device'])}_d{depth}.png")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[-1], dpi=130)
    return paths


def _draw_bars(panel, rows):
    """A group of bars a length, a bar a method, each with its TFLOP/s above it."""
    lengths = sorted({row["length"] for row in rows})
    # In the order of the colours, then whatever else was measured.
    measured = list(dict.fromkeys(row["method"] for row in rows))
    methods = [m for m in _COLOURS if m in measured] + [m for m in measured if m not in _COLOURS]
    width = 0.85 / max(1, len(methods))
    for i, method in enumerate(methods):
        speed = {row["length"]: row["tflops"] for row in rows if row["method"] == method}
        places = [lengths.index(t) + (i - (len(methods) - 1) / 2) * width for t in speed]
        bars = panel.bar(places, list(speed.values()), width, label=method, color=_COLOURS.get(method))
        panel.bar_label(bars, fmt="%.0f", fontsize=5, padding=1, rotation=90)
    panel.set_xticks(range(len(lengths)), [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in lengths])
    panel.set_xlabel("sequence length", fontsize=8)
    panel.set_ylabel("TFLOP/s", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
