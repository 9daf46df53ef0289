"""metrics.jsonl: one JSON object a line, written as the run goes and read back for plots and tables; and TensorBoard.

A training record has step, tokens, seconds (of training so far, over all starts), loss (nats per token), grad_norm,
learning_rate, tokens_per_second, step_seconds, mfu (share of the devices' peak, None where that is not known),
memory_bytes (peak so far) and skipped (steps left out so far, whose loss is None); the speeds are None for the step
that compiles. A held-out record has step, tokens, seconds and held_out_loss; a health record those of train/health.py.
Steps count from 1: step n is the state after n updates for held-out losses and health, the n-th update for the rest.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, TextIO

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from .config import SettingError
from .files import write_whole

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_BOARD_SECONDS = 5.0


class MetricsWriter:
    """Appends records to metrics.jsonl in a run's folder; each is with the system when ``write`` returns.

    A run that goes on from step n keeps the records up to n: later ones are of a state that was lost.
    """

    def __init__(self, run_dir: Path, *, step: int = 0, tensorboard: bool = False):
        path = run_dir / FILE_NAME
        if path.exists():
            keep_records(path, step)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._board = _Board(run_dir / TENSORBOARD_FOLDER, step) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record.

        Raises:
          OSError: it could not be written; the message says of which step, and where.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:  # Which does not know the file.
            raise OSError(error.errno, f"step {record['step']}: {error.strerror}", self._file.name) from error
        if self._board is not None:
            self._board.write(record)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        # What could not be written has said so; closing tries once more.
        with contextlib.suppress(OSError):
            self._file.close()
        if self._board is not None:
            self._board.close()


class _Board:
    """TensorBoard's file of a run.

    Written by who calls: the writer that tensorboardX offers hands events to a thread, and once that has died of a full
    disk waits for it without end.
    """

    def __init__(self, folder: Path, step: int):
        try:
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / "events"))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error
        self._folder, self._flushed = folder, 0.0
        if step:  # The records after it, of a state that was lost, are not shown.
            self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: dict[str, Any]) -> None:
        """The numbers of one record; those of a list get its indices."""
        values = {name: value for name, value in record.items() if value is not None and name != "step"}
        for name in [name for name, value in values.items() if isinstance(value, list)]:
            values |= {f"{name}/{index}": part for index, part in enumerate(values.pop(name))}
        parts = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=record["step"], summary=Summary(value=parts)))

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._events.close()

    def _add(self, event: Any) -> None:
        """Writes one event; every few seconds all of them to the disk, which the writer then waits for."""
        event.wall_time = time.time()
        try:
            self._events.write_event(event)
            if event.wall_time - self._flushed > _BOARD_SECONDS:
                self._events.flush()
                self._flushed = event.wall_time
        except OSError as error:
            raise OSError(error.errno, f"step {event.step}: {error.strerror}", str(self._folder)) from error


class NoMetrics:
    """Takes the records of the hosts that write none."""

    def write(self, record: dict[str, Any]) -> None:
        """Does nothing."""


def keep_records(path: Path, step: int) -> None:
    """Drops what came after ``step``, and a last line that was not finished, in one move."""
    kept = [line for line, record in _lines(path) if record["step"] <= step]
    write_whole(path, "".join(f"{line}\n" for line in kept).encode())


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run, in order; of one that is at work or was killed, those that are whole, and none before them.

    Raises:
      SettingError: a line that is none.
    """
    path = run_dir / FILE_NAME
    return [record for _, record in _lines(path)] if path.exists() else []


def series(records: list[dict[str, Any]], name: str, axis: str = "step") -> tuple[list[Any], list[Any]]:
    """Steps (or tokens, or seconds) and values of one metric, leaving out the records that lack it."""
    found = [(record[axis], record[name]) for record in records if record.get(name) is not None]
    return [place for place, _ in found], [value for _, value in found]


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Lines and what they hold; the last one only if it is whole."""
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last line's end is empty, or a record that a killed process did not finish.
    return [(line, _record(path, number, line)) for number, line in enumerate(lines[:-1], start=1)]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    """What a line holds."""
    try:
        record = json.loads(line)
        record["step"]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError(f"{path} line {number} is no record of a step: {line[:80]!r}") from error
    return record
