"""``python -m train.sample RUN --prompt TEXT``: text from a run's newest checkpoint."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console

from . import cli
from .checkpoint import Checkpoints
from .config import BYTE_VOCABULARY, AttentionName, SettingError, TrainConfig
from .data.corpus import find_tokenizer, is_text
from .data.tokenizer import FILE_NAME as TOKENIZER_NAME
from .data.tokenizer import TextTokenizer, load_tokenizer
from .mesh import make_mesh, state_shardings
from .model import Decoder
from .run_dir import read_config
from .step import abstract_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What to write."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run (path)."""
    prompt: str = "\n"
    """What to go on from (text)."""
    tokens: int = 256
    """Tokens to write (count)."""
    temperature: float = 0.8
    """Logits are divided by this (unitless); 0 takes the likeliest token."""
    top_k: int = 50
    """Likeliest tokens to choose among (count)."""
    seed: int = 0
    """Of the choices (integer)."""
    attention: AttentionName | None = None
    """Another attention than the run's (name)."""
    tokenizer: str | None = None
    """A tokenizer.json (path), or "bytes"; None takes the run's own."""


def sample(model: Decoder, prompt: Sequence[int], config: SampleConfig, length: int) -> list[int]:
    """Tokens after a prompt; the model sees the last ``length`` of them.

    The whole window is computed again for each token, in one shape: a cache would need another attention.
    """
    graphdef, params = nnx.split(model)

    @jax.jit
    def choose(params: Any, window: Any, last: Any, key: Any) -> Any:
        model = nnx.merge(graphdef, params)
        x = model.hidden(model.embed(window[None]))
        logits = model.project(jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1))[0, 0]
        if config.temperature == 0:
            return jnp.argmax(logits)
        best, tokens = jax.lax.top_k(logits, min(config.top_k, logits.size))
        return tokens[jax.random.categorical(key, best / config.temperature)]

    tokens = list(prompt)
    for key in jax.random.split(jax.random.key(config.seed), config.tokens):
        window = tokens[-length:]
        # What follows the last token is padding, which causal attention never sees.
        padded = np.asarray(window + [0] * (length - len(window)), np.int32)
        tokens.append(int(choose(params, padded, len(window) - 1, key)))
    return tokens[len(prompt) :]


def load_model(run_dir: Path, attention: AttentionName | None) -> tuple[TrainConfig, Decoder, int]:
    """A run's settings, the model of its newest checkpoint (the moving average if there is one), and its step.

    Raises:
      FileNotFoundError: no run is there. CheckpointError: no checkpoint.
    """
    config = read_config(run_dir)
    model = config.model if attention is None else dataclasses.replace(config.model, attention=attention)
    graphdef, shapes = abstract_model(model)
    mesh = make_mesh("data=1", model, jax.devices()[:1])
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )
    checkpoints = Checkpoints(run_dir, keep=config.keep_checkpoints, read_only=True)
    try:
        params, step = checkpoints.restore_params(like, ema=config.optimizer.ema_decay > 0)
    finally:
        checkpoints.close()
    return config, nnx.merge(graphdef, params), step


def run_tokenizer(run_dir: Path, config: TrainConfig, named: str | None) -> TextTokenizer:
    """What turns a run's tokens into text: what is named, else the file in the run's folder, else that of its data.

    Raises:
      SettingError: there is none, and the tokens are not bytes.
    """
    own = run_dir / TOKENIZER_NAME
    path = named or (str(own) if own.is_file() else find_tokenizer(config.data))
    if path is None and config.model.vocab_size > BYTE_VOCABULARY and not is_text(config.data):
        raise SettingError(
            f"run={str(run_dir)!r} has no {TOKENIZER_NAME}, nor has its data {config.data.data!r}; "
            f"give --tokenizer PATH, or --tokenizer bytes if its tokens are bytes"
        )
    # Nothing here asks for a separator, and a tokenizer need not have one.
    return load_tokenizer(None if path == "bytes" else path, 0, config.model.vocab_size)


def main(arguments: Sequence[str]) -> None:
    """Writes the prompt and what follows it."""
    options = tyro.cli(
        SampleConfig,
        prog="python -m train.sample",
        description="Write text with a trained model.",
        args=list(arguments),
    )
    for name, least in (("tokens", 1), ("top_k", 1), ("temperature", 0)):
        if getattr(options, name) < least:
            raise SettingError(f"{name}={getattr(options, name)} must be at least {least}")
    config, model, step = load_model(options.run, options.attention)
    tokenizer = run_tokenizer(options.run, config, options.tokenizer)
    [prompt] = tokenizer.encode([options.prompt.encode("utf-8")])
    if not len(prompt):
        raise SettingError(f"prompt={options.prompt!r} has no tokens")
    written = sample(model, prompt.tolist(), options, config.data.sequence_length)
    Console(stderr=True).print(f"{options.run}, step {step}", soft_wrap=True)
    print(options.prompt + tokenizer.decode(written))


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
