"""Token shards as the field writes them: .bin of uint16 or uint32, with llm.c's header or nanoGPT's none, and .npy.

Only the headers are read when a run starts. Tokens are read where a batch needs them, by plain reads rather than a
memory map: a file that is cut short while the run goes on is then an error with a place, not the end of the process.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.data.documents import DataError, Skipped
from train.files import write_whole

SUFFIXES = (".bin", ".npy")
HELD_OUT_NAMES = ("val", "valid", "validation", "test")
# llm.c's headers: 256 int32, of which the first three are the mark, the version and the count of tokens.
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
HEADERS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_SCAN_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: ``count`` tokens of ``dtype`` from byte ``start``."""

    path: Path
    dtype: np.dtype
    start: int
    count: int

    def read(self, first: int, count: int) -> np.ndarray:
        """Tokens first to first + count, which must be there, as they are stored.

        Raises:
          DataError: the file is shorter than it was, or cannot be read.
        """
        offset = self.start + first * self.dtype.itemsize
        try:
            tokens = np.fromfile(self.path, self.dtype, count, offset=offset)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read at byte {offset}: {error}") from error
        if len(tokens) < count:
            end = offset + len(tokens) * self.dtype.itemsize
            raise DataError(f"{self.path} ends at byte {end}; the tokens wanted end {count - len(tokens)} further on")
        return tokens


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """Shards one after the other, read as one array of tokens below ``vocab_size``; cheap to send to a process."""

    shards: tuple[Shard, ...]
    vocab_size: int
    first: int = 0
    last: int | None = None

    def __len__(self) -> int:
        total = sum(shard.count for shard in self.shards)
        return (total if self.last is None else self.last) - self.first

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count, as int32.

        Raises:
          DataError: as Shard.read, and for a token at or above vocab_size, with the byte that it is at.
        """
        parts, start = [], start + self.first
        for shard in self.shards:
            if start < shard.count and count > 0:
                part = shard.read(start, min(count, shard.count - start))
                _check_tokens(shard, part, start, self.vocab_size)
                parts.append(part.astype(np.int32))  # After the check, for none is above int32 then.
                start, count = start + len(part), count - len(part)
            start -= shard.count
        return np.concatenate(parts)

    def split(self, fraction: float) -> tuple["TokenStream", "TokenStream"]:
        """All but the last ``fraction`` of it, and that."""
        cut = self.first + len(self) - int(fraction * len(self))
        return dataclasses.replace(self, last=cut), dataclasses.replace(self, first=cut)


def shard_paths(root: Path) -> list[Path]:
    """The shards at a path, sorted by name; empty where there are none.

    In a folder they have "train" or one of HELD_OUT_NAMES in their names: any other .bin may be anything.
    """
    if root.is_file():
        return [root] if root.suffix in SUFFIXES else []
    return [path for path in _candidates(root) if _is_named(path)]


def unnamed_shards(root: Path) -> list[Path]:
    """The files in a folder that only their names keep from being shards."""
    return [] if root.is_file() else [path for path in _candidates(root) if not _is_named(path)]


def _candidates(root: Path) -> list[Path]:
    """Every .bin and .npy in a folder, sorted by name; no hidden ones, as of a train.prepare at work."""
    found = sorted(path for suffix in SUFFIXES for path in root.rglob(f"*{suffix}") if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def _is_named(path: Path) -> bool:
    """Whether a file's name says which part of the data it is."""
    return not name_words(path).isdisjoint(("train", *HELD_OUT_NAMES))


def name_words(path: Path) -> set[str]:
    """The words of a file's name, as ``train`` and ``000001`` of train_000001.bin."""
    return set(path.stem.lower().replace("-", "_").replace(".", "_").split("_"))


def open_shards(paths: Sequence[Path], vocab_size: int, on_bad_data: str, skipped: Skipped) -> tuple[Shard, ...]:
    """The shards that are whole; with on_bad_data "skip" each is read through once to know.

    Raises:
      DataError: a damaged one, unless on_bad_data is "skip".
    """
    shards = []
    for path in paths:
        try:
            shard = open_shard(path)
            if on_bad_data == "skip":
                for first in range(0, shard.count, _SCAN_TOKENS):
                    tokens = shard.read(first, min(_SCAN_TOKENS, shard.count - first))
                    _check_tokens(shard, tokens, first, vocab_size)
            shards.append(shard)
        except DataError as error:
            skipped.stop_or_count(error, on_bad_data)
    return tuple(shards)


def open_shard(path: Path) -> Shard:
    """Reads a shard's header and checks the file's size against it.

    Raises:
      DataError: a header that is not understood, or a size that does not fit.
    """
    size = path.stat().st_size
    if path.suffix == ".npy":
        return _open_npy(path, size)
    with path.open("rb") as file:
        start = np.frombuffer(file.read(HEADER_BYTES), "<i4", count=min(size, HEADER_BYTES) // 4)
    if len(start) and int(start[0]) in HEADERS:
        version, dtype = HEADERS[int(start[0])]
        if len(start) < HEADER_INTS or start[1] != version:
            raise DataError(f"{path}: its header at byte 0 has version {start[1:2]}, not {version}, or is cut short")
        return _checked(Shard(path, dtype, HEADER_BYTES, int(start[2])), size)
    if size % 2 or not size:
        raise DataError(f"{path}: {size} bytes are no whole number of uint16 tokens; it is cut short at byte {size}")
    return Shard(path, np.dtype("<u2"), 0, size // 2)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Writes llm.c's format; uint32 if a token needs it."""
    mark = 20240520 if tokens.max(initial=0) < 1 << 16 else 20240801
    version, dtype = HEADERS[mark]
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = mark, version, len(tokens)
    write_whole(path, header.tobytes(), tokens.astype(dtype).tobytes())


def _open_npy(path: Path, size: int) -> Shard:
    """A one-dimensional array of unsigned or signed integers."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            start = file.tell()
    except ValueError as error:
        raise DataError(f"{path}: no .npy header at byte 0: {error}") from error
    if len(shape) != 1 or dtype.kind not in "ui":
        raise DataError(f"{path} holds {dtype} of shape {shape}; accepted is one axis of uint16, int32 or the like")
    return _checked(Shard(path, dtype, start, shape[0]), size)


def _checked(shard: Shard, size: int) -> Shard:
    """The shard, if the file is as long as its header says."""
    end = shard.start + shard.count * shard.dtype.itemsize
    if shard.count < 1 or size != end:
        raise DataError(f"{shard.path} ends at byte {size}; its header says {shard.count} tokens, to byte {end}")
    return shard


def _check_tokens(shard: Shard, tokens: np.ndarray, first: int, vocab_size: int) -> None:
    """Refuses a token that the model has no row for."""
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        offset = shard.start + (first + int(wrong[0])) * shard.dtype.itemsize
        raise DataError(
            f"{shard.path} has token {tokens[wrong[0]]} at byte {offset}; tokens lie below vocab_size={vocab_size}"
        )
