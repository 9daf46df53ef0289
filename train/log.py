"""What a run says while it runs: records for metrics.jsonl, the progress bar, and a stop at what is not finite."""

import dataclasses
import math
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import TrainConfig
from .hardware import peak_memory_bytes
from .metrics import MetricsWriter, NoMetrics
from .optimizer import learning_rate_schedule
from .step import StepMetrics


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm became NaN or infinite; the message says at which step."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """What tokens per second mean on this machine."""

    flops_per_token: float
    peak_flops: float | None  # of all devices


class StepLog:
    """Fetches metrics, refuses or counts what is not finite, writes records and moves the bar.

    Args:
      step, seconds, skipped, skipped_in_a_row: where the run goes on; see train/checkpoint.py.
    """

    def __init__(
        self,
        config: TrainConfig,
        writer: MetricsWriter | NoMetrics,
        progress: Progress,
        speed: Speed,
        *,
        step: int = 0,
        seconds: float = 0.0,
        skipped: int = 0,
        skipped_in_a_row: int = 0,
    ):
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self._config, self._writer, self._progress, self._speed = config, writer, progress, speed
        self._schedule = learning_rate_schedule(config.optimizer, config.steps)
        self._task = progress.add_task(config.model.attention, total=config.steps, completed=step, loss="-", speed="-")
        self._start = time.perf_counter() - seconds
        self._first_step = step + 1
        # Step and time of the last record, and where the clock started; None until the step that compiles is done.
        self._last: tuple[int, float] | None = None
        self._clock = self._last

    def seconds(self) -> float:
        """Of training so far, over all starts."""
        return time.perf_counter() - self._start

    def record(self, step: int, metrics: StepMetrics, *, is_idle: bool = False) -> None:
        """One step's metrics; waits for the device.

        Where a step was dispatched before, that has taken a part of its time, and the speed is right between records
        that are alike. With `is_idle` none was: the speed is then that of all steps since the clock started, but for
        what a first record, from which it starts, takes of the second step.

        Raises:
          NonFiniteLossError: by choice at the first that is not finite, or else after too many in a row.
        """
        loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
        is_finite = self._check("loss", loss, step) and self._check("gradient norm", grad_norm, step)
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        self.skipped += not is_finite
        if self.skipped_in_a_row > self._config.max_skipped_in_a_row:
            raise NonFiniteLossError(
                f"loss or gradient norm was not finite {self.skipped_in_a_row} times in a row, at step {step} too; "
                f"the run stopped there"
            )
        now = time.perf_counter()
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}")
        if is_finite and step % self._config.log_every and step not in (1, self._config.steps):
            return
        rate, since = None, self._clock if is_idle else self._last
        if since is not None:
            rate = (step - since[0]) * self._config.tokens_per_step / (now - since[1])
            self._progress.update(self._task, speed=f"{rate:,.0f}")
        self._write(
            step,
            loss=loss if is_finite else None,
            grad_norm=grad_norm if is_finite else None,
            learning_rate=np.asarray(self._schedule(self._updates(step, is_finite))).item(),
            tokens_per_second=rate,
            step_seconds=rate and self._config.tokens_per_step / rate,
            mfu=rate and self._speed.peak_flops and rate * self._speed.flops_per_token / self._speed.peak_flops,
            memory_bytes=peak_memory_bytes(),
            skipped=self.skipped,
        )
        self._last = step, now
        self._clock = self._clock or self._last

    def _updates(self, step: int, is_finite: bool) -> int:
        """How many updates of the optimizer came before this step's: one that is left out is none."""
        return step - 1 - (self.skipped - (not is_finite))

    def record_held_out(self, step: int, loss: float) -> None:
        """A held-out loss; its time does not count as training speed."""
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"held-out loss is {loss} at step {step}; the run stopped there")
        self._write(step, held_out_loss=loss)
        self.restart_clock(step)

    def record_health(self, step: int, health: dict[str, list[float]]) -> None:
        """What train/health.py measured; likewise."""
        self._write(step, **health)
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Leaves the time since the last record out of the speed."""
        self._last = (step, time.perf_counter()) if step >= self._first_step else None
        self._clock = self._last

    def _check(self, name: str, value: float, step: int) -> bool:
        """Whether a value is finite; stops the run if it should."""
        if not math.isfinite(value) and self._config.on_nonfinite == "stop":
            raise NonFiniteLossError(f"{name} is {value} at step {step}; the run stopped there")
        return math.isfinite(value)

    def _write(self, step: int, **values: Any) -> None:
        """One record."""
        tokens = step * self._config.tokens_per_step
        self._writer.write({"step": step, "tokens": tokens, "seconds": round(self.seconds(), 3), **values})


def progress_bar(console: Console | None, *, is_shown: bool) -> Progress:
    """Steps, loss, tokens per second and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        disable=not is_shown,
    )
