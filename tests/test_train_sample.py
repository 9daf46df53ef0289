"""Text from a trained model: what was learned comes back, and what cannot be is refused by message."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from train_micro import micro_config, write_text

from train import loop, prepare, sample
from train.checkpoint import CheckpointError
from train.config import SettingError
from train.run_dir import read_config, write_config

SENTENCE = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that has learned one sentence by heart, and keeps a moving average."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text(SENTENCE * 90)
    config = micro_config(
        data=str(folder / "text.txt"),
        num_layers=1,
        steps=120,
        eval_every=120,
        checkpoint_every=120,
        ema_decay=0.5,
        held_out_fraction=0.1,
    )
    return loop.train(config, run_dir=folder / "run", console=Console(file=io.StringIO())).run_dir


def test_it_says_what_it_has_learned(run, capsys):
    sample.main([str(run), "--prompt", "quick brown", "--tokens", "60", "--temperature", "0"])
    shown = capsys.readouterr()
    assert shown.out == (SENTENCE * 3)[4 : 4 + 71] + "\n"
    assert "step 120" in shown.err


def test_choices_follow_the_seed_and_the_cache_of_shapes_holds_any_length(run):
    _, model, _ = sample.load_model(run, None)
    options = sample.SampleConfig(run=run, tokens=30, temperature=5.0)
    prompt = list(b"the")
    first, again = (sample.sample(model, prompt, options, 24) for _ in range(2))
    other = sample.sample(model, prompt, dataclasses.replace(options, seed=1), 24)
    assert first == again != other and len(first) == 30
    top = sample.sample(model, prompt, dataclasses.replace(options, top_k=1), 24)
    assert top == sample.sample(model, prompt, dataclasses.replace(options, temperature=0.0), 24)


def test_the_moving_average_is_what_writes(run):
    _, model, _ = sample.load_model(run, None)
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager((run / "checkpoints").absolute())
    items = {name: ocp.args.StandardRestore() for name in ("params", "ema")}
    restored = manager.restore(120, args=ocp.args.Composite(**items))
    manager.close()
    got = np.asarray(model.embedding[...])
    for name, same in (("ema", True), ("params", False)):
        leaves = [leaf for leaf in jax.tree.leaves(restored[name]) if leaf.shape == got.shape]
        assert len(leaves) == 1 and np.array_equal(got, leaves[0]) == same
    assert isinstance(model, nnx.Module)


def test_a_run_keeps_the_tokenizer_that_its_tokens_are_of(tmp_path, monkeypatch, capsys):
    shards = tmp_path / "shards"
    prepare.prepare(
        prepare.PrepareConfig(data=write_text(tmp_path / "text"), output=shards, vocab_size=300, held_out_fraction=0.2)
    )
    monkeypatch.chdir(tmp_path)
    config = micro_config(data="shards", vocab_size=384, num_layers=1, steps=6, checkpoint_every=6)
    run = loop.train(config, run_dir=tmp_path / "run", console=Console(file=io.StringIO())).run_dir
    assert (run / "tokenizer.json").read_bytes() == (shards / "tokenizer.json").read_bytes()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shards.rename(tmp_path / "moved")
    assert sample.run_tokenizer(run, read_config(run), None).size == 300
    # Of a run without it nothing can say what its tokens are.
    (run / "tokenizer.json").unlink()
    with pytest.raises(SettingError, match="run.* has no tokenizer.json, nor has its data 'shards'.* --tokenizer"):
        sample.main([str(run)])
    sample.main([str(run), "--tokenizer", str(tmp_path / "moved" / "tokenizer.json"), "--tokens", "3"])
    assert "step 6" in capsys.readouterr().err
    assert sample.run_tokenizer(run, read_config(run), "bytes").tokenizer is None


def test_text_without_a_tokenizer_is_bytes_whatever_the_vocabulary(tmp_path):
    for data in (None, write_text(tmp_path)):
        assert sample.run_tokenizer(tmp_path, micro_config(data=data, vocab_size=384), None).tokenizer is None


def test_what_cannot_be_is_refused_by_message(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="is no run: it has no config.json"):
        sample.main([str(tmp_path)])
    write_config(tmp_path, micro_config())
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        sample.main([str(tmp_path)])
    for arguments, message in (
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 must be at least 0"),
        (["--prompt", ""], "prompt='' has no tokens"),
    ):
        with pytest.raises(SettingError, match=message):
            sample.main([str(run), *arguments])
