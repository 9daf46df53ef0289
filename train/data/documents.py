"""Documents: text files, folders of them and JSON lines, plain or compressed, read within a bound on memory."""

import dataclasses
import gzip
import hashlib
import io
import json
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from train.config import DataConfig, SettingError

ACCEPTED = (
    "a UTF-8 text file, JSON lines (.jsonl, .ndjson, .json, also .gz or .zst), a folder of these, "
    "or token shards (.bin, .npy)"
)
# Not read from the standard library: tests are half its bytes and full of tables, site-packages differ by machine.
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Text has no zero byte: a file with one is taken for binary.
BINARY_MARK = b"\0"
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")


class DataError(SettingError):
    """A damaged file: the message names it and the place in it."""


@dataclasses.dataclass
class Skipped:
    """What was left out because it is damaged; ``first`` is the first message."""

    count: int = 0
    first: str | None = None

    def stop_or_count(self, error: DataError, on_bad_data: str) -> None:
        """Raises the error, or counts it where the run asked for that."""
        if on_bad_data == "stop":
            raise error
        self.count += 1
        self.first = self.first or str(error)

    def note(self) -> str:
        """What an error about too little data ends with; nothing if nothing was left out."""
        return f"; {self.count} left out as damaged, first: {self.first}" if self.count else ""


def read_documents(config: DataConfig, skipped: Skipped) -> list[bytes]:
    """Distinct documents, max_bytes in all, in the order of their files' hashed names: a cap takes a fair sample.

    Raises:
      FileNotFoundError: the path does not exist.
      DataError: a damaged file or line, unless on_bad_data is "skip".
    """
    documents: list[bytes] = []
    seen: set[bytes] = set()
    room = config.max_bytes
    root = Path(sysconfig.get_paths()["stdlib"]) if config.data is None else Path(config.data)
    for path in _shuffled_paths(root, is_stdlib=config.data is None):
        for document in _documents_of(path, config, room, skipped):
            digest = hashlib.sha256(document).digest()
            # A copy of a training document among the held-out ones would be a leak.
            if document.strip() and digest not in seen:
                seen.add(digest)
                documents.append(document)
                room -= len(document)
            if room <= 0:
                return documents
    return documents


def iterate_documents(config: DataConfig, skipped: Skipped) -> Iterator[bytes]:
    """Every document, one at a time, copies too: for ``train.prepare``, whose text need not fit into memory."""
    assert config.data is not None
    for path in _shuffled_paths(Path(config.data), is_stdlib=False):
        yield from filter(bytes.strip, _documents_of(path, config, None, skipped))


def _shuffled_paths(root: Path, is_stdlib: bool) -> list[Path]:
    """`text_paths` in the order of their hashed names; FileNotFoundError if there is no such folder or file."""
    if not root.exists():
        raise FileNotFoundError(f"data={str(root)!r} does not exist; accepted: {ACCEPTED}")
    return sorted(text_paths(root, is_stdlib), key=lambda path: _digest(path.relative_to(root).as_posix()))


def text_paths(root: Path, is_stdlib: bool) -> Iterator[Path]:
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


def split_documents(documents: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Holds out whole documents while they fit into the fraction; when none fits, the end of the joined text."""
    room = int(fraction * sum(map(len, documents)))
    train, held_out = [], []
    for document in documents:
        fits = len(document) <= room
        (held_out if fits else train).append(document)
        room -= len(document) if fits else 0
    if held_out:
        return train, held_out
    *train, last = documents
    cut = max(0, len(last) - int(fraction * sum(map(len, documents))))
    return [*train, last[:cut]], [last[cut:]]


def _documents_of(path: Path, config: DataConfig, room: int | None, skipped: Skipped) -> Iterator[bytes]:
    """The documents of one file: its lines if they are JSON, else the whole of it; nothing if it is binary."""
    name = Path(path.name.lower())
    kind = (name.with_suffix("") if name.suffix in _COMPRESSED else name).suffix
    with path.open("rb") as raw, _decompressed(raw, name.suffix) as file:
        try:
            if kind in _JSON_LINES and (kind != ".json" or _begins_with_text(path, name.suffix, config)):
                yield from _json_lines(path, file, config, skipped)
            else:
                document = file.read(-1 if room is None else max(room, 0))
                if BINARY_MARK not in document:
                    yield document
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            message = f"{path} is damaged at byte {raw.tell()} of {path.stat().st_size}: {error}"
            skipped.stop_or_count(DataError(message), config.on_bad_data)


def _begins_with_text(path: Path, suffix: str, config: DataConfig) -> bool:
    """Whether the first line is a document: a .json may as well be one value over many lines, which is text."""
    with path.open("rb") as raw, _decompressed(raw, suffix) as file:
        line = next(filter(bytes.strip, file), b"")
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and config.text_field in value


def _decompressed(raw: BinaryIO, suffix: str) -> io.BufferedReader | BinaryIO:
    """What a file holds."""
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type]
    return io.BufferedReader(_ZstdReader(raw)) if suffix == ".zst" else raw


class _ZstdReader(io.RawIOBase):
    """Frames one after the other; unlike the library's own reader, a file that ends within one is an error."""

    def __init__(self, raw: BinaryIO):
        self._raw, self._frame, self._left, self._ready = raw, None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer from the file's next part.

        Raises:
          EOFError, zstandard.ZstdError: the file is cut short, or damaged.
        """
        while not self._ready:
            chunk = self._left or self._raw.read(1 << 16)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends within a zstd frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready, self._left = self._frame.decompress(chunk), self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _json_lines(path: Path, file: Iterable[bytes], config: DataConfig, skipped: Skipped) -> Iterator[bytes]:
    """The text of each line."""
    offset = 0
    for number, line in enumerate(file, start=1):
        try:
            if line.strip():
                yield json.loads(line)[config.text_field].encode("utf-8", "surrogatepass")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{path} line {number}, byte {offset}: no JSON object with text in its field {config.text_field!r}"
            skipped.stop_or_count(DataError(f"{found} ({type(error).__name__}: {error})"), config.on_bad_data)
        offset += len(line)


def _digest(text: str) -> bytes:
    """A hash that is the same in every process and on every machine."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
