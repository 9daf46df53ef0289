"""``python -m train --preset tiny``: trains one model."""

from collections.abc import Sequence

from rich.console import Console

from . import cli
from .loop import train


def main(arguments: Sequence[str]) -> None:
    """Trains with the settings given and says where the results are."""
    config = cli.parse_config(arguments, program="python -m train", description="Train a Llama-style decoder on text.")
    console = Console()
    result = train(config, console=console)
    console.print(
        f"held-out loss {result.held_out_loss:.4f} nats per token after {config.steps} steps, "
        f"{result.tokens_per_second:,.0f} tokens/s, {result.seconds:.0f} s; written to {result.run_dir}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    cli.run(main)
