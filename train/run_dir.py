"""A run's folder: its name, the settings beside it, and which of them may change when the run goes on."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .config import SettingError, TrainConfig
from .data.tokenizer import FILE_NAME as TOKENIZER_NAME
from .files import write_whole

CONFIG_NAME = "config.json"
# What may differ when a run goes on. Everything else would make another model, or other batches, than those so far.
CHANGEABLE = frozenset(
    {
        *("steps", "micro_batch", "mesh", "distributed", "runs_dir", "name"),
        *("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "health_every", "health_tokens"),
        *("on_nonfinite", "max_skipped_in_a_row", "tensorboard", "peak_flops"),
        *("model.attention", "model.sage_preset", "model.recompute", "model.loss_chunk"),
        *("model.compute_dtype", "model.logits_dtype"),
        *("data.data", "data.tokenizer", "data.held_out_sequences", "data.workers"),
        *(f"optimizer.{name}" for name in ("peak_learning_rate", "final_learning_rate_ratio", "warmup_steps")),
        *(f"optimizer.{name}" for name in ("schedule", "decay_fraction", "weight_decay", "clip_norm", "z_loss")),
    }
)


def _of_first_host(path: Path) -> Path:
    """The first host's path, on every host: one that looks later finds that folder made, and would take the next."""
    if jax.process_count() == 1:
        return path
    text = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(str(path).encode(), np.uint8)
    text[: len(encoded)] = encoded
    return Path(bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b"\0").decode())


def free_run_dir(config: TrainConfig, suffix: str | None = None) -> Path:
    """runs_dir/name, or the first of name-2, name-3, ... that is not there yet: no run overwrites another.

    Of several hosts the first looks, for all.
    """
    name = config.name or f"{config.preset}-{suffix or config.model.attention}"
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    paths = (Path(config.runs_dir) / candidate for candidate in candidates)
    return _of_first_host(next(path for path in paths if not path.exists()))


def meet_hosts(place: str) -> None:
    """Waits until every host has come to this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def make_run_dir(run_dir: Path, *, may_exist: bool) -> None:
    """Makes a run's folder.

    Raises:
      SettingError: it is there already, or cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=may_exist)
    except OSError as error:
        raise SettingError(
            f"run folder {str(run_dir)!r} cannot be made: {error.strerror}; "
            f"accepted: a folder that can be, by runs_dir, name or --resume"
        ) from error


def read_config(run_dir: Path) -> TrainConfig:
    """The settings of a run.

    Raises:
      FileNotFoundError: no run is there.
    """
    path = run_dir / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{str(run_dir)!r} is no run: it has no {CONFIG_NAME}")
    return read_settings(path)


def read_settings(path: Path) -> TrainConfig:
    """The settings in a file.

    Raises:
      SettingError: it holds no settings, or some that are refused.
    """
    try:
        return TrainConfig.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(f"{path}: {error}") from error


def write_config(run_dir: Path, config: TrainConfig, *, step: int = 0) -> None:
    """Writes the settings of the steps after ``step``; those before keep theirs, if others, as config.step-N.json."""
    path, kept = run_dir / CONFIG_NAME, run_dir / f"config.step-{step}.json"
    # One that is there is of the steps before; what came between went on to no checkpoint.
    if step and path.is_file() and not kept.exists() and read_config(run_dir) != config:
        write_whole(kept, path.read_bytes())
    write_whole(path, config.to_json().encode())


def keep_tokenizer(run_dir: Path, path: str | None, *, step: int = 0) -> None:
    """Copies a run's tokenizer beside its settings: a path in them need not lead anywhere later, or from elsewhere.

    Raises:
      SettingError: the run has made ``step`` steps with another one.
    """
    if path is None:
        return
    own, content = run_dir / TOKENIZER_NAME, Path(path).read_bytes()
    if step and own.is_file() and own.read_bytes() != content:
        raise SettingError(f"tokenizer={path!r} is not that of the run's first {step} steps; accepted: {own}")
    write_whole(own, content)


def check_continues(old: TrainConfig, new: TrainConfig) -> None:
    """Refuses settings that a run cannot go on with.

    Raises:
      SettingError: names the setting, both values, and what may change.
    """
    before, after = dict(_flat(dataclasses.asdict(old))), dict(_flat(dataclasses.asdict(new)))
    for name in sorted(before):
        if before[name] != after[name] and name not in CHANGEABLE:
            raise SettingError(
                f"{name}={after[name]!r}: the run has {before[name]!r} and cannot go on with another; "
                f"what may change: {', '.join(sorted(CHANGEABLE))}"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting under its dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
