"""Runs that are stopped, killed or cannot write: they go on as if nothing had happened, or say what did."""

import dataclasses
import gc
import io
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from train_micro import curve, micro_config, write_text

from train import __main__ as program
from train import cli, data, loop
from train.checkpoint import CheckpointError
from train.config import SettingError, TrainConfig
from train.metrics import read_metrics, series
from train.prepare import train_bpe
from train.run_dir import read_config
from train.step import StepMetrics

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def run_config(text, **overrides):
    settings = dict(data=text, held_out_fraction=0.2, num_layers=1, steps=24, eval_every=8, checkpoint_every=5)
    return micro_config(**(settings | overrides))


def train(config, run_dir, resume=True):
    return loop.train(config, run_dir=run_dir, console=Console(file=io.StringIO()), resume=resume)


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    settings = dict(optimizer="muon", schedule="wsd", z_loss=1e-3, ema_decay=0.9, keep_checkpoints=2, tensorboard=True)
    config = run_config(text, **settings, on_nonfinite="skip", documents="packed")
    return config, train(config, tmp_path_factory.mktemp("runs") / "unbroken")


def start(run_dir, config_path):
    command = [sys.executable, "-m", "train", "--config", str(config_path), "--resume", str(run_dir)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(run_dir, process, step):
    """Returns when the run's records have come to a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and (read_metrics(run_dir) or [{"step": 0}])[-1]["step"] >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"the run did not come to step {step}: {process.communicate()}")


def test_a_run_that_was_killed_goes_on_bitwise_as_the_unbroken_one(unbroken, tmp_path):
    config, whole = unbroken
    process = start(tmp_path / "run", whole.run_dir / "config.json")
    wait_for_step(tmp_path / "run", process, 12)
    process.kill()
    process.communicate()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "los')  # as if the kill had come in the middle of a line
    reached = read_metrics(tmp_path / "run")[-1]["step"]
    assert 12 <= reached < 24
    result = train(config, tmp_path / "run")
    assert curve(tmp_path / "run") == curve(whole.run_dir)
    assert result.held_out_loss == whole.held_out_loss
    [states, expected] = [final_state(run) for run in (tmp_path / "run", whole.run_dir)]
    for got, want in zip(jax.tree.leaves(states), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, want)


def final_state(run_dir):
    """The arrays of the newest checkpoint, as numpy."""
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager((run_dir / "checkpoints").absolute())
    items = {name: ocp.args.StandardRestore() for name in ("params", "opt_state", "ema")}
    restored = manager.restore(manager.latest_step(), args=ocp.args.Composite(**items))
    manager.close()
    return {name: jax.device_get(restored[name]) for name in items}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end(unbroken, tmp_path, seed):
    config, whole = unbroken
    rng = np.random.default_rng(seed)
    for step in sorted(rng.choice(np.arange(1, 24), 4, replace=False)):
        process = start(tmp_path / "run", whole.run_dir / "config.json")
        wait_for_step(tmp_path / "run", process, step)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    train(config, tmp_path / "run")
    assert curve(tmp_path / "run") == curve(whole.run_dir)


def test_a_finished_run_has_nothing_left_to_do_and_can_be_made_longer(unbroken, tmp_path):
    config, whole = unbroken
    before = curve(whole.run_dir)
    again = train(config, whole.run_dir)
    assert curve(whole.run_dir) == before
    assert (again.step, again.held_out_loss, again.stopped_by) == (24, whole.held_out_loss, None)
    assert sorted(int(path.name) for path in (whole.run_dir / "checkpoints").iterdir()) == [20, 24]


@pytest.mark.parametrize("setting", [dict(optimizer="muon"), dict(schedule="wsd"), dict(z_loss=0.1)], ids=str)
def test_a_setting_of_the_optimizer_reaches_the_steps(text, tmp_path, setting):
    few = dict(steps=4, warmup_steps=1, eval_every=4, checkpoint_every=0)
    losses = []
    for name, settings in {"plain": few, "set": few | setting}.items():
        train(run_config(text, **settings), tmp_path / name)
        losses.append(series(read_metrics(tmp_path / name), "loss")[1])
    # The first loss is of the same parameters; what is reported leaves z-loss out.
    assert losses[0][0] == losses[1][0] and losses[0][-1] != losses[1][-1]


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the jitted functions: parameters count the steps, a step's loss is what ``act(step)`` returns, or 1."""

    def script(act):
        def make_train_step(graphdef, optimizer, **_):
            calls = itertools.count(1)

            def train_step(state, tokens, segment_ids):
                loss = act(next(calls)) or 1.0
                return state._replace(params=jax.tree.map(lambda x: x + 1, state.params)), StepMetrics(loss, 1.0)

            return train_step

        monkeypatch.setattr(loop, "make_train_step", make_train_step)
        monkeypatch.setattr(loop, "make_eval_step", lambda graphdef: lambda *_: (1.0, 1.0))

    return script


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint_and_no_error(text, tmp_path, scripted, monkeypatch, capsys, number):
    scripted(lambda step: os.kill(os.getpid(), number) if step == 7 else None)
    config = run_config(text, num_layers=1)
    (tmp_path / "config.json").write_text(config.to_json())
    before = signal.getsignal(number)
    arguments = ["--config", str(tmp_path / "config.json"), "--resume", str(tmp_path / "run")]
    program.main(arguments)  # does not raise: exit status 0
    assert signal.getsignal(number) is before
    shown = " ".join(capsys.readouterr().out.split())
    assert f"no run in {tmp_path / 'run'} yet: a new one starts there" in shown
    assert (
        f"stopped by {number.name} after step 7 of 24 with a checkpoint; go on with python -m train --resume" in shown
    )
    assert (tmp_path / "run" / "checkpoints" / "7").is_dir()
    assert series(read_metrics(tmp_path / "run"), "loss")[0] == list(range(1, 8))
    scripted(lambda step: None)
    assert train(config, tmp_path / "run").step == 24
    assert series(read_metrics(tmp_path / "run"), "loss")[0] == list(range(1, 25))


def test_a_run_without_checkpoints_of_its_own_goes_on_from_the_newest_that_is_there(text, tmp_path, scripted, capsys):
    def stop_after(steps):
        scripted(lambda step: signal.raise_signal(signal.SIGTERM) if step == steps else None)

    run = tmp_path / "run"
    config = run_config(text)
    (tmp_path / "config.json").write_text(config.to_json())
    for checkpoint_every, steps in ((0, 3), (5, 7), (0, 4)):
        stop_after(steps)
        more = ["--checkpoint-every", str(checkpoint_every), "--resume", str(run)]
        program.main(["--config", str(tmp_path / "config.json"), *more])
    without, saved, gone_on = capsys.readouterr().out.split("stopped by SIGTERM ")[1:]
    assert without.startswith("after step 3 of 24 without a checkpoint, for checkpoint_every=0\n")
    assert f"no checkpoint in {run} yet: the run starts again at its first step\n" in without
    assert saved.startswith("after step 7 of 24 with a checkpoint; go on") and "no checkpoint in" not in saved
    assert gone_on == "after step 11 of 24 without a checkpoint, for checkpoint_every=0\n"
    assert series(read_metrics(run), "loss")[0] == list(range(1, 12))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["5", "7"]


def test_steps_left_out_in_a_row_are_counted_through_an_interruption(text, tmp_path, scripted):
    """From step 3 on no loss is finite: three are left out, a signal comes, and after four in all the run stops."""

    def act(step):
        if step == 5:
            signal.raise_signal(signal.SIGTERM)
        return np.nan if step > 2 else 1.0

    config = run_config(text, on_nonfinite="skip", max_skipped_in_a_row=4)
    message = "was not finite 5 times in a row, at step 7 too"
    scripted(lambda step: np.nan if step > 2 else 1.0)
    with pytest.raises(loop.NonFiniteLossError, match=message):
        train(config, tmp_path / "unbroken")
    scripted(act)
    assert train(config, tmp_path / "run").stopped_by == "SIGTERM"
    for _ in range(2):  # The second time from the same checkpoint.
        scripted(lambda step: np.nan)
        with pytest.raises(loop.NonFiniteLossError, match=message):
            train(config, tmp_path / "run")
    # A finite one ends the row.
    scripted(lambda step: 1.0 if step == 1 else np.nan)
    with pytest.raises(loop.NonFiniteLossError, match="was not finite 5 times in a row, at step 11 too"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_is_no_error_either(text, tmp_path, scripted, monkeypatch, capsys, number):
    def load_corpus(*arguments):
        os.kill(os.getpid(), number)
        return data.load_corpus(*arguments)

    scripted(lambda step: None)
    config = run_config(text)
    (tmp_path / "config.json").write_text(config.to_json())
    with monkeypatch.context() as patch:
        patch.setattr(loop, "load_corpus", load_corpus)
        program.main(["--config", str(tmp_path / "config.json"), "--resume", str(tmp_path / "run")])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"stopped by {number.name} before the first step; go on with python -m train --resume {tmp_path}" in shown
    assert train(read_config(tmp_path / "run"), tmp_path / "run").step == 24


def test_a_ctrl_c_that_nothing_waits_for_is_one_line(capsys):
    def main(arguments):
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as it is during imports
    try:
        with pytest.raises(SystemExit) as stop:
            cli.run(main, [])
        # One more while Python ends is none that it would print a traceback for.
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130 and capsys.readouterr().err == "stopped by Ctrl-C\n"


@pytest.mark.parametrize("module", ["train", "train.compare", "train.prepare", "train.sample"])
def test_a_ctrl_c_during_imports_ends_the_program_without_a_word(tmp_path, module):
    (tmp_path / "numpy.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    # What runs in the background of a shell ignores it, and so does what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", module, "--help"]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_second_ctrl_c_is_pythons_own(text, tmp_path, scripted):
    def twice(step):
        for _ in range(2 * (step == 3)):
            # In this thread: two that wait for another thread to take them count as one.
            signal.raise_signal(signal.SIGINT)

    scripted(twice)
    # What runs in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(run_config(text), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_folder_that_takes_no_checkpoints_is_refused_by_name(text, tmp_path, scripted):
    scripted(lambda step: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=f"checkpoints cannot be kept in {tmp_path}/run/checkpoints: "):
        train(run_config(text), tmp_path / "run")


# What orbax leaves behind when a write fails: coroutines that nobody awaited, and event loops that nobody closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_up_is_an_error_and_leaves_the_checkpoint_before(text, tmp_path, scripted):
    """Once the checkpoint of step 5 is there, no file may grow beyond 20 kB: that of step 10 cannot be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step):
        if step == 10:
            while not (tmp_path / "run" / "checkpoints" / "5").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    scripted(fill)
    config = run_config(text)
    try:
        with pytest.raises(CheckpointError, match="in .*checkpoints: .*; that of step 5 is whole"):
            train(config, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        gc.collect()
    scripted(lambda step: None)
    assert train(config, tmp_path / "run").step == 24
    assert series(read_metrics(tmp_path / "run"), "loss")[0] == list(range(1, 25))


def test_shapes_are_traced_once_a_start(text, tmp_path, scripted, monkeypatch):
    trace, traced = nnx.eval_shape, []
    monkeypatch.setattr(nnx, "eval_shape", lambda *arguments: traced.append(arguments) or trace(*arguments))
    for attention in ("exact", "sagebwd"):
        config = run_config(text, attention=attention, width=24)  # Of no other test: what compiles is kept.
        for stop_at in (2, None):
            scripted(lambda step, at=stop_at: signal.raise_signal(signal.SIGTERM) if step == at else None)
            traced.clear()
            train(config, tmp_path / attention)
            assert len(traced) == 1


def test_other_batches_or_another_model_are_refused(text, tmp_path, scripted):
    scripted(lambda step: None)
    config = run_config(text)
    train(config, tmp_path / "run")
    with pytest.raises(SettingError, match="seed=9: the run has 0 and cannot go on with another"):
        train(dataclasses.replace(config, seed=9), tmp_path / "run")
    # Before the data is read, which may take long.
    unread = dataclasses.replace(config, seed=9, data=dataclasses.replace(config.data, data="nowhere"))
    with pytest.raises(SettingError, match="seed=9: the run has 0"):
        train(unread, tmp_path / "run")
    longer = dataclasses.replace(config, steps=30)
    assert train(longer, tmp_path / "run").step == 30 and read_config(tmp_path / "run") == longer
    # What the steps before were made with stays, and what no step is made with is not written down.
    assert TrainConfig.from_json((tmp_path / "run" / "config.step-24.json").read_text()) == config
    train(dataclasses.replace(longer, log_every=3), tmp_path / "run")
    with pytest.raises(SettingError, match="steps=24: the run has a checkpoint of step 30; steps must be at least"):
        train(config, tmp_path / "run")
    assert read_config(tmp_path / "run") == longer
    assert [path.name for path in (tmp_path / "run").glob("config.*-*")] == ["config.step-24.json"]


def test_another_tokenizer_is_refused_and_a_file_that_moved_is_not(text, tmp_path, scripted):
    scripted(lambda step: None)
    for name, size in (("own", 280), ("other", 270)):
        train_bpe(iter([b"def function(value): return value + 1"]), size, 1 << 20).save(str(tmp_path / name))
    config = run_config(text, vocab_size=300, tokenizer=str(tmp_path / "own"))
    train(config, tmp_path / "run")
    (tmp_path / "own").rename(tmp_path / "moved")
    moved = run_config(text, vocab_size=300, tokenizer=str(tmp_path / "moved"), steps=26)
    assert train(moved, tmp_path / "run").step == 26
    other = run_config(text, vocab_size=300, tokenizer=str(tmp_path / "other"), steps=28)
    with pytest.raises(
        SettingError, match="other' is not that of the run's first 26 steps; accepted: .*tokenizer.json"
    ):
        train(other, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (tmp_path / "moved").read_bytes()
    assert read_config(tmp_path / "run") == moved
