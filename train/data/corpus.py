"""The tokens of a run: what to train on and what is held out, out of memory or out of shards."""

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np

from train.config import DataConfig, SettingError
from train.data import tokenizer as tokenizers
from train.data.documents import ACCEPTED, Skipped, read_documents, split_documents
from train.data.shards import HELD_OUT_NAMES, TokenStream, name_words, open_shards, shard_paths, unnamed_shards

# GPT-2's <|endoftext|>, which shards have between documents.
GPT2_SEPARATOR = 50_256
_UNIGRAM_TOKENS = 1 << 24


class Tokens(Protocol):
    """A long row of tokens, of which a part is read at a time, as int32."""

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class ArrayTokens:
    """Tokens in memory."""

    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count."""
        return self.array[start : start + count].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The tokens to train on and those held out; no document is in both unless there is only one."""

    train: Tokens
    held_out: Tokens
    separator: int
    source: str
    skipped: Skipped
    is_capped: bool = False  # whether max_bytes ended the reading

    def summary(self, max_bytes: int) -> str:
        """How much there is, whether more was left unread, and what was left out."""
        end = f"; max_bytes={max_bytes} ended the reading there" if self.is_capped else ""
        if self.skipped.count:
            end += f"; {self.skipped.count} damaged left out, first: {self.skipped.first}"
        return f"{len(self.train):,} tokens to train on and {len(self.held_out):,} held out{end}"


def load_corpus(config: DataConfig, vocab_size: int) -> Corpus:
    """Text is read and tokenized here; of shards only the headers are read.

    Raises:
      FileNotFoundError: the path does not exist.
      SettingError: no text there, too little of it for one sequence on either side, or a tokenizer that does not fit.
      DataError: a damaged file, unless on_bad_data is "skip".
    """
    skipped = Skipped()
    paths = [] if config.data is None else shard_paths(Path(config.data))
    corpus = _from_shards(config, vocab_size, paths, skipped) if paths else _from_text(config, vocab_size, skipped)
    needed = config.sequence_length + 1
    for part in ("train", "held_out"):
        count = len(getattr(corpus, part))
        if count < needed:
            raise SettingError(
                f"data={corpus.source!r} leaves {count} tokens for {part}; one sequence of "
                f"sequence_length={config.sequence_length} needs {needed}; accepted: more data, a shorter "
                f"sequence_length, another share by held_out_fraction={config.held_out_fraction}"
                f"{_left_out(config, skipped)}"
            )
    return corpus


def unigram_loss(corpus: Corpus, vocab_size: int) -> float:
    """Held-out nats per token of a model that knows only how often each token occurs: the least a run must beat.

    From the first 16 million tokens of each part at most.
    """
    train, held_out = (part.read(0, min(len(part), _UNIGRAM_TOKENS)) for part in (corpus.train, corpus.held_out))
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.mean(np.log(counts / counts.sum())[held_out]))


def find_tokenizer(config: DataConfig) -> str | None:
    """The tokenizer.json that the settings name, or else the one beside token shards."""
    if config.tokenizer is not None or config.data is None or not shard_paths(Path(config.data)):
        return config.tokenizer
    root = Path(config.data)
    beside = (root if root.is_dir() else root.parent) / tokenizers.FILE_NAME
    return str(beside) if beside.is_file() else None


def is_text(config: DataConfig) -> bool:
    """Whether the data is known to be text rather than shards, whose tokens may be of any tokenizer."""
    return config.data is None or (Path(config.data).exists() and not shard_paths(Path(config.data)))


def _from_text(config: DataConfig, vocab_size: int, skipped: Skipped) -> Corpus:
    """Reads documents, splits them, and turns each part into tokens."""
    text = tokenizers.load_tokenizer(config.tokenizer, config.separator, vocab_size)
    documents = read_documents(config, skipped)
    source = str(config.data or "the Python standard library")
    if not documents:
        raise SettingError(f"data={source!r} has no text; accepted: {ACCEPTED}{_left_out(config, skipped)}")
    dtype = np.uint8 if text.tokenizer is None else np.uint32
    train, held_out = (
        ArrayTokens(tokenizers.join(text.encode(part), text.separator, dtype))
        for part in split_documents(documents, config.held_out_fraction)
    )
    is_capped = sum(map(len, documents)) >= config.max_bytes
    return Corpus(train, held_out, text.separator, source, skipped, is_capped)


def _left_out(config: DataConfig, skipped: Skipped) -> str:
    """What there was besides, for errors about too little data."""
    unnamed = [] if config.data is None else unnamed_shards(Path(config.data))
    if not unnamed:
        return skipped.note()
    files = f"{len(unnamed)} .bin or .npy files there, such as {unnamed[0].name},"
    return f"; {files} have neither train nor val in their names{skipped.note()}"


def _from_shards(config: DataConfig, vocab_size: int, paths: list[Path], skipped: Skipped) -> Corpus:
    """Files named for validation are held out, or else the end of the last file."""
    shards = open_shards(paths, vocab_size, config.on_bad_data, skipped)
    held_out = tuple(shard for shard in shards if not name_words(shard.path).isdisjoint(HELD_OUT_NAMES))
    if held_out and len(held_out) < len(shards):
        train = tuple(shard for shard in shards if shard not in held_out)
        parts = TokenStream(train, vocab_size), TokenStream(held_out, vocab_size)
    else:
        parts = TokenStream(shards, vocab_size).split(config.held_out_fraction)
    separator = config.separator
    if separator is None:
        path = find_tokenizer(config)
        separator = GPT2_SEPARATOR if path is None else tokenizers.load_tokenizer(path, None, vocab_size).separator
    return Corpus(*parts, separator, str(config.data), skipped)
