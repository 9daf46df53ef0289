"""``python -m train.compare --preset tiny``: the same run with exact attention and with SageBwd, side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import cli
from .config import AttentionName, TrainConfig
from .data import load_corpus, unigram_loss
from .loop import RunResult, free_run_dir, train
from .metrics import read_metrics
from .plots import FILE_NAME as PLOT_NAME
from .plots import plot_losses


def compare(config: TrainConfig, *, console: Console) -> tuple[Path, dict[AttentionName, RunResult]]:
    """Trains twice with the same data, seed and initial parameters; only the attention differs.

    The baseline is config.model.attention when that is exact or cudnn, else exact. Returns the folder that holds both
    runs and the plot, and the results with the baseline first.
    """
    baseline: AttentionName = "exact" if config.model.attention == "sagebwd" else config.model.attention
    folder = free_run_dir(config, suffix="compare")
    names: tuple[AttentionName, ...] = (baseline, "sagebwd")
    results: dict[AttentionName, RunResult] = {}
    for name in names:
        results[name] = train(config.with_attention(name), run_dir=folder / name, console=console)
    plot_losses(
        {name: read_metrics(result.run_dir) for name, result in results.items()},
        folder / PLOT_NAME,
        baseline=unigram_loss(load_corpus(config.data)),
    )
    return folder, results


def loss_table(results: Mapping[AttentionName, RunResult]) -> Table:
    """Losses, speed and time of both runs, and the gap between the held-out losses."""
    table = Table(title="Same data, same seed", caption=f"held-out losses differ by {100 * relative_gap(results):.3f}%")
    for heading in ("attention", "training loss", "held-out loss", "tokens/s", "seconds"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.train_loss:.4f}",
            f"{result.held_out_loss:.4f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.seconds:.1f}",
        )
    return table


def relative_gap(results: Mapping[AttentionName, RunResult]) -> float:
    """How far the second held-out loss is from the first, as a share of the first; positive when it is worse."""
    baseline, other = (result.held_out_loss for result in results.values())
    return (other - baseline) / baseline


def main(arguments: Sequence[str]) -> None:
    """Compares with the settings given, prints the table and says where the results are."""
    config = cli.parse_config(
        arguments,
        program="python -m train.compare",
        description="Train twice on the same data and seed: with exact attention (cudnn if asked) and with SageBwd.",
    )
    console = Console()
    folder, results = compare(config, console=console)
    console.print(loss_table(results))
    for path in (*(result.run_dir for result in results.values()), folder / PLOT_NAME):
        console.print(f"written to {path}", soft_wrap=True)


if __name__ == "__main__":
    cli.run(main)
