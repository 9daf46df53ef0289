"""``python -m train.prepare --data PATH --output FOLDER``: text to token shards, once, before training.

Writes tokenizer.json and shards train_000000.bin, ... and val_000000.bin in llm.c's format, documents apart by
<|endoftext|>; ``python -m train --data FOLDER`` reads them. A byte-level BPE is trained on the text unless --tokenizer
names one.
"""

import dataclasses
import hashlib
import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from . import cli
from .config import PRESETS, DataConfig, SettingError
from .data.documents import ACCEPTED, Skipped, iterate_documents
from .data.shards import write_shard
from .data.tokenizer import END_OF_TEXT, FILE_NAME, TextTokenizer, load_tokenizer
from .files import write_whole

# Documents that are tokenized at a time, on all cores.
BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to turn into tokens, and how."""

    data: str
    """A text file, JSON lines (also .gz, .zst), or a folder of these (path)."""
    output: Path
    """Folder of the shards (path); must not be there, or be empty."""
    tokenizer: str | None = None
    """A tokenizer.json (path); None trains a byte-level BPE."""
    vocab_size: int = 32_768
    """Tokens of the BPE to train, <|endoftext|> too (count)."""
    training_bytes: int = 1 << 30
    """Text that the BPE is trained on at most (bytes)."""
    shard_tokens: int = 100_000_000
    """Tokens of one shard (tokens)."""
    held_out_fraction: float = 0.005
    """Share of the documents, by their hashes, that goes to val (fraction of documents)."""
    text_field: str = "text"
    """Field of a JSON line that holds the document (name)."""
    on_bad_data: Literal["stop", "skip"] = "stop"
    """Damaged files and lines: an error, or left out and counted (name)."""


def train_bpe(documents: Iterator[bytes], vocab_size: int, max_bytes: int) -> Tokenizer:
    """A byte-level BPE: every text has tokens, and they give back the text to the byte."""

    def texts() -> Iterator[str]:
        room = max_bytes
        for document in documents:
            if room <= 0:
                return
            yield document[:room].decode("utf-8", "replace")
            room -= len(document)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def prepare(config: PrepareConfig) -> dict[str, int]:
    """Writes the tokenizer and the shards; returns counts of documents, tokens and what was left out.

    Raises:
      SettingError: a setting, the output folder or the data cannot be used. DataError: damaged data.
    """
    _check(config)
    data = _data_config(config)
    skipped = Skipped()
    if next(iterate_documents(data, skipped), None) is None:
        accepted = ACCEPTED.split(", or token")[0]
        raise SettingError(f"data={config.data!r} has no text; accepted: {accepted}{skipped.note()}")
    output = config.output.resolve()
    # Beside it until it is whole: what a failure leaves is neither data nor in the way of the next try.
    partial = output.with_name(f".{output.name}.partial")
    try:
        if output.exists():
            output.rmdir()  # Now and not at the end, for one that is a mount point cannot be replaced.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise SettingError(f"output={str(config.output)!r} cannot be made: {error.strerror}") from error
    try:
        counts = _write(config, data, partial)
        partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


def _write(config: PrepareConfig, data: DataConfig, folder: Path) -> dict[str, int]:
    """Writes tokenizer and shards into a folder; returns what prepare does."""
    skipped = Skipped()
    path = folder / FILE_NAME
    if config.tokenizer is None:
        tokenizer = train_bpe(iterate_documents(data, Skipped()), config.vocab_size, config.training_bytes)
        write_whole(path, tokenizer.to_str(pretty=True).encode())
    text = load_tokenizer(config.tokenizer or str(path), None, 1 << 32)
    if config.tokenizer is not None:
        write_whole(path, Path(config.tokenizer).read_bytes())
    writers = {name: _ShardWriter(folder, name, config.shard_tokens) for name in ("train", "val")}
    documents, counts = iterate_documents(data, skipped), {"documents": 0}
    seen: set[bytes] = set()
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        digests = [hashlib.sha256(document).digest() for document in batch]
        for digest, tokens in zip(digests, text.encode(batch), strict=True):
            if digest in seen:
                continue
            seen.add(digest)
            counts["documents"] += 1
            # By its hash, so that a document lands on the same side whatever else is there.
            is_held_out = int.from_bytes(digest[:8], "big") < config.held_out_fraction * 2**64
            writers["val" if is_held_out else "train"].add(tokens, text)
    for name, writer in writers.items():
        writer.close()
        counts[f"{name}_tokens"] = writer.total
    if not counts["train_tokens"]:
        raise SettingError(f"data={config.data!r} has no text to train on beside what is held out")
    return {**counts, "skipped": skipped.count, "vocab_size": text.size}


class _ShardWriter:
    """Collects tokens and writes a shard whenever there are enough."""

    def __init__(self, folder: Path, name: str, shard_tokens: int):
        self.total = 0
        self._folder, self._name, self._size = folder, name, shard_tokens
        self._parts: list[np.ndarray] = []
        self._held = self._written = 0

    def add(self, tokens: np.ndarray, text: TextTokenizer) -> None:
        """One document and its separator."""
        self._parts += [tokens, np.asarray([text.separator], np.uint32)]
        self._held += len(tokens) + 1
        self.total += len(tokens) + 1
        while self._held >= self._size:
            self._write(self._size)

    def close(self) -> None:
        """Writes what is left."""
        if self._held:
            self._write(self._held)

    def _write(self, count: int) -> None:
        tokens = np.concatenate(self._parts)
        write_shard(self._folder / f"{self._name}_{self._written:06d}.bin", tokens[:count])
        self._parts, self._held = [tokens[count:]], len(tokens) - count
        self._written += 1


def _data_config(config: PrepareConfig) -> DataConfig:
    """The settings that reading documents looks at."""
    return dataclasses.replace(
        PRESETS["tiny"].data, data=config.data, text_field=config.text_field, on_bad_data=config.on_bad_data
    )


def _check(config: PrepareConfig) -> None:
    """Raises SettingError with the name, the value and what is accepted."""
    if config.output.exists() and (not config.output.is_dir() or any(config.output.iterdir())):
        raise SettingError(f"output={str(config.output)!r} is there and not an empty folder")
    for name, least in (("vocab_size", 257), ("training_bytes", 1), ("shard_tokens", 1)):
        if getattr(config, name) < least:
            raise SettingError(f"{name}={getattr(config, name)} must be at least {least}")
    if not 0 <= config.held_out_fraction < 1:
        raise SettingError(f"held_out_fraction={config.held_out_fraction} must be at least 0 and below 1")


def main(arguments: Sequence[str]) -> None:
    """Prepares and says what is there."""
    config = tyro.cli(
        PrepareConfig, prog="python -m train.prepare", description="Turn text into token shards.", args=list(arguments)
    )
    counts = prepare(config)
    Console().print(
        f"{counts['documents']:,} documents, {counts['train_tokens']:,} tokens to train on and "
        f"{counts['val_tokens']:,} held out, vocabulary {counts['vocab_size']:,}, {counts['skipped']} damaged left out;"
        f" written to {config.output}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
