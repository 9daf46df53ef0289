"""SIGTERM and Ctrl-C: a request to stop after the step at work, on which all hosts agree."""

import signal
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# With several hosts, steps between two questions to all of them; each costs a round of the network.
AGREE_EVERY = 16


class StopRequest:
    """While entered, the first SIGTERM or Ctrl-C asks to stop, and the second does what it does elsewhere."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def is_made(self, step: int) -> bool:
        """Whether the run should stop after this step: the same answer on every host."""
        if jax.process_count() == 1:
            return self.signal is not None
        if step % AGREE_EVERY:
            return False
        asked = multihost_utils.process_allgather(np.asarray(self.signal is not None))
        if np.any(asked):
            self.signal = self.signal or "another host"
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._ask)
        except ValueError:  # Not the main thread, which alone gets signals.
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, self._previous[number])
