"""The training loop: batches in, steps dispatched, metrics, held-out losses, health and checkpoints out."""

import contextlib
import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich import get_console
from rich.console import Console

from .checkpoint import Checkpoints, Progress
from .config import SettingError, TrainConfig
from .data import Corpus, WorkerError, find_tokenizer, held_out_batches, load_corpus, training_batches, unigram_loss
from .hardware import flops_per_token, peak_flops
from .health import make_probe
from .log import NonFiniteLossError as NonFiniteLossError
from .log import Speed, StepLog, progress_bar
from .mesh import BATCH_AXES, P, batch_shards, make_mesh
from .metrics import MetricsWriter, NoMetrics, read_metrics, series
from .model import count_parameters, select_attention
from .optimizer import make_optimizer
from .plots import FILE_NAME as PLOT_NAME
from .plots import plot_losses
from .run_dir import (
    CONFIG_NAME,
    check_continues,
    free_run_dir,
    keep_tokenizer,
    make_run_dir,
    meet_hosts,
    read_config,
    write_config,
)
from .step import StepMetrics, abstract_model, abstract_state, init_model, init_state, make_eval_step, make_train_step
from .stop import StopRequest


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What is left of a run, besides its folder."""

    run_dir: Path
    train_loss: float  # nats per token, mean of the last tenth of the records
    held_out_loss: float  # nats per token, the last one; NaN if there is none yet
    tokens_per_second: float  # without compilation and held-out losses
    seconds: float  # of this start, everything
    step: int  # the last one done
    stopped_by: str | None = None  # the signal that ended it before its last step
    skipped: int = 0  # steps left out, not finite
    bad_data: str | None = None  # what damaged data was left out


def train(
    config: TrainConfig, *, run_dir: Path | None = None, console: Console | None = None, resume: bool = False
) -> RunResult:
    """Trains one model and writes config.json, metrics.jsonl, loss.png and checkpoints into its folder.

    SIGTERM and Ctrl-C end it after the step at work, with a checkpoint, or before the first step.

    Args:
      config: every setting.
      run_dir: the folder; None for the next free one under config.runs_dir.
      console: where the amount of data and the progress bar go; None for the terminal.
      resume: go on from the newest checkpoint in run_dir if there is one; the losses are then those of an unbroken run.
        Whether new ones are written is config.checkpoint_every's to say.

    Raises:
      FileNotFoundError, SettingError: the data or a setting cannot be used; nothing is written then.
      CheckpointError: a checkpoint could not be written or read.
      NonFiniteLossError: the run stopped; metrics.jsonl holds what came before.
      WorkerError: a data worker has died; the message says how the run goes on.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # First: a signal while the data is read ends the run in order too.
        stop = stack.enter_context(StopRequest())
        mesh = make_mesh(config.mesh, config.model)
        config.accumulation(batch_shards(mesh))
        select_attention(config.model.attention)  # Which this machine may not have.
        run_dir = free_run_dir(config) if run_dir is None else run_dir
        is_there = resume and (run_dir / CONFIG_NAME).is_file()
        if is_there:
            check_continues(read_config(run_dir), config)
        corpus = load_corpus(config.data, config.model.vocab_size)
        is_writer = jax.process_index() == 0
        console = (console or get_console()) if is_writer else Console(quiet=True)
        console.print(corpus.summary(config.data.max_bytes), soft_wrap=True)
        if is_writer and not is_there:
            make_run_dir(run_dir, may_exist=resume)
        meet_hosts("the run's folder is there")
        checkpoints = Checkpoints(run_dir, keep=config.keep_checkpoints, read_only=not config.checkpoint_every)
        stack.enter_context(contextlib.closing(checkpoints))
        first = checkpoints.latest() or 0
        if config.steps < first:
            raise SettingError(
                f"steps={config.steps}: the run has a checkpoint of step {first}; steps must be at least that"
            )
        if is_there and not first:
            console.print(f"no checkpoint in {run_dir} yet: the run starts again at its first step", soft_wrap=True)
        # With no step left to make, they say nothing about the run.
        if is_writer and first < config.steps:
            keep_tokenizer(run_dir, find_tokenizer(config.data), step=first)
            write_config(run_dir, config, step=first)
        session = _Session(config, run_dir, mesh, corpus, checkpoints)
        writer: MetricsWriter | NoMetrics = NoMetrics()
        if is_writer:
            writer = stack.enter_context(
                MetricsWriter(run_dir, step=session.progress.step, tensorboard=config.tensorboard)
            )
        bar = stack.enter_context(progress_bar(console, is_shown=is_writer))
        log = session.make_log(writer, bar)
        try:
            step = session.run(log, stop)
        except WorkerError as error:
            raise WorkerError(f"{error}; {session.how_to_go_on()}") from error
    session.draw()
    return RunResult(
        run_dir=run_dir,
        **_results(read_metrics(run_dir)),
        seconds=time.perf_counter() - start,
        step=step,
        stopped_by=stop.signal if step < config.steps else None,
        skipped=log.skipped,
        bad_data=f"{corpus.skipped.count} damaged, first: {corpus.skipped.first}" if corpus.skipped.count else None,
    )


