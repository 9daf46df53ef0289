"""Command line to TrainConfig: a preset, then any setting by its own name."""

import sys
from collections.abc import Callable, Sequence

import tyro

from .config import PRESETS, SettingError, TrainConfig


def parse_config(arguments: Sequence[str], *, program: str, description: str) -> TrainConfig:
    """Settings from arguments such as ``--preset tiny --steps 20``; unknown ones end the program with a message."""
    return tyro.cli(
        TrainConfig,
        prog=program,
        description=description,
        args=list(arguments),
        default=_preset_defaults(arguments),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
    )


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a program; what a user can cause ends it with one message and exit status 1."""
    try:
        main(sys.argv[1:])
    except (SettingError, FileNotFoundError, FloatingPointError) as error:
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
