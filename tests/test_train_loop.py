"""Whole runs of a micro model: it learns, leaves its files, repeats, and stops at a loss that is not finite."""

import itertools
import struct
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from tensorboardX.proto.event_pb2 import Event, SessionLog
from train_micro import files_up_to, micro_config, quiet, run_config, write_text

from train import __main__ as program
from train import log as log_module
from train import loop
from train import metrics as metrics_module
from train import run_dir as run_dir_module
from train.config import SettingError, TrainConfig
from train.data import load_corpus, unigram_loss
from train.data.shards import write_shard
from train.metrics import MetricsWriter, read_metrics, series
from train.optimizer import learning_rate_schedule
from train.step import StepMetrics

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run of 40 steps with two micro batches each, its config, result, and what the bar showed."""
    config = run_config(text, tmp_path_factory.mktemp("runs"), steps=40, tokens_per_step=2 * 4 * 24, eval_every=15)
    console = quiet()
    return config, loop.train(config, console=console), console.file.getvalue()


def test_it_learns(finished, text):
    config, result, _ = finished
    _, losses = series(read_metrics(result.run_dir), "loss")
    assert abs(losses[0] - np.log(256)) < 0.2
    assert result.train_loss < result.held_out_loss + 0.5
    assert result.held_out_loss < unigram_loss(load_corpus(config.data, 256), 256) - 0.3


def test_metrics_have_every_step_and_held_out_losses_where_asked(finished):
    config, result, _ = finished
    records = read_metrics(result.run_dir)
    train_records = [record for record in records if "loss" in record]
    assert [record["step"] for record in train_records] == list(range(1, 41))
    assert all(record["tokens"] == 192 * record["step"] for record in records)
    assert [record["step"] for record in records if "held_out_loss" in record] == [15, 30, 40]
    assert records[-1]["held_out_loss"] == result.held_out_loss
    assert train_records[0]["tokens_per_second"] is None
    assert all(record["tokens_per_second"] > 0 and record["step_seconds"] > 0 for record in train_records[1:])
    assert all(record["memory_bytes"] > 1e7 and record["skipped"] == 0 for record in train_records)
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and seconds[-1] <= result.seconds
    rates = [record["learning_rate"] for record in train_records]
    assert np.argmax(rates) == 5 and rates[5] == pytest.approx(1e-2) and rates[-1] == pytest.approx(1e-3)


def test_config_and_plot_lie_beside_the_metrics(finished):
    config, result, _ = finished
    assert sorted(path.name for path in result.run_dir.iterdir()) == ["config.json", "loss.png", "metrics.jsonl"]
    assert TrainConfig.from_json((result.run_dir / "config.json").read_text()) == config
    image = imread(result.run_dir / "loss.png")
    assert image.shape[:2] == (750, 1200) and image.std() > 0.05


def test_bar_shows_loss_and_speed(finished):
    _, result, shown = finished
    last = read_metrics(result.run_dir)[-2]
    assert f"40/40 loss {last['loss']:.4f}" in shown and f"{last['tokens_per_second']:,.0f} tokens/s" in shown


def test_a_run_repeats_bitwise_and_overwrites_nothing(finished):
    config, result, _ = finished
    again = loop.train(config, console=quiet())
    assert again.run_dir.name == result.run_dir.name + "-2"
    assert series(read_metrics(again.run_dir), "loss") == series(read_metrics(result.run_dir), "loss")
    assert again.held_out_loss == result.held_out_loss


@pytest.fixture
def scripted(monkeypatch):
    """Replaces both jitted functions: losses are 1 but for {(step, field): value}, and nothing is compiled.

    `see` and `see_held_out` are given what both read besides the state.
    """

    def script(values, held_out=1.0, see=lambda *arrays: None, see_held_out=lambda *arrays: None):
        batches = []

        def make_train_step(graphdef, optimizer, **_):
            calls = itertools.count(1)

            def train_step(state, tokens, segment_ids):
                step = next(calls)
                batches.append(np.asarray(tokens))
                see(tokens, segment_ids)
                return state, StepMetrics(*(values.get((step, field), 1.0) for field in StepMetrics._fields))

            return train_step

        monkeypatch.setattr(loop, "make_train_step", make_train_step)

        def eval_step(params, *arrays):
            see_held_out(*arrays)
            return held_out, 1.0

        monkeypatch.setattr(loop, "make_eval_step", lambda graphdef: eval_step)
        return batches

    return script


def test_steps_and_held_out_losses_get_segment_ids_where_documents_are_packed(text, tmp_path, scripted):
    trained, held_out = [], []
    scripted({}, see=lambda *arrays: trained.append(arrays), see_held_out=lambda *arrays: held_out.append(arrays))
    for documents in ("stream", "packed"):
        trained.clear(), held_out.clear()
        loop.train(run_config(text, tmp_path, documents=documents, name=documents), console=quiet())
        found = [arrays[1] for arrays in trained + held_out]
        if documents == "stream":
            assert len(found) > 20 and all(ids is None for ids in found)
        else:
            assert len(found) > 20 and len({int(i) for ids in found for i in np.unique(ids)}) > 1


def test_the_picture_is_there_while_the_run_goes_on(text, tmp_path, scripted):
    seen = []
    scripted({}, see=lambda *_: seen.append((tmp_path / "run" / "loss.png").exists()))
    loop.train(run_config(text, tmp_path), run_dir=tmp_path / "run", console=quiet())
    assert seen == [False] * 10 + [True] * 10


def test_health_is_recorded_layer_by_layer(text, tmp_path, scripted):
    scripted({})
    config = run_config(text, tmp_path, attention="sagebwd", health_every=10, health_tokens=16)
    records = [record for record in read_metrics(loop.train(config, console=quiet()).run_dir) if "error_out" in record]
    assert [record["step"] for record in records] == [10, 20]
    for name in (
        "largest_logit",
        "ds_zero_share",
        "error_p",
        "error_ds",
        "error_out",
        "error_dq",
        "error_dk",
        "error_dv",
    ):
        assert len(records[-1][name]) == config.model.num_layers and min(records[-1][name]) > 0


def test_steps_get_their_tokens_in_micro_batches_that_never_repeat(text, tmp_path, scripted):
    batches = scripted({})
    loop.train(run_config(text, tmp_path, tokens_per_step=3 * 4 * 24), console=quiet())
    assert [batch.shape for batch in batches] == [(3, 4, 25)] * 20
    assert len({batch.tobytes() for batch in batches}) == 20


@pytest.mark.parametrize(("room", "end"), [(1 << 30, ""), (6000, "; max_bytes=6000 ended the reading there")])
def test_it_says_how_much_it_trains_on(text, tmp_path, scripted, room, end):
    scripted({})
    config, console = run_config(text, tmp_path, steps=6, max_bytes=room), quiet()
    loop.train(config, console=console)
    corpus = load_corpus(config.data, 256)
    expected = f"{len(corpus.train):,} tokens to train on and {len(corpus.held_out):,} held out{end}"
    assert console.file.getvalue().splitlines()[0] == expected


def test_log_every_thins_the_records_but_keeps_the_ends(text, tmp_path, scripted):
    scripted({})
    result = loop.train(run_config(text, tmp_path, steps=21, log_every=8, name="thin"), console=quiet())
    assert result.run_dir == tmp_path / "thin"
    assert series(read_metrics(result.run_dir), "loss")[0] == [1, 8, 16, 21]


@pytest.mark.parametrize(
    ("step", "field", "value", "message"),
    [
        (1, "loss", np.inf, "loss is inf at step 1;"),
        (7, "loss", np.nan, "loss is nan at step 7;"),
        (10, "grad_norm", np.inf, "gradient norm is inf at step 10;"),  # a step with a held-out loss
        (20, "loss", np.nan, "loss is nan at step 20;"),  # the last one
    ],
)
def test_what_is_not_finite_stops_the_run_with_its_step(text, tmp_path, scripted, step, field, value, message):
    scripted({(step, field): value})
    with pytest.raises(loop.NonFiniteLossError, match=message):
        loop.train(run_config(text, tmp_path, name="broken"), console=quiet())
    assert series(read_metrics(tmp_path / "broken"), "loss")[0] == list(range(1, step))


def test_what_is_not_finite_stops_the_run_even_where_nothing_is_logged(text, tmp_path, scripted):
    scripted({(7, "loss"): np.nan})
    with pytest.raises(loop.NonFiniteLossError, match="loss is nan at step 7;"):
        loop.train(run_config(text, tmp_path, log_every=100), console=quiet())


def test_a_held_out_loss_that_is_not_finite_stops_the_run(text, tmp_path, scripted):
    scripted({}, held_out=np.nan)
    with pytest.raises(FloatingPointError, match="held-out loss is nan at step 10;"):
        loop.train(run_config(text, tmp_path), console=quiet())


@pytest.mark.parametrize("overrides", [dict(data="nowhere"), dict(attention="cudnn", compute_dtype="bfloat16")])
def test_nothing_is_written_when_the_data_or_a_setting_cannot_be_used(text, tmp_path, overrides):
    config = run_config(text, tmp_path / "runs")
    config = micro_config(**vars(config.data) | dict(runs_dir=config.runs_dir) | overrides)
    with pytest.raises((FileNotFoundError, SettingError), match="'nowhere' does not exist|attention='cudnn' needs"):
        loop.train(config, console=quiet())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_what_is_not_finite_is_left_out_and_counted_if_asked(text, tmp_path, scripted, field):
    scripted({(3, field): np.nan, (10, field): np.inf, (11, field): np.inf})
    config = run_config(text, tmp_path, name="skips", on_nonfinite="skip", max_skipped_in_a_row=2, log_every=7)
    assert loop.train(config, console=quiet()).skipped == 3
    records = [record for record in read_metrics(tmp_path / "skips") if "skipped" in record]
    # The optimizer has made no update at steps that were left out; nor has its schedule moved on.
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    rates = {record["step"]: record["learning_rate"] for record in records}
    for step, updates in {1: 0, 7: 5, 14: 10, 20: 16}.items():
        assert rates[step] == pytest.approx(float(schedule(updates)), rel=1e-6)
    # A step that was left out has a record of its own.
    found = [(record["step"], record["loss"], record["skipped"]) for record in records]
    expected = [(1, 1.0, 0), (3, None, 1), (7, 1.0, 1), (10, None, 2), (11, None, 3), (14, 1.0, 3), (20, 1.0, 3)]
    assert found == expected


def test_too_many_in_a_row_stop_the_run_all_the_same(text, tmp_path, scripted):
    scripted({(step, "loss"): np.nan for step in range(5, 20)})
    with pytest.raises(loop.NonFiniteLossError, match="was not finite 3 times in a row, at step 7 too"):
        loop.train(run_config(text, tmp_path, on_nonfinite="skip", max_skipped_in_a_row=2), console=quiet())


def test_mfu_is_the_share_of_the_peak_that_is_given(text, tmp_path, scripted):
    scripted({})
    result = loop.train(run_config(text, tmp_path, peak_flops=1e9), console=quiet())
    record = [record for record in read_metrics(result.run_dir) if "mfu" in record][-1]
    parameters = 256 * 40 + 40 + (2 * 40 + 40 * (6 + 3 + 3 + 6) * 8 + 2 * 8 + 3 * 40 * 56)
    flops = 6 * parameters + 6 * 6 * 8 * 24
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 1e9)
    assert [record["mfu"] for record in read_metrics(result.run_dir) if "mfu" in record][0] is None


def test_speed_where_the_device_has_run_out_of_steps_is_that_of_all_since_the_clock_started(monkeypatch):
    # Steps take a second; dispatching the next holds up a record for 0.6 s, but where none is dispatched.
    now, written = [0.0], []
    monkeypatch.setattr(log_module.time, "perf_counter", lambda: now[0])
    writer = types.SimpleNamespace(write=written.append)
    progress = log_module.progress_bar(None, is_shown=False)
    config = micro_config(tokens_per_step=96, steps=8)
    log = log_module.StepLog(config, writer, progress, log_module.Speed(1.0, None))
    metrics = StepMetrics(np.float32(1), np.float32(1))
    for time, step, is_idle in [(11.6, 1, False), (12.6, 2, False), (13.0, 3, True)]:
        now[0] = time
        log.record(step, metrics, is_idle=is_idle)
    now[0] = 20.0
    log.restart_clock(3)
    for time, step, is_idle in [(21.6, 4, False), (22.6, 5, False), (23.0, 6, True)]:
        now[0] = time
        log.record(step, metrics, is_idle=is_idle)
    seconds = [record["step_seconds"] for record in written]
    assert seconds == [None, *map(pytest.approx, [1.0, 0.7, 1.6, 1.0, 1.0])]


@pytest.mark.parametrize("line", ["noise", "3", '{"loss": 1.0}'])
def test_a_record_that_is_none_is_an_error_with_its_line(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    for read in (read_metrics, MetricsWriter):
        with pytest.raises(SettingError, match=f"{tmp_path}/metrics.jsonl line 2 is no record of a step: '"):
            read(tmp_path)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_cannot_be_made_is_refused_by_name(text, tmp_path, resume):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SettingError, match=f"run folder '{folder}' cannot be made: .*; accepted: .*runs_dir, name"):
            loop.train(run_config(text, tmp_path), run_dir=folder, console=quiet(), resume=resume)


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    with files_up_to(20_000), pytest.raises(OSError, match=f"File too large: '{tmp_path}/train_000000.bin'"):
        write_shard(tmp_path / "train_000000.bin", np.arange(20_000))


def events(folder):
    """What TensorBoard reads in a folder, in the order of the files' names."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            # A length, its checksum, the event, its checksum.
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def test_tensorboard_has_every_number_of_a_record_and_drops_those_after_a_restart(tmp_path):
    def shown():
        return [
            (event.step, {value.tag: value.simple_value for value in event.summary.value})
            for event in events(tmp_path / "tensorboard")
            if event.summary.value
        ]

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write({"step": 1, "tokens": 8, "loss": 2.5, "mfu": None})
        writer.write({"step": 2, "error_out": [0.25, 0.5]})
    assert shown() == [(1, {"tokens": 8, "loss": 2.5}), (2, {"error_out/0": 0.25, "error_out/1": 0.5})]
    [first] = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name("events.0"))  # The names of files have the second that they were made in.
    with MetricsWriter(tmp_path, step=1, tensorboard=True) as writer:
        writer.write({"step": 2, "loss": 1.5})
    assert shown()[2:] == [(2, {"loss": 1.5})]
    starts = [event.step for event in events(tmp_path / "tensorboard") if event.session_log.status == SessionLog.START]
    assert starts == [2]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_disk_that_fills_up_between_checkpoints_ends_the_run_with_its_step(text, tmp_path, scripted, tensorboard):
    scripted({})
    config = run_config(text, tmp_path, tensorboard=tensorboard, name="full", eval_every=20)
    # Room for config.json, not for twenty records.
    with files_up_to(2_500), pytest.raises(OSError, match=r"step \d+: File too large: '.*full/metrics.jsonl'"):
        loop.train(config, console=quiet())