def _results(records: list[dict[str, Any]]) -> dict[str, float]:
    """What RunResult takes from a run's records; NaN for what there is none of."""
    losses, held_out, speeds = (series(records, name)[1] for name in ("loss", "held_out_loss", "tokens_per_second"))
    return dict(
        train_loss=float(np.mean(losses[-math.ceil(len(losses) / 10) :])) if losses else math.nan,
        held_out_loss=held_out[-1] if held_out else math.nan,
        tokens_per_second=float(np.median(speeds)) if speeds else math.nan,
    )


class _Due(NamedTuple):
    """What there is to do after a step."""

    held_out: bool
    health: bool
    checkpoint: bool


class _Session:
    """One start of a run: what it computes with, and where it is."""

    def __init__(self, config: TrainConfig, run_dir: Path, mesh: Mesh, corpus: Corpus, checkpoints: Checkpoints):
        self.config, self.run_dir, self.mesh, self.corpus, self.checkpoints = config, run_dir, mesh, corpus, checkpoints
        self.shards = batch_shards(mesh)
        optimizer = make_optimizer(config.optimizer, config.steps)
        keeps_ema = config.optimizer.ema_decay > 0
        if checkpoints.latest() is not None:
            self.graphdef, shapes = abstract_model(config.model)
            like = abstract_state(shapes, optimizer, keeps_ema=keeps_ema, mesh=mesh)
            self.state, self.progress = checkpoints.restore(like)
        else:
            self.graphdef, params = init_model(config.model, config.seed, mesh)
            self.state = init_state(params, optimizer, keeps_ema=keeps_ema, mesh=mesh)
            self.progress = Progress(step=0, seconds=0.0, skipped=0)
        self.parameters = count_parameters(self.state.params)
        self.train_step = make_train_step(
            self.graphdef, optimizer, z_loss=config.optimizer.z_loss, ema_decay=config.optimizer.ema_decay
        )
        self.eval_step = make_eval_step(self.graphdef)
        self.probe = make_probe(self.graphdef, config.model)
        self.baseline = unigram_loss(corpus, config.model.vocab_size)

    def make_log(self, writer: MetricsWriter | NoMetrics, bar: Any) -> StepLog:
        """The log, where the run goes on."""
        config = self.config
        peak = config.peak_flops or peak_flops(self.mesh.devices.flat[0])
        speed = Speed(
            flops_per_token(config.model, self.parameters, config.data.sequence_length),
            peak and peak * self.mesh.devices.size,
        )
        return StepLog(config, writer, bar, speed, **dataclasses.asdict(self.progress))

    def run(self, log: StepLog, stop: StopRequest) -> int:
        """All steps that are left; returns the last one done."""
        config, step = self.config, self.progress.step
        if stop.is_made(0):
            return step
        sharding = NamedSharding(self.mesh, P(None, BATCH_AXES, None))
        # Step n is dispatched before the metrics of step n - 1 are fetched, so that the device never waits for Python.
        pending: StepMetrics | None = None
        with contextlib.closing(training_batches(config, self.corpus, sharding, self.shards, step)) as batches:
            for batch in batches:
                step += 1
                with _on(self.mesh):
                    self.state, metrics = self.train_step(self.state, *batch)
                if pending is not None:
                    log.record(step - 1, pending)
                pending = metrics
                self.checkpoints.check()
                is_stopped = stop.is_made(step)
                due = self._due(step, is_stopped)
                if any(due):
                    log.record(step, pending, is_idle=True)
                    pending = None
                    self._do(due, step, log)
                if is_stopped:
                    break
        if pending is not None:
            log.record(step, pending, is_idle=True)
        self.checkpoints.wait()
        return step

    def how_to_go_on(self) -> str:
        """What to do once a data worker has died."""
        (last, failure), resume = self.checkpoints.last_whole(), f"python -m train --resume {self.run_dir}"
        where = f"the checkpoint of step {last} is whole: go on from it with {resume}"
        if last is None:
            where = f"there is no checkpoint: {resume} starts again at the first step"
        if failure is not None:
            where = f"{failure}; {where}"
        workers = self.config.data.workers
        return f"{where}; if memory ran out, with fewer --workers than {workers} (0 reads ahead in threads)"

    def _due(self, step: int, is_stopped: bool) -> _Due:
        """What follows a step."""
        config, is_last = self.config, step == self.config.steps
        is_probed = bool(config.health_every) and (is_last or step % config.health_every == 0)
        return _Due(
            held_out=is_last or step % config.eval_every == 0,
            health=is_probed and config.model.attention == "sagebwd",
            checkpoint=bool(config.checkpoint_every) and (is_last or is_stopped or step % config.checkpoint_every == 0),
        )

    def _do(self, due: _Due, step: int, log: StepLog) -> None:
        """Does it; the checkpoint last, so that all records of the step are there when it is."""
        if due.held_out:
            log.record_held_out(step, self.held_out_loss())
            self.draw()
        if due.health:
            log.record_health(step, self.health())
        if due.checkpoint:
            progress = Progress(step, log.seconds(), log.skipped, log.skipped_in_a_row)
            self.checkpoints.save(self.state, progress)
            log.restart_clock(step)

    def held_out_loss(self) -> float:
        """Mean loss in nats per token over the held-out sequences, of the moving average if there is one."""
        config, sums = self.config, []
        params = self.state.params if self.state.ema is None else self.state.ema
        batches = held_out_batches(
            self.corpus,
            sequences=config.data.held_out_sequences,
            batch=config.micro_batch * self.shards,
            length=config.data.sequence_length,
            packed=config.data.documents == "packed",
        )
        for batch, weights in batches:
            placed = [self._place(array) for array in (*batch, weights)]
            with _on(self.mesh):
                sums.append(self.eval_step(params, *placed))
        return sum(float(loss) for loss, _ in sums) / sum(float(count) for _, count in sums)

    def health(self) -> dict[str, list[float]]:
        """What SageBwd's quantisation costs each layer on one held-out sequence, on one device."""
        length = min(self.config.health_tokens, self.config.data.sequence_length)
        tokens = self.corpus.held_out.read(0, length + 1)[None]
        params = self.state.params
        if self.mesh.size > 1:
            whole = jax.jit(lambda params: params, out_shardings=NamedSharding(self.mesh, P()))(params)
            params = jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
        return {
            name: np.asarray(value, np.float64).tolist()
            for name, value in self.probe(params, jnp.asarray(tokens)).items()
        }

    def draw(self) -> None:
        """loss.png, from the records so far."""
        if jax.process_index():
            return
        path = self.run_dir / PLOT_NAME
        try:
            plot_losses({self.config.model.attention: read_metrics(self.run_dir)}, path, baseline=self.baseline)
        except OSError as error:  # A picture is nothing to end a run for.
            logging.warning("%s could not be drawn: %s", path, error)

    def _place(self, array: Any) -> jax.Array | None:
        """A held-out batch, its sequences spread over the mesh."""
        if array is None:
            return None
        sharding = NamedSharding(self.mesh, P(BATCH_AXES))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _on(mesh: Mesh) -> Any:
    """The context in which the model says how its activations lie; on one device it has nothing to say."""
    return jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext()
