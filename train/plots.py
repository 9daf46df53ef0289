"""loss.png: training and held-out loss; several runs share the axes, and their differences are below."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .metrics import series

FILE_NAME = "loss.png"
AXIS_LABELS = {"step": "optimizer step", "tokens": "tokens", "seconds": "seconds of training"}
# A run's training loss is drawn twice: every record faintly, and the mean over this share of the run.
SMOOTHED_SHARE = 1 / 30

Records = list[dict[str, Any]]


def plot_losses(runs: Mapping[str, Records], path: Path, *, baseline: float | None = None, axis: str = "step") -> None:
    """Draws every run's records, keyed by its label, into a PNG, against steps, tokens or seconds.

    ``baseline`` is the loss of token frequencies alone. The file is whole at any time.
    """
    figure = Figure(figsize=(8, 5 if len(runs) == 1 else 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # Agg by name: no display and no global pyplot state.
    if len(runs) == 1:
        axes = bottom = figure.add_subplot()
    else:
        axes, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_differences(bottom, runs, axis)
    for index, (label, records) in enumerate(runs.items()):
        # Runs that agree lie on top of each other: later ones are dashed, with bigger markers.
        style: dict[str, Any] = dict(color=f"C{index}", linestyle="--" if index else "-")
        places, losses = series(records, "loss", axis)
        axes.plot(places, losses, color=f"C{index}", alpha=0.2, linewidth=0.8)
        axes.plot(*_smooth(places, losses), **style, linewidth=1.4, label=f"{label}, training")
        places, losses = series(records, "held_out_loss", axis)
        axes.plot(places, losses, "o", color=f"C{index}", ms=5 + 3 * index, mfc="none", label=f"{label}, held out")
    if baseline is not None:
        axes.axhline(baseline, color="gray", linestyle=":", label="token frequencies alone")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    bottom.set_xlabel(AXIS_LABELS[axis])
    partial = path.with_suffix(".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)


def _draw_differences(axes: Axes, runs: Mapping[str, Records], axis: str) -> None:
    """What every other run's loss is above the first one's, at the first one's places, where both have been."""
    (first_label, first), *others = runs.items()
    for index, (label, records) in enumerate(others, start=1):
        for name, draw in (("loss", _smooth), ("held_out_loss", lambda *points: points)):
            places, losses = series(first, name, axis)
            other_places, other_losses = series(records, name, axis)
            if not places or not other_places:
                continue
            difference = np.interp(places, other_places, other_losses, right=np.nan) - np.asarray(losses)
            marker: dict[str, Any] = dict(linewidth=1.4) if name == "loss" else dict(marker="o", mfc="none", ls="none")
            axes.plot(*draw(places, difference), color=f"C{index}", **marker)
        axes.set_ylabel(f"{label} - {first_label}" if len(others) == 1 else f"above {first_label}")
    axes.axhline(0, color="C0", linewidth=0.8)
    axes.grid(alpha=0.3)


def _smooth(places: Any, losses: Any) -> tuple[np.ndarray, np.ndarray]:
    """Running mean over SMOOTHED_SHARE of the records, at the middle of each window."""
    if not len(losses):
        return np.zeros(0), np.zeros(0)
    window = max(1, round(len(losses) * SMOOTHED_SHARE))
    mean = np.ones(window) / window
    return np.convolve(places, mean, "valid"), np.convolve(losses, mean, "valid")