def test_tensorboard_on_a_full_disk_is_an_error_and_not_a_wait_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module, "_BOARD_SECONDS", -1.0)
    with MetricsWriter(tmp_path, tensorboard=True) as writer, files_up_to(1_500):
        with pytest.raises(OSError, match=r"step \d+: File too large: '.*/tensorboard'"):
            for step in range(1, 100):
                writer.write({"step": step, **{f"tag_{i}": [0.5] * 4 for i in range(4)}})


def test_several_hosts_that_nothing_says_where_to_find_are_refused_by_name(monkeypatch):
    def initialize():
        raise ValueError("coordinator_address should be defined.")

    # JAX itself takes this before its first computation alone.
    monkeypatch.setattr(program.jax.distributed, "initialize", initialize)
    with pytest.raises(SettingError, match="distributed=True: .*coordinator_address"):
        program.main(["--distributed", "True"])


def test_a_host_that_comes_later_takes_the_first_ones_folder(tmp_path, monkeypatch):
    assert run_dir_module._of_first_host(tmp_path) == tmp_path
    sent = []
    monkeypatch.setattr(run_dir_module.jax, "process_count", lambda: 2)
    monkeypatch.setattr(run_dir_module.multihost_utils, "broadcast_one_to_all", lambda x: sent.append(x) or sent[0])
    first, second = (run_dir_module._of_first_host(tmp_path / name) for name in ("läuft", "läuft-2"))
    assert first == second == tmp_path / "läuft"


def command(*arguments):
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT)


def test_command_line_diverges_with_one_message_and_a_failure(text, tmp_path):
    sizes = "--steps 8 --warmup-steps 0 --num-layers 1 --width 16 --micro-batch 2 --sequence-length 32"
    ended = command(
        *("train", "--attention", "exact", "--data", text, "--runs-dir", str(tmp_path), "--tokens-per-step", "64"),
        *("--checkpoint-every", "0", "--health-every", "0"),
        *("--held-out-fraction", "0.2", "--peak-learning-rate", "1e30"),
        *sizes.split(),
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr == "error: loss is nan at step 2; the run stopped there\n"
    [run] = tmp_path.iterdir()
    assert not (run / "checkpoints").exists()
