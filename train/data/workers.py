"""Processes that read ahead, by grain: they leave signals to the process that they read for, and end with it."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import grain
from absl import flags

# What grain says of a process that ended by itself; it is a plain RuntimeError.
_ENDED = re.compile(r"Worker process was terminated unexpectedly with exit code (-?\d+)")


class WorkerError(RuntimeError):
    """A process that reads ahead has died; the message says by which signal or with which exit status."""


@contextlib.contextmanager
def reading_ahead(dataset: grain.IterDataset, workers: int) -> Iterator[Iterable[Any]]:
    """The elements of a dataset in order, made by ``workers`` processes, or in this one for 0.

    Ctrl-C in a terminal, or a job's SIGTERM, goes to them too: ended by it they would take the batch with them that the
    step at work may still need.

    Raises:
      WorkerError: one of them has died, as the out-of-memory killer ends one, with what it had read ahead.
    """
    if not workers:
        yield dataset
        return
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain's workers read absl's flags, whoever the main program is.
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
    iterator = iter(dataset.mp_prefetch(options, worker_init_fn=_end_with_parent))
    try:
        with _signals_blocked():
            first = list(itertools.islice(iterator, 1))  # grain starts all processes for it.
        yield itertools.chain(first, iterator)
    except RuntimeError as error:
        if ended := _ENDED.search(str(error)):
            raise WorkerError(f"a data worker {_end(int(ended[1]))}") from error
        raise
    finally:
        iterator.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Threads and processes that start within never get SIGTERM or SIGINT; this thread gets them afterwards."""
    # Where it is first needed, its start would let the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(code: int) -> str:
    """What a process's exit code says, negative for a signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    # A real-time signal has no name.
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + ", as by the out-of-memory killer" * (name == "SIGKILL")


def _end_with_parent(worker: int, workers: int) -> None:
    """In a worker: ends it when the process that it reads for is gone; one that is killed cannot tell it to."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
