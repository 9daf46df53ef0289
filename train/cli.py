"""Command line to TrainConfig: a preset, a config.json or a run to go on with, then any setting by its own name."""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import absl.logging
import tyro

from .checkpoint import CheckpointError
from .config import PRESETS, SettingError, TrainConfig
from .data import WorkerError
from .run_dir import CONFIG_NAME, read_config, read_settings

_STARTS = (
    " --config FILE starts from a run's config.json instead of a preset. --resume RUN goes on with the run in that "
    "folder and its settings, or starts it there: the same command starts a run and restarts it after a crash."
)


@dataclasses.dataclass(frozen=True)
class Command:
    """The settings, and the folder of --resume."""

    config: TrainConfig
    run_dir: Path | None


def parse_command(arguments: Sequence[str], *, program: str, description: str) -> Command:
    """Settings from arguments such as ``--preset tiny --steps 20``; unknown ones end the program with a message.

    Raises:
      SettingError: --config names no file, or one that holds no settings; a run to go on with that is none, and nothing
        says what to start.
    """
    starts = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    starts.add_argument("--config", type=Path)
    starts.add_argument("--resume", type=Path)
    start, rest = starts.parse_known_args(list(arguments))
    if start.config is not None:
        if not start.config.is_file():
            raise SettingError(f"config={str(start.config)!r} is no file; accepted: the {CONFIG_NAME} of a run")
        defaults = read_settings(start.config)
    elif start.resume is not None and (start.resume / CONFIG_NAME).is_file():
        defaults = read_config(start.resume)
    elif start.resume is not None and not any(argument.split("=")[0] == "--preset" for argument in rest):
        raise SettingError(
            f"resume={str(start.resume)!r} is no run: it has no {CONFIG_NAME}; "
            f"give --preset or --config to start one there"
        )
    else:
        defaults = _preset_defaults(rest)
    return Command(parse_config(rest, program=program, description=description, defaults=defaults), start.resume)


def parse_config(
    arguments: Sequence[str], *, program: str, description: str, defaults: TrainConfig | None = None
) -> TrainConfig:
    """The settings alone, on top of ``defaults`` or of what --preset names."""
    return tyro.cli(
        TrainConfig,
        prog=program,
        description=description + _STARTS,
        args=list(arguments),
        default=_preset_defaults(arguments) if defaults is None else defaults,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
    )


def run(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Runs a program; what a user can cause ends it with one message and exit status 1."""
    # orbax logs each error through absl, with its threads' tracebacks, before it raises it.
    absl.logging.set_verbosity(absl.logging.FATAL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # As train/__init__.py leaves it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(arguments)
    except KeyboardInterrupt:  # What no run waited for: before it, or the second one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # The next one may come while Python ends: no traceback either.
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        # Without Python's own end, which would wait for threads of orbax that wait for what failed.
        os._exit(1)
    except (SettingError, WorkerError, NotImplementedError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {error}")


def _preset_defaults(arguments: Sequence[str]) -> TrainConfig:
    """The settings that --preset names; tyro then checks the whole line, and refuses a name that is not there."""
    preset = "tiny"
    for index, argument in enumerate(arguments):
        if argument == "--preset" and index + 1 < len(arguments):
            preset = arguments[index + 1]
        elif argument.startswith("--preset="):
            preset = argument.removeprefix("--preset=")
    return PRESETS.get(preset, PRESETS["tiny"])
