"""Checkpoints: the newest few are kept, whole or not at all, and those of earlier versions are read."""

import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_micro import files_up_to

from train.checkpoint import CheckpointError, Checkpoints, Progress
from train.step import TrainState


def make_state(value):
    array = jnp.full((3, 5), value, jnp.float32)
    return TrainState({"matrix": array}, {"moment": array + 0.5})


def test_checkpoints_are_kept_to_a_number_and_read_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        checkpoints.restore(make_state(0.0))
    for step in (10, 20, 30):
        checkpoints.save(make_state(float(step)), Progress(step, 1.5 * step, step // 10, step // 20))
    checkpoints.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["20", "30"]
    state, progress = checkpoints.restore(make_state(0.0))
    assert progress == Progress(30, 45.0, 3, 1)
    np.testing.assert_array_equal(state.opt_state["moment"], np.full((3, 5), 30.5))
    params, step = checkpoints.restore_params(make_state(0.0).params, ema=False)
    assert step == 30 and float(params["matrix"][0, 0]) == 30.0
    checkpoints.close()


def test_a_damaged_checkpoint_is_an_error_that_names_the_others(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        checkpoints.save(make_state(float(step)), Progress(step, 0.0, 0))
    checkpoints.wait()
    for path in (tmp_path / "checkpoints" / "20" / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(CheckpointError, match=r"checkpoints/20 cannot be read: .*; others: \[10\], which are used if"):
        checkpoints.restore(make_state(0.0))
    checkpoints.close()


def test_what_was_half_written_when_the_process_died_is_not_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(make_state(10.0), Progress(10, 0.0, 0))
    checkpoints.wait()
    checkpoints.close()
    half = tmp_path / "checkpoints" / "20.orbax-checkpoint-tmp"
    (half / "params").mkdir(parents=True)
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest() == 10
    again.save(make_state(20.0), Progress(20, 0.0, 0))
    again.wait()
    assert again.latest() == 20
    again.close()


def too_large():
    """A state that no compression makes fit into 20 kB."""
    noise = jax.random.normal(jax.random.key(0), (30_000,))
    return TrainState({"matrix": noise}, {"moment": noise})


# What orbax leaves behind when a write fails, as in tests/test_train_resume.py.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_last_whole_one_is_waited_for_and_is_not_what_could_not_be_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.last_whole() == (None, None)
    checkpoints.save(make_state(10.0), Progress(10, 0.0, 0))
    assert checkpoints.last_whole() == (10, None)
    with files_up_to(20_000):
        checkpoints.save(too_large(), Progress(20, 0.0, 0))
        assert checkpoints.latest() == 20
        step, failure = checkpoints.last_whole()
        assert step == 10 and "could not be finished" in str(failure)
    checkpoints.close()
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_does_not_raise_what_could_not_be_written(tmp_path):
    # It would take the place of the error that a run ends with.
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(make_state(10.0), Progress(10, 0.0, 0))
    with files_up_to(20_000):
        checkpoints.wait()
        checkpoints.save(too_large(), Progress(20, 0.0, 0))
        checkpoints.close()
    gc.collect()
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest() == 10
    again.close()


def test_a_checkpoint_from_before_the_row_was_counted_is_read_as_none_in_a_row(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(make_state(10.0), Progress(10, 1.5, 4, 2))
    checkpoints.wait()
    [path] = [
        path for path in (tmp_path / "checkpoints" / "10" / "progress").iterdir() if "skipped" in path.read_text()
    ]
    written = json.loads(path.read_text())
    del written["skipped_in_a_row"]
    assert written == {"step": 10, "seconds": 1.5, "skipped": 4}
    path.write_text(json.dumps(written))
    state, progress = checkpoints.restore(make_state(0.0))
    assert progress == Progress(10, 1.5, 4, 0) and float(state.params["matrix"][0, 0]) == 10.0
    checkpoints.close()
