"""The training loop: batches in, steps dispatched, metrics out, and a stop at the first loss that is not finite."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import TrainConfig
from .data import Corpus, held_out_batches, load_corpus, training_batch, unigram_loss
from .metrics import MetricsWriter, read_metrics
from .optimizer import learning_rate_schedule, make_optimizer
from .plots import FILE_NAME as PLOT_NAME
from .plots import plot_losses
from .step import StepMetrics, TrainState, init_model, make_eval_step, make_train_step

CONFIG_NAME = "config.json"


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm became NaN or infinite; the message says at which step."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What is left of a run, besides its folder."""

    run_dir: Path
    train_loss: float  # nats per token, mean of the last tenth of the records
    held_out_loss: float  # nats per token, after the last step
    tokens_per_second: float  # without compilation and held-out losses
    seconds: float  # everything


def train(config: TrainConfig, *, run_dir: Path | None = None, console: Console | None = None) -> RunResult:
    """Trains one model and writes config.json, metrics.jsonl and loss.png into its folder.

    Args:
      config: every setting.
      run_dir: the folder; None for the next free one under config.runs_dir.
      console: where the progress bar goes; None for the terminal.

    Raises:
      FileNotFoundError, SettingError: the data or a setting cannot be used; nothing is written then.
      NonFiniteLossError: the run stopped; metrics.jsonl holds what came before.
    """
    start = time.perf_counter()
    corpus = load_corpus(config.data)
    graphdef, params = init_model(config.model, config.seed)
    run_dir = free_run_dir(config) if run_dir is None else run_dir
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_NAME).write_text(config.to_json(), encoding="utf-8")
    with MetricsWriter(run_dir) as writer, _progress_bar(console) as progress:
        _run(config, corpus, graphdef, params, writer, progress)
    records = read_metrics(run_dir)
    plot_losses({config.model.attention: records}, run_dir / PLOT_NAME, baseline=unigram_loss(corpus))
    losses = [record["loss"] for record in records if "loss" in record]
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    return RunResult(
        run_dir=run_dir,
        train_loss=float(np.mean(losses[-math.ceil(len(losses) / 10) :])),
        held_out_loss=[record["held_out_loss"] for record in records if "held_out_loss" in record][-1],
        tokens_per_second=float(np.median(speeds)) if speeds else math.nan,
        seconds=time.perf_counter() - start,
    )


def free_run_dir(config: TrainConfig, suffix: str | None = None) -> Path:
    """runs_dir/name, or the first of name-2, name-3, ... that is not there yet: no run overwrites another."""
    name = config.name or f"{config.preset}-{suffix or config.model.attention}"
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (Path(config.runs_dir) / candidate for candidate in candidates) if not path.exists())


def _run(
    config: TrainConfig, corpus: Corpus, graphdef: Any, params: Any, writer: MetricsWriter, progress: Progress
) -> None:
    """All steps of a run, from the initial parameters."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = TrainState(params, optimizer.init(params))
    train_step, eval_step = make_train_step(graphdef, optimizer), make_eval_step(graphdef)
    log = _StepLog(config, writer, progress)
    # Step n is dispatched before the metrics of step n - 1 are fetched, so that the device never waits for Python.
    pending: StepMetrics | None = None
    for step, batch in enumerate(_batches(config, corpus), start=1):
        state, metrics = train_step(state, jnp.asarray(batch))
        if pending is not None:
            log.record(step - 1, pending)
        pending = metrics
        if step % config.eval_every == 0 or step == config.steps:
            log.record(step, pending)
            pending = None
            log.record_held_out(step, _held_out_loss(config, corpus, eval_step, state.params))


def _batches(config: TrainConfig, corpus: Corpus) -> Iterator[np.ndarray]:
    """The tokens of every step."""
    for step in range(config.steps):
        yield training_batch(
            corpus,
            seed=config.seed,
            step=step,
            accumulation=config.accumulation,
            micro_batch=config.micro_batch,
            sequence_length=config.data.sequence_length,
        )


def _held_out_loss(config: TrainConfig, corpus: Corpus, eval_step: Any, params: Any) -> float:
    """Mean loss in nats per token over the held-out sequences."""
    batches = held_out_batches(
        corpus,
        sequences=config.data.held_out_sequences,
        micro_batch=config.micro_batch,
        sequence_length=config.data.sequence_length,
    )
    weighted = [(eval_step(params, jnp.asarray(batch)), len(batch)) for batch in batches]
    return sum(float(loss) * count for loss, count in weighted) / sum(count for _, count in weighted)


class _StepLog:
    """Fetches metrics, refuses what is not finite, writes records and moves the bar."""

    def __init__(self, config: TrainConfig, writer: MetricsWriter, progress: Progress):
        self._config = config
        self._writer = writer
        self._progress = progress
        self._schedule = learning_rate_schedule(config.optimizer, config.steps)
        self._task = progress.add_task(config.model.attention, total=config.steps, loss="-", speed="-")
        self._last_step = 0
        self._last_time: float | None = None  # None until the step that compiles is done

    def record(self, step: int, metrics: StepMetrics) -> None:
        """One step's metrics; waits for the device."""
        loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
        _require_finite("loss", loss, step)
        _require_finite("gradient norm", grad_norm, step)
        now = time.perf_counter()
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}")
        if step % self._config.log_every and step not in (1, self._config.steps):
            return
        speed = None
        if self._last_time is not None:
            speed = (step - self._last_step) * self._config.tokens_per_step / (now - self._last_time)
            self._progress.update(self._task, speed=f"{speed:,.0f}")
        self._writer.write(
            {
                "step": step,
                "tokens": step * self._config.tokens_per_step,
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": np.asarray(self._schedule(step - 1)).item(),
                "tokens_per_second": speed,
            }
        )
        self._last_step, self._last_time = step, now

    def record_held_out(self, step: int, loss: float) -> None:
        """A held-out loss; its time does not count as training."""
        _require_finite("held-out loss", loss, step)
        self._writer.write({"step": step, "tokens": step * self._config.tokens_per_step, "held_out_loss": loss})
        self._last_step, self._last_time = step, time.perf_counter()


def _require_finite(name: str, value: float, step: int) -> None:
    """Stops the run."""
    if not math.isfinite(value):
        raise NonFiniteLossError(f"{name} is {value} at step {step}; the run stopped there")


def _progress_bar(console: Console | None) -> Progress:
    """Steps, loss, tokens per second and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
