"""Processes that read ahead: signals to the group leave them at work, they end with their parent, and may be killed."""

import dataclasses
import io
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path

import grain
import pytest
from rich.console import Console
from train_micro import micro_config, write_text

from train import __main__ as program
from train import cli
from train.checkpoint import Checkpoints
from train.data.workers import WorkerError, reading_ahead
from train.loop import train

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


class Failing:
    """A data source whose record 5 cannot be read, or ends the process that reads it."""

    def __init__(self, code=None):
        self.code = code

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 5 and self.code is None:
            raise RuntimeError("record 5 cannot be read")
        if index == 5:
            os._exit(self.code)
        return index


def test_a_worker_that_is_killed_is_named_with_its_signal():
    with (
        pytest.raises(WorkerError, match=r"^a data worker was killed by SIGKILL, as by the out-of-memory killer$"),
        reading_ahead(grain.MapDataset.range(1000).to_iter_dataset(), 2) as elements,
    ):
        for element in elements:
            if element == 3:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_before_its_first_element_is_named_too(monkeypatch):
    start = SpawnProcess.start

    def start_and_kill(process):
        start(process)
        process.kill()

    monkeypatch.setattr(SpawnProcess, "start", start_and_kill)
    with (
        pytest.raises(WorkerError, match="was killed by SIGKILL"),
        reading_ahead(grain.MapDataset.range(1000).to_iter_dataset(), 2),
    ):
        pytest.fail("there is nothing to read")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [(3, WorkerError, "^a data worker ended with exit status 3$"), (None, RuntimeError, "^record 5 cannot be read")],
)
def test_other_ends_of_a_worker_keep_their_own_words(code, kind, message):
    dataset = grain.MapDataset.source(Failing(code)).to_iter_dataset()
    with pytest.raises(kind, match=message) as raised, reading_ahead(dataset, 1) as elements:
        list(elements)
    assert raised.type is kind


@pytest.mark.parametrize("checkpoint_every", [9, 0])
def test_a_run_whose_worker_is_killed_says_how_to_go_on_and_does(tmp_path, monkeypatch, checkpoint_every):
    data, run = write_text(tmp_path / "text"), tmp_path / "run"
    config = micro_config(data=data, held_out_fraction=0.2, num_layers=1, checkpoint_every=checkpoint_every, workers=2)
    (tmp_path / "config.json").write_text(config.to_json())
    check, steps = Checkpoints.check, []

    def check_and_kill(checkpoints):
        check(checkpoints)
        steps.append(len(steps) + 1)
        # Long before step 18, the next with a checkpoint: what this worker has read ahead is still used.
        if len(steps) == 9:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(Checkpoints, "check", check_and_kill)
        cli.run(program.main, ["--config", str(tmp_path / "config.json"), "--resume", str(run)])
    go_on = {
        9: f"the checkpoint of step 9 is whole: go on from it with python -m train --resume {run}",
        0: f"there is no checkpoint: python -m train --resume {run} starts again at the first step",
    }
    assert stop.value.code == (
        f"error: a data worker was killed by SIGKILL, as by the out-of-memory killer; {go_on[checkpoint_every]}; "
        f"if memory ran out, with fewer --workers than 2 (0 reads ahead in threads)"
    )
    fewer = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0))
    assert train(fewer, run_dir=run, console=Console(file=io.StringIO()), resume=True).step == config.steps
