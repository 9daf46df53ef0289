"""What the training tests share: a small configuration, a folder of text, and what a run computed.

Every axis of the configuration has a size of its own, so that swapped axes cannot pass.
"""

import contextlib
import dataclasses
import io
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from train.metrics import read_metrics, series


def micro_config(**overrides: Any) -> TrainConfig:
    """Two layers of width 40, 6 query and 3 key heads of 8 channels; overrides go to whichever part has that name."""
    config = TrainConfig(
        preset="tiny",
        steps=20,
        tokens_per_step=4 * 24,
        micro_batch=4,
        log_every=1,
        eval_every=10,
        checkpoint_every=0,
        health_every=0,
        tensorboard=False,
        model=ModelConfig(
            attention="exact",
            num_layers=2,
            width=40,
            ffn_width=56,
            num_heads=6,
            num_kv_heads=3,
            head_dim=8,
            vocab_size=256,
            compute_dtype="float32",
            loss_chunk=24,
        ),
        data=DataConfig(sequence_length=24, held_out_sequences=7),
        optimizer=OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=5),
    )
    parts = {}
    for part in ("model", "data", "optimizer"):
        # DataConfig has a field `data` of its own; as an override that name means the field.
        names = {field.name for field in dataclasses.fields(getattr(config, part))} & overrides.keys()
        parts[part] = dataclasses.replace(getattr(config, part), **{name: overrides.pop(name) for name in names})
    return dataclasses.replace(config, **parts, **overrides)


def run_config(text: str, folder: Path, **overrides: Any) -> TrainConfig:
    """One layer, of that text, whose runs lie in that folder."""
    return micro_config(data=text, held_out_fraction=0.2, runs_dir=str(folder), **(dict(num_layers=1) | overrides))


def quiet() -> Console:
    """A console whose `file` holds what was printed."""
    return Console(file=io.StringIO(), width=200)


def write_text(folder: Path, files: int = 12) -> str:
    """A folder of distinct text files, about 1.3 kB each; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        lines = [f"def function_{index}_{line}(value):\n    return value + {line}\n" for line in range(25)]
        (folder / f"module_{index}.py").write_text("".join(lines))
    return str(folder)


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As if the disk were full: no file can be written beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def curve(run_dir: Path) -> dict[str, Any]:
    """What a run computed, bit by bit: no times, no memory."""
    records = read_metrics(run_dir)
    return {name: series(records, name) for name in ("loss", "grad_norm", "learning_rate", "held_out_loss", "skipped")}
