"""metrics.jsonl: one JSON object a line, written as the run goes and read back for plots and tables."""

import json
from pathlib import Path
from typing import Any, TextIO

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends records to metrics.jsonl in a run's folder; each is on disk when ``write`` returns.

    A training record has step, tokens, loss (nats per token), grad_norm, learning_rate and tokens_per_second (None for
    the step that compiles); a held-out record has step, tokens and held_out_loss. Steps count from 1: step n is the
    state after n updates for held_out_loss, and the n-th update for the rest.
    """

    def __init__(self, run_dir: Path):
        self._file: TextIO = (run_dir / FILE_NAME).open("w", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run, in order."""
    return [json.loads(line) for line in (run_dir / FILE_NAME).read_text(encoding="utf-8").splitlines()]


def series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, leaving out the records that lack it."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]
