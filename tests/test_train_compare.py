"""Comparing runs: two that are trained for it, and any folders of runs."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console
from train_micro import quiet, run_config, write_text

from train import compare as compare_program
from train import loop
from train.compare import compare, compare_runs, loss_table, relative_gap, runs_table
from train.config import SettingError, TrainConfig
from train.metrics import read_metrics, series


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The config, folder and results of two runs of 20 steps."""
    text = write_text(tmp_path_factory.mktemp("text"))
    config = run_config(text, tmp_path_factory.mktemp("runs"), attention="sagebwd", compute_dtype="bfloat16")
    return config, *compare(config, console=quiet())


def test_compare_trains_both_on_the_same_data_and_seed(compared):
    config, folder, results = compared
    assert folder == Path(config.runs_dir) / "tiny-compare"
    assert sorted(path.name for path in folder.iterdir()) == ["exact", "loss.png", "sagebwd"]
    assert imread(folder / "loss.png").shape[:2] == (1050, 1200)
    configs = {
        name: TrainConfig.from_json((result.run_dir / "config.json").read_text()) for name, result in results.items()
    }
    assert configs == {name: config.with_attention(name) for name in ("exact", "sagebwd")}
    losses = [series(read_metrics(folder / name), "loss")[1] for name in ("exact", "sagebwd")]
    first, second = losses
    assert first != second  # INT8 has been there
    np.testing.assert_allclose(first, second, rtol=0.01)
    assert abs(relative_gap(results)) < 0.01


def test_runs_of_before_are_a_table_and_two_plots(compared, tmp_path, capsys):
    _, runs, results = compared
    folder = tmp_path / "runs"  # into which the program writes
    shutil.copytree(runs, folder)
    console = quiet()
    compare_runs([folder / "exact", folder / "sagebwd"], tmp_path, console=console)
    shown = console.file.getvalue()
    gap = 100 * relative_gap(results)
    for part in ("exact", "sagebwd", "20/20", f"{results['exact'].held_out_loss:.4f}", "+0.00%", f"{gap:+.2f}%"):
        assert part in shown
    for name in ("compare_tokens.png", "compare_seconds.png"):
        assert imread(tmp_path / name).shape[:2] == (1050, 1200)
    compare_program.main([str(folder / "exact"), str(folder / "sagebwd")])
    assert (folder / "compare_tokens.png").exists() and f"{gap:+.2f}%" in capsys.readouterr().out
    with pytest.raises(SettingError, match="--flash: with folders of runs there are no options"):
        compare_program.main([str(folder / "exact"), "--flash", "1"])


def test_a_table_of_runs_has_room_for_their_names(compared, tmp_path, monkeypatch):
    result = compared[2]["exact"]
    monkeypatch.chdir(result.run_dir.parent)
    console = Console(file=io.StringIO(), width=80)
    console.print(runs_table([Path(result.run_dir.name)]))
    assert f" {result.run_dir.name}  exact      20/20 " in console.file.getvalue()


def test_gaps_are_taken_after_as_many_tokens(compared, tmp_path):
    """Beside a run of half its steps of twice the tokens, whose last held-out loss is 1% above."""
    result = compared[2]["exact"]
    doubled = tmp_path / "doubled"
    doubled.mkdir()
    (doubled / "config.json").write_bytes((result.run_dir / "config.json").read_bytes())
    records = [{**x, "step": (x["step"] + 1) // 2} for x in read_metrics(result.run_dir)]
    records = [{**x, "held_out_loss": 1.01 * x["held_out_loss"]} if "held_out_loss" in x else x for x in records]
    (doubled / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    console = quiet()
    console.print(runs_table([result.run_dir, doubled]))
    assert "+1.00%" in console.file.getvalue()


def test_runs_without_settings_or_records_are_refused_by_name(compared, tmp_path):
    result = compared[2]["exact"]
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "config.json").write_bytes((result.run_dir / "config.json").read_bytes())
    for name, message in (("none", "none' is no run: it has no config.json"), ("fresh", "fresh' has no records yet")):
        for runs in ([tmp_path / name, result.run_dir], [result.run_dir, tmp_path / name]):
            with pytest.raises((FileNotFoundError, SettingError), match=message):
                compare_runs(runs, tmp_path, console=quiet())


def test_table_has_both_losses_and_the_gap(tmp_path):
    exact = loop.RunResult(tmp_path, 2.25, 2.5, 1234.0, 56.0, 20)
    console = quiet()
    console.print(loss_table({"exact": exact, "sagebwd": dataclasses.replace(exact, held_out_loss=2.51)}))
    shown = console.file.getvalue()
    for part in ("2.2500", "2.5000", "2.5100", "1,234", "56.0", "held-out losses differ by 0.400%"):
        assert part in shown
