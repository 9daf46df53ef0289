"""Processes that read ahead: signals to the whole group leave them at work, and they end with their parent."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path

import grain
import pytest

from train.data.workers import reading_ahead

ROOT = Path(__file__).parent.parent
ORPHANS = """
import grain, multiprocessing, os, signal
from train.data.workers import reading_ahead
if __name__ == "__main__":
    with reading_ahead(grain.MapDataset.range(1000).to_iter_dataset(), 2) as elements:
        next(iter(elements))
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_does_not_end_the_reading(monkeypatch, capfd, number):
    start, started = SpawnProcess.start, []

    def start_and_signal(process):
        start(process)
        started.append(process.pid)
        os.kill(process.pid, number)

    monkeypatch.setattr(SpawnProcess, "start", start_and_signal)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with reading_ahead(grain.MapDataset.range(20).to_iter_dataset(), 2) as elements:
        assert len(started) == 2
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        for pid in started:
            os.kill(pid, number)
        assert list(elements) == list(range(20))
    assert not multiprocessing.active_children()
    assert capfd.readouterr().err == ""


def test_reading_that_is_given_up_leaves_no_process():
    with reading_ahead(grain.MapDataset.range(1000).to_iter_dataset(), 3) as elements:
        assert next(iter(elements)) == 0 and len(multiprocessing.active_children()) == 3
    assert not multiprocessing.active_children()


def test_nothing_to_read_is_no_error():
    with reading_ahead(grain.MapDataset.range(0).to_iter_dataset(), 2) as elements:
        assert list(elements) == []


def test_workers_end_with_a_parent_that_is_killed():
    # Their output is the parent's, and does not end before they do.
    ended = subprocess.run([sys.executable, "-c", ORPHANS], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL and len(ended.stdout.split()) == 2
