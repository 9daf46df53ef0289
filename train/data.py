"""Text as bytes: reading it, holding some of it out, and cutting batches from the rest.

Everything is a function of the text, the seed and the step, so two runs see the same tokens in the same order, and a
run can continue at any step.
"""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .config import BYTE_VOCABULARY, DataConfig, SettingError

ACCEPTED = "a UTF-8 text file, or a folder with such files in it"
# Between two documents. Text has no zero byte: a file with one is taken for binary.
SEPARATOR = b"\0"
# Not read from the standard library: tests are half its bytes and full of tables, site-packages differ by machine.
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The bytes to train on and the bytes held out; no document is in both unless there is only one."""

    train: np.ndarray
    held_out: np.ndarray
    source: str


def load_corpus(config: DataConfig) -> Corpus:
    """Reads at most max_bytes and splits off held_out_fraction.

    Raises:
      FileNotFoundError: the path does not exist.
      SettingError: no text there, or too little for one sequence on either side of the split.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if config.data is None else Path(config.data)
    if not root.exists():
        raise FileNotFoundError(f"data={str(root)!r} does not exist; accepted: {ACCEPTED}")
    documents = _read_documents(root, is_stdlib=config.data is None, max_bytes=config.max_bytes)
    if not documents:
        raise SettingError(f"data={str(root)!r} has no text; accepted: {ACCEPTED}")
    train, held_out = _split(documents, config.held_out_fraction)
    needed = config.sequence_length + 1
    for part, text in (("train", train), ("held_out", held_out)):
        if len(text) < needed:
            raise SettingError(
                f"data={str(root)!r} leaves {len(text)} bytes for {part}; one sequence of "
                f"sequence_length={config.sequence_length} needs {needed}. Accepted: {ACCEPTED}, big enough"
            )
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), str(root))


def training_batch(
    corpus: Corpus, *, seed: int, step: int, accumulation: int, micro_batch: int, sequence_length: int
) -> np.ndarray:
    """Tokens [accumulation, micro_batch, sequence_length + 1] of one step: windows at random places."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(corpus.train) - sequence_length, size=(accumulation, micro_batch, 1))
    return corpus.train[starts + np.arange(sequence_length + 1)].astype(np.int32)


def held_out_batches(corpus: Corpus, *, sequences: int, micro_batch: int, sequence_length: int) -> Iterator[np.ndarray]:
    """Tokens [b, sequence_length + 1], b <= micro_batch: the same windows every time, evenly spread, none overlapping.

    There are fewer than ``sequences`` when the held-out text is too short for that many.
    """
    window = sequence_length + 1
    count = min(sequences, len(corpus.held_out) // window)
    starts = np.linspace(0, len(corpus.held_out) - window, count).astype(np.int64)
    for first in range(0, count, micro_batch):
        yield corpus.held_out[starts[first : first + micro_batch, None] + np.arange(window)].astype(np.int32)


def unigram_loss(corpus: Corpus) -> float:
    """Held-out nats per byte of a model that knows only how often each byte occurs: the least a run must beat."""
    counts = np.bincount(corpus.train, minlength=BYTE_VOCABULARY) + 1.0
    return float(-np.mean(np.log(counts / counts.sum())[corpus.held_out]))


def _read_documents(root: Path, *, is_stdlib: bool, max_bytes: int) -> list[bytes]:
    """Distinct text files in the order of their names' hashes, so that a cap on bytes takes a fair sample."""
    documents: list[bytes] = []
    seen: set[bytes] = set()
    room = max_bytes
    for path in sorted(_text_paths(root, is_stdlib), key=lambda path: _digest(path.relative_to(root).as_posix())):
        if room <= 0:
            break
        with path.open("rb") as file:
            document = file.read(room)
        digest = hashlib.sha256(document).digest()
        # A copy of a training file among the held-out ones would be a leak.
        if not document.strip() or SEPARATOR in document or digest in seen:
            continue
        seen.add(digest)
        documents.append(document)
        room -= len(document)
    return documents


def _text_paths(root: Path, is_stdlib: bool) -> Iterator[Path]:
    """Regular files under root, or root itself; no hidden ones, and of the standard library only its modules."""
    if root.is_file():
        yield root
        return
    for path in root.rglob("*.py" if is_stdlib else "*"):
        parts = path.relative_to(root).parts
        if is_stdlib and not STDLIB_SKIPPED.isdisjoint(parts):
            continue
        if path.is_file() and not any(part.startswith(".") for part in parts):
            yield path


def _digest(text: str) -> bytes:
    """A hash that is the same in every process and on every machine."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _split(documents: list[bytes], fraction: float) -> tuple[bytes, bytes]:
    """Holds out whole documents while they fit into the fraction; when none fits, the end of the joined text."""
    room = int(fraction * sum(len(document) for document in documents))
    train, held_out = [], []
    for document in documents:
        fits = len(document) <= room
        (held_out if fits else train).append(document)
        room -= len(document) if fits else 0
    if held_out:
        return SEPARATOR.join(train), SEPARATOR.join(held_out)
    text = SEPARATOR.join(train)
    cut = len(text) - int(fraction * len(text))
    return text[:cut], text[cut:]
