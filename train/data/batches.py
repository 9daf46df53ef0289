"""Batches: which tokens each step sees, a function of the seed and the step alone.

An epoch cuts the tokens into sequences that follow one another, from a first token of its own, and visits them in an
order of its own. No state is kept: a run goes on at any step, with any number of workers, hosts or devices.
"""

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from grain.experimental import index_shuffle
from jax.sharding import NamedSharding

from train.config import TrainConfig
from train.data.corpus import Corpus, Tokens
from train.data.workers import reading_ahead

# Steps that are read ahead.
READ_AHEAD = 8


class Batch(NamedTuple):
    """Tokens [..., T + 1], inputs and targets overlapping, and which document each is of; None for plain streams."""

    tokens: Any
    segment_ids: Any


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sequence number ``index`` of a run, from 0 on through all epochs: length + 1 tokens."""

    tokens: Tokens
    seed: int
    length: int

    def __getitem__(self, index: int) -> np.ndarray:
        spare = len(self.tokens) - 1
        # One sequence less than would fit, so that the first token can be any of the first `length`.
        count = max(1, spare // self.length - 1)
        epoch, index = divmod(index, count)
        rng = np.random.default_rng((self.seed, epoch))
        first = int(rng.integers(min(spare - count * self.length, self.length - 1) + 1))
        place = index_shuffle(index, max_index=count - 1, seed=int(rng.integers(1 << 31)), rounds=4)
        return self.tokens.read(first + place * self.length, self.length + 1)


@dataclasses.dataclass(frozen=True)
class StepSource:
    """A grain data source whose record ``step`` is this host's part of that step's batch, [A, rows, T + 1]."""

    windows: Windows
    steps: int
    accumulation: int
    sequences: int  # of one micro batch, on all hosts
    rows: tuple[int, ...]  # of a micro batch, on this host
    separator: int | None  # None: plain streams

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        first = int(index) * self.accumulation * self.sequences
        numbers = [first + a * self.sequences + row for a in range(self.accumulation) for row in self.rows]
        tokens = np.stack([self.windows[number] for number in numbers])
        tokens = tokens.reshape(self.accumulation, len(self.rows), -1)
        return Batch(tokens, None if self.separator is None else segment_ids(tokens, self.separator))


def segment_ids(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Number of each token's document in its sequence [..., T + 1], from 0; a separator ends its document."""
    ends = (tokens == separator).astype(np.int32)
    return np.cumsum(ends, axis=-1, dtype=np.int32) - ends


def training_batches(
    config: TrainConfig, corpus: Corpus, sharding: NamedSharding, shards: int, step: int
) -> Generator[Batch, None, None]:
    """The batches [A, B, T + 1] of a run from ``step`` (0 for the first) to its last, on the devices.

    To be closed, for there may be processes that read ahead.

    Raises:
      DataError: a shard that is cut short, or holds a token that the model does not have.
      WorkerError: a process that reads ahead has died.
    """
    shape = (config.accumulation(shards), config.micro_batch * shards, config.data.sequence_length + 1)
    local = [index for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    rows = sorted({row for index in local for row in range(shape[1])[index[1]]})
    source = StepSource(
        windows=Windows(corpus.train, config.seed, config.data.sequence_length),
        steps=config.steps,
        accumulation=shape[0],
        sequences=shape[1],
        rows=tuple(rows),
        separator=corpus.separator if config.data.documents == "packed" else None,
    )
    threads = grain.ReadOptions(num_threads=2, prefetch_buffer_size=READ_AHEAD)
    dataset = grain.MapDataset.source(source)[step:].to_iter_dataset(threads)

    def place(array: Any) -> jax.Array | None:
        if array is None:
            return None

        def part(index: Any) -> np.ndarray:
            wanted = range(shape[1])[index[1]]
            first = rows.index(wanted[0])
            return array[:, first : first + len(wanted)]

        return jax.make_array_from_callback(shape, sharding, part)

    with reading_ahead(dataset, config.data.workers) as batches:
        for batch in batches:
            yield Batch(place(batch.tokens), place(batch.segment_ids))


def held_out_batches(
    corpus: Corpus, *, sequences: int, batch: int, length: int, packed: bool
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Batches [batch, length + 1] and 1 or 0 for each sequence: the last batch is filled up with sequences of weight 0.

    The same sequences every time, evenly spread, none overlapping; fewer than ``sequences`` when the text is too short.
    """
    window = length + 1
    count = min(sequences, len(corpus.held_out) // window)
    starts = np.linspace(0, len(corpus.held_out) - window, count).astype(np.int64)
    for first in range(0, count, batch):
        rows = [corpus.held_out.read(int(start), window) for start in starts[first : first + batch]]
        weights = np.asarray([1.0] * len(rows) + [0.0] * (batch - len(rows)), np.float32)
        tokens = np.stack(rows + rows[:1] * (batch - len(rows)))
        yield Batch(tokens, segment_ids(tokens, corpus.separator) if packed else None), weights
