"""Runs side by side.

``python -m train.compare --preset tiny`` trains twice on the same data and seed, with exact attention and SageBwd;
``python -m train.compare RUN RUN ...`` shows runs that are there: a table, and their losses over tokens and over time.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import cli
from .config import AttentionName, SettingError, TrainConfig
from .data import load_corpus, unigram_loss
from .loop import RunResult, train
from .metrics import read_metrics, series
from .plots import FILE_NAME as PLOT_NAME
from .plots import plot_losses
from .run_dir import free_run_dir, read_config

PLOT_NAMES = {"tokens": "compare_tokens.png", "seconds": "compare_seconds.png"}


def compare(config: TrainConfig, *, console: Console) -> tuple[Path, dict[AttentionName, RunResult]]:
    """Trains twice with the same data, seed and initial parameters; only the attention differs.

    The baseline is config.model.attention when that is exact or cudnn, else exact. Returns the folder that holds both
    runs and the plot, and the results with the baseline first. A signal ends both; their results are then not whole.
    """
    baseline: AttentionName = "exact" if config.model.attention == "sagebwd" else config.model.attention
    folder = free_run_dir(config, suffix="compare")
    names: tuple[AttentionName, ...] = (baseline, "sagebwd")
    results: dict[AttentionName, RunResult] = {}
    for name in names:
        results[name] = train(config.with_attention(name), run_dir=folder / name, console=console)
        if results[name].stopped_by:
            return folder, results
    plot_losses(
        {name: read_metrics(result.run_dir) for name, result in results.items()},
        folder / PLOT_NAME,
        baseline=unigram_loss(load_corpus(config.data, config.model.vocab_size), config.model.vocab_size),
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


def runs_table(run_dirs: Sequence[Path]) -> Table:
    """One line a run: how far it came, and its last held-out loss beside the first run's after as many tokens."""
    caption = "gap: held-out loss against the first run's after as many tokens"
    # Narrow, so that the names of runs have room in 80 columns.
    table = Table(caption=caption, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("run", "attention", "step", "held out", "gap", "tokens/s", "hours", "skipped"):
        justify = "left" if heading in ("run", "attention") else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading != "run")
    first = dict(zip(*series(read_metrics(run_dirs[0]), "held_out_loss", "tokens"), strict=True))
    for run_dir in run_dirs:
        config, records = read_config(run_dir), read_metrics(run_dir)
        if not records:
            raise SettingError(f"{str(run_dir)!r} has no records yet")
        tokens, losses = series(records, "held_out_loss", "tokens")
        speeds = sorted(series(records, "tokens_per_second")[1])
        table.add_row(
            str(run_dir),
            config.model.attention,
            f"{records[-1]['step']}/{config.steps}",
            f"{losses[-1]:.4f}" if losses else "-",
            f"{100 * (losses[-1] / first[tokens[-1]] - 1):+.2f}%" if tokens and tokens[-1] in first else "-",
            f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-",
            f"{records[-1]['seconds'] / 3600:.2f}",
            str((series(records, "skipped")[1] or [0])[-1]),
        )
    return table


def compare_runs(run_dirs: Sequence[Path], output: Path, *, console: Console) -> None:
    """Prints runs_table and draws PLOT_NAMES into a folder."""
    console.print(runs_table(run_dirs))
    runs = {str(run_dir): read_metrics(run_dir) for run_dir in run_dirs}
    for axis, name in PLOT_NAMES.items():
        plot_losses(runs, output / name, axis=axis)
        console.print(f"written to {output / name}", soft_wrap=True)


def main(arguments: Sequence[str]) -> None:
    """Compares with the settings given, prints the table and says where the results are."""
    console = Console()
    if arguments and not arguments[0].startswith("-"):
        if options := [argument for argument in arguments if argument.startswith("-")]:
            raise SettingError(f"{' '.join(options)}: with folders of runs there are no options")
        run_dirs = [Path(argument) for argument in arguments]
        compare_runs(run_dirs, run_dirs[0].parent, console=console)
        return
    command = cli.parse_command(
        arguments,
        program="python -m train.compare",
        description="Train twice on the same data and seed: with exact attention (cudnn if asked) and with SageBwd. "
        "Or, with folders of runs as the only arguments: a table of them, and their losses over tokens and time.",
    )
    if command.run_dir is not None:
        raise SettingError(
            f"--resume {command.run_dir}: a comparison starts anew; resume its runs with python -m train"
        )
    folder, results = compare(command.config, console=console)
    if stopped := next((result for result in results.values() if result.stopped_by), None):
        console.print(f"stopped by {stopped.stopped_by} in {stopped.run_dir} at step {stopped.step}", soft_wrap=True)
        return
    console.print(loss_table(results))
    for path in (*(result.run_dir for result in results.values()), folder / PLOT_NAME):
        console.print(f"written to {path}", soft_wrap=True)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
