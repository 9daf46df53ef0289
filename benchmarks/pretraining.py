"""``python -m benchmarks.pretraining --preset 325m``: time of a training step with each attention, on random tokens.

The step is train/'s own: forward, backward, clipping and AdamW, bfloat16 compute and float32 parameters. The attentions
take turns, so that a drift of the clock hits all of them.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax

from benchmarks import cases, records
from train.config import PRESETS, AttentionName, TrainConfig
from train.optimizer import make_optimizer
from train.step import TrainState, init_model, make_train_step

ATTENTIONS = ("sagebwd", "sagebwd mixed", "cudnn", "exact")


def prepare(config: TrainConfig, attention: str, sequences: int):
    """A compiled step, its first state, and a batch of random tokens [1, sequences, T + 1]."""
    name, _, sage_preset = attention.partition(" ")
    config = config.with_attention(cast(AttentionName, name))
    if sage_preset:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, sage_preset=sage_preset))
    graphdef, params = init_model(config.model, seed=0)
    optimizer = make_optimizer(config.optimizer, steps=1000)
    state = TrainState(params, optimizer.init(params))
    shape = (1, sequences, config.data.sequence_length + 1)
    batch = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
    return make_train_step(graphdef, optimizer).lower(state, batch).compile(), state, batch


def measure(config: TrainConfig, attentions: Sequence[str], sequences: int, *, rounds=5, steps=4) -> list[dict]:
    """One record an attention: median milliseconds of a step, tokens a second, and the loss after the last step."""
    runs = {name: prepare(config, name, sequences) for name in attentions}
    times = {name: [] for name in attentions}
    losses = {}
    for _ in range(rounds + 1):
        for name, (step, state, batch) in runs.items():
            start = time.perf_counter()
            for _ in range(steps):
                state, metrics = step(state, batch)
            losses[name] = float(metrics.loss)
            times[name].append((time.perf_counter() - start) / steps)
            runs[name] = step, state, batch
    tokens = sequences * config.data.sequence_length
    return [
        dict(
            attention=name,
            length=config.data.sequence_length,
            sequences=sequences,
            # The first round warms up.
            milliseconds=1e3 * statistics.median(times[name][1:]),
            tokens_per_second=tokens / statistics.median(times[name][1:]),
            loss=losses[name],
        )
        for name in attentions
    ]


def main(arguments=None):
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretraining", description="Time of a training step.")
    parser.add_argument("--preset", choices=PRESETS, default="325m")
    parser.add_argument("--length", type=int, help="tokens of a sequence; the preset's if not given")
    parser.add_argument("--sequences", type=int, default=4, help="in a step")
    parser.add_argument("--attention", choices=ATTENTIONS, nargs="+", default=["sagebwd", "sagebwd mixed", "cudnn"])
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="what to record as the commit, where the tree has no git")
    options = parser.parse_args(arguments)
    config = PRESETS[options.preset]
    if options.length:
        data = dataclasses.replace(config.data, sequence_length=options.length)
        config = dataclasses.replace(config, data=data)
    device = jax.devices()[0].device_kind
    rows = measure(config, options.attention, options.sequences)
    for row in rows:
        print(
            f"{options.preset} T={row['length']} {row['attention']:13s} {row['milliseconds']:9.1f} ms a step,"
            f" {row['tokens_per_second']:10,.0f} tokens/s, loss {row['loss']:.3f}"
        )
    provenance = dict(preset=options.preset, **cases.make_provenance(device, options.commit))
    path = (
        options.output
        / f"pretraining_{options.preset}_{config.data.sequence_length}_{records.device_slug(device)}.json"
    )
    records.write_json(path, [{**row, **provenance} for row in rows])
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
