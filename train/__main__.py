"""``python -m train --preset tiny``: trains one model."""

import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from . import cli
from .config import SettingError, TrainConfig
from .loop import RunResult, train
from .run_dir import CONFIG_NAME


def main(arguments: Sequence[str]) -> None:
    """Trains with the settings given and says where the results are."""
    command = cli.parse_command(
        arguments, program="python -m train", description="Train a Llama-style decoder on text or token shards."
    )
    config = command.config
    if config.distributed:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            raise SettingError(f"distributed=True: the other hosts cannot be found or reached: {error}") from error
    console = Console(quiet=jax.process_index() != 0)
    if command.run_dir is not None and not (command.run_dir / CONFIG_NAME).is_file():
        console.print(f"no run in {command.run_dir} yet: a new one starts there", soft_wrap=True)
    result = train(config, run_dir=command.run_dir, console=console, resume=command.run_dir is not None)
    if result.bad_data:
        console.print(f"left out of the data: {result.bad_data}", soft_wrap=True)
    if result.skipped:
        console.print(f"{result.skipped} steps left out, for their loss or gradient was not finite", soft_wrap=True)
    if result.stopped_by:
        console.print(_stopped(config, result), soft_wrap=True)
        return
    console.print(
        f"held-out loss {result.held_out_loss:.4f} nats per token after {result.step} steps, "
        f"{result.tokens_per_second:,.0f} tokens/s, {result.seconds:.0f} s; written to {result.run_dir}",
        soft_wrap=True,
    )


def _stopped(config: TrainConfig, result: RunResult) -> str:
    """Where a signal ended the run, and how it goes on."""
    go_on = f"go on with python -m train --resume {result.run_dir}"
    if not result.step:
        return f"stopped by {result.stopped_by} before the first step; {go_on}"
    where = f"stopped by {result.stopped_by} after step {result.step} of {config.steps}"
    if not config.checkpoint_every:
        return f"{where} without a checkpoint, for checkpoint_every=0"
    return f"{where} with a checkpoint; {go_on}"


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
