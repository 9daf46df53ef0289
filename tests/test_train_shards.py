"""Token shards: every format of the field, streams across files, damage with its place, and text turned into shards."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from train_micro import micro_config, write_text

from train import data, prepare
from train.config import SettingError
from train.data import shards
from train.data.batches import StepSource, Windows
from train.data.corpus import find_tokenizer
from train.data.documents import Skipped
from train.data.tokenizer import load_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 250, 700)


def write_nanogpt(path, tokens):
    tokens.astype("<u2").tofile(path)


def write_llmc(path, tokens):
    shards.write_shard(path, tokens)


def write_llmc_wide(path, tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u4").tobytes())


def write_npy(path, tokens):
    np.save(path, tokens.astype(np.uint16))


FORMATS = [(write_nanogpt, ".bin"), (write_llmc, ".bin"), (write_llmc_wide, ".bin"), (write_npy, ".npy")]


def load(folder, vocab_size=256, **overrides):
    return data.load_corpus(micro_config(data=str(folder), **overrides).data, vocab_size)


@pytest.mark.parametrize(("write", "suffix"), FORMATS)
def test_every_format_reads_back_across_files(tmp_path, write, suffix):
    for number, part in enumerate(np.split(TOKENS, [100, 101, 400])):
        write(tmp_path / f"fineweb_train_{number:06d}{suffix}", part)
    write(tmp_path / f"fineweb_val_000000{suffix}", TOKENS[:60])
    (tmp_path / "other.bin").write_bytes(b"not tokens")
    corpus = load(tmp_path)
    assert (len(corpus.train), len(corpus.held_out), corpus.separator) == (700, 60, 50_256)
    for start, count in ((0, 700), (95, 10), (99, 3), (650, 50)):
        part = corpus.train.read(start, count)
        assert part.dtype == np.int32
        np.testing.assert_array_equal(part, TOKENS[start : start + count])
    np.testing.assert_array_equal(corpus.held_out.read(0, 60), TOKENS[:60])


def test_the_end_is_held_out_where_no_file_is_named_for_it(tmp_path):
    write_nanogpt(tmp_path / "train.bin", TOKENS)
    corpus = load(tmp_path, held_out_fraction=0.1)
    np.testing.assert_array_equal(corpus.train.read(0, len(corpus.train)), TOKENS[:630])
    np.testing.assert_array_equal(corpus.held_out.read(0, 70), TOKENS[630:])


def test_tokens_above_16_bits_are_written_in_32(tmp_path):
    wide = np.asarray([1, 70_000, 3])
    shards.write_shard(tmp_path / "wide.bin", wide)
    np.testing.assert_array_equal(shards.open_shard(tmp_path / "wide.bin").read(0, 3), wide)


def damage(path, write=write_llmc):
    """Shards with one fault each, by name."""
    write(path / "train_good.bin", TOKENS)
    whole = (path / "train_good.bin").read_bytes()
    (path / "train_short.bin").write_bytes(whole[:-6])
    (path / "train_long.bin").write_bytes(whole + b"\0\0")
    (path / "train_header.bin").write_bytes(whole[:500])
    (path / "train_odd.bin").write_bytes(b"\1\0\2")
    (path / "train_empty.bin").write_bytes(b"")
    np.save(path / "train_table.npy", np.zeros((3, 4), np.uint16))
    np.save(path / "train_float.npy", np.zeros(9))
    (path / "train_noise.npy").write_bytes(b"noise")
    np.save(path / "train_cut.npy", TOKENS.astype(np.uint16))
    (path / "train_cut.npy").write_bytes((path / "train_cut.npy").read_bytes()[:-6])
    (path / "train_nothing.npy").write_bytes(b"")
    wrong = TOKENS.copy()
    wrong[123] = 999
    write(path / "train_wrong.bin", wrong)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train_short.bin", "ends at byte 2418; its header says 700 tokens, to byte 2424"),
        ("train_long.bin", "ends at byte 2426; its header says 700 tokens, to byte 2424"),
        ("train_header.bin", "its header at byte 0 has version .1., not 1, or is cut short"),
        ("train_odd.bin", "3 bytes are no whole number of uint16 tokens; it is cut short at byte 3"),
        ("train_empty.bin", "0 bytes are no whole number of uint16 tokens"),
        ("train_table.npy", r"holds uint16 of shape \(3, 4\); accepted is one axis of uint16"),
        ("train_float.npy", "holds float64 of shape"),
        ("train_noise.npy", "no .npy header at byte 0"),
        ("train_cut.npy", "ends at byte 1522; its header says 700 tokens, to byte 1528"),
        ("train_nothing.npy", "no .npy header at byte 0: EOF"),
    ],
)
def test_a_damaged_shard_is_an_error_with_its_place(tmp_path, name, message):
    damage(tmp_path)
    with pytest.raises(data.DataError, match=message) as caught:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_damaged_shards_are_left_out_and_counted_if_asked(tmp_path):
    damage(tmp_path)
    with pytest.raises(data.DataError):
        load(tmp_path)
    corpus = load(tmp_path, on_bad_data="skip")
    assert corpus.skipped.count == 11
    assert len(corpus.train) + len(corpus.held_out) == 700


def test_a_token_that_the_model_lacks_is_found_when_it_is_read(tmp_path):
    damage(tmp_path)
    corpus = load(tmp_path / "train_wrong.bin")
    np.testing.assert_array_equal(corpus.train.read(0, 123), TOKENS[:123])
    with pytest.raises(data.DataError, match=r"train_wrong.bin has token 999 at byte 1270; .* below vocab_size=256"):
        corpus.train.read(100, 50)


def test_a_shard_cut_short_during_the_run_is_an_error_with_its_place(tmp_path):
    write_nanogpt(tmp_path / "train.bin", TOKENS)
    corpus = load(tmp_path)
    with (tmp_path / "train.bin").open("r+b") as file:
        file.truncate(1001)
    with pytest.raises(data.DataError, match="train.bin ends at byte 1000; the tokens wanted end 20 further on"):
        corpus.train.read(490, 30)
    (tmp_path / "train.bin").unlink()
    with pytest.raises(data.DataError, match="train.bin cannot be read at byte 0"):
        corpus.train.read(0, 3)


def test_packed_shards_have_documents_apart(tmp_path):
    tokens = np.where(np.arange(700) % 10 == 9, 255, TOKENS)
    write_nanogpt(tmp_path / "train.bin", tokens)
    corpus = load(tmp_path, separator=255)
    batch = StepSource(Windows(corpus.train, 0, 24), 9, 1, 2, (0, 1), corpus.separator)[0]
    for row, ids in zip(batch.tokens[0], batch.segment_ids[0], strict=True):
        np.testing.assert_array_equal(np.diff(ids), row[:-1] == 255)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    write_text(folder / "text", files=30)
    (folder / "text" / "copy.py").write_bytes((folder / "text" / "module_3.py").read_bytes())
    (folder / "text" / "other.txt").write_text("na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{SNOWMAN}\r\n\t end" * 20)
    config = prepare.PrepareConfig(
        data=str(folder / "text"),
        output=folder / "shards",
        vocab_size=300,
        shard_tokens=2000,
        held_out_fraction=0.2,
    )
    return folder, prepare.prepare(config)


def test_prepare_writes_shards_that_give_back_the_text(prepared):
    folder, counts = prepared
    assert counts["documents"] == 31 and counts["vocab_size"] == 300 and counts["skipped"] == 0
    config = micro_config(data=str(folder / "shards"), vocab_size=384).data
    corpus = data.load_corpus(config, 384)
    assert (len(corpus.train), len(corpus.held_out)) == (counts["train_tokens"], counts["val_tokens"])
    assert len(list((folder / "shards").glob("train_*.bin"))) == -(-counts["train_tokens"] // 2000) > 1
    text = load_tokenizer(find_tokenizer(config), None, 384)
    assert text.separator == corpus.separator
    found = []
    for part in (corpus.train, corpus.held_out):
        tokens = part.read(0, len(part))
        ends = np.flatnonzero(tokens == text.separator)
        assert ends[-1] == len(tokens) - 1
        found += [text.decode(document[:-1].tolist()) for document in np.split(tokens, ends + 1)[:-1]]
    expected = {path.read_bytes().decode() for path in (folder / "text").iterdir()}
    assert len(found) == 31 and set(found) == expected
    assert len(corpus.train) < sum(map(len, expected)) / 2  # it learned to merge bytes


def test_text_with_a_tokenizer_is_tokenized_at_the_start(prepared):
    folder, counts = prepared
    path = str(folder / "shards" / "tokenizer.json")
    corpus = load(folder / "text", vocab_size=300, tokenizer=path, held_out_fraction=0.2)
    assert len(corpus.train) + len(corpus.held_out) == counts["train_tokens"] + counts["val_tokens"]
    with pytest.raises(SettingError, match="has 300 tokens; vocab_size=256 must be at least that"):
        load(folder / "text", tokenizer=path)
    with pytest.raises(SettingError, match="is no file; accepted: a Hugging Face tokenizer.json"):
        load(folder / "text", tokenizer=str(folder / "nowhere.json"))
    (folder / "noise.json").write_text("noise")
    with pytest.raises(SettingError, match="noise.json' cannot be read"):
        load(folder / "text", tokenizer=str(folder / "noise.json"))


def test_prepare_as_a_command_refuses_a_folder_that_is_taken(prepared):
    folder, _ = prepared
    command = [
        sys.executable,
        "-m",
        "train.prepare",
        "--data",
        str(folder / "text"),
        "--output",
        str(folder / "shards"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert ended.returncode == 1
    assert ended.stderr == f"error: output='{folder / 'shards'}' is there and not an empty folder\n"


def test_prepare_leaves_nothing_where_there_is_no_text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "empty.txt").touch()
    config = prepare.PrepareConfig(data=str(tmp_path / "text"), output=tmp_path / "shards")
    with pytest.raises(SettingError, match="has no text; accepted: a UTF-8 text file"):
        prepare.prepare(config)
    assert not (tmp_path / "shards").exists()


def test_a_prepare_that_failed_does_not_stand_in_the_way_of_the_next(tmp_path):
    text = Path(write_text(tmp_path / "text"))
    (text / "late.jsonl").write_text("noise\n")
    config = prepare.PrepareConfig(data=str(text), output=tmp_path / "shards", vocab_size=300, held_out_fraction=0.2)
    config.output.mkdir()
    for again in (False, True):
        with pytest.raises(data.DataError, match="late.jsonl line 1"):
            prepare.prepare(dataclasses.replace(config, tokenizer=str(tmp_path / "own.json") if again else None))
        # As a killed one leaves it.
        (tmp_path / ".shards.partial").mkdir(exist_ok=True)
        (tmp_path / ".shards.partial" / "train_000009.bin").write_bytes(b"cut")
        Tokenizer(models.BPE(vocab={"<|endoftext|>": 0}, merges=[])).save(str(tmp_path / "own.json"))
    (text / "late.jsonl").unlink()
    with pytest.raises(SettingError, match="output='.*own.json/shards' cannot be made: Not a directory"):
        prepare.prepare(dataclasses.replace(config, output=tmp_path / "own.json" / "shards"))
    prepare.prepare(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.json", "shards", "text"]
    assert {path.name[:6] for path in config.output.iterdir()} == {"tokeni", "train_", "val_00"}
    assert not (config.output / "train_000009.bin").exists()


def test_integers_of_64_bits_are_tokens_if_they_are_in_range(tmp_path):
    for number, kind in enumerate((np.int64, np.uint64, np.dtype(">i8"))):
        np.save(tmp_path / f"train_{number}.npy", TOKENS.astype(kind))
    corpus = load(tmp_path, held_out_fraction=0.1)
    part = corpus.train.read(650, 100)
    assert part.dtype == np.int32
    np.testing.assert_array_equal(part, np.concatenate([TOKENS, TOKENS])[650:750])
    for kind, wrong in ((np.int64, (1 << 32) + 5), (np.int64, -1), (np.uint64, (1 << 64) - 1), (np.uint32, 1 << 31)):
        tokens = TOKENS.astype(kind)
        tokens[3] = wrong
        np.save(tmp_path / "train_0.npy", tokens)
        with pytest.raises(data.DataError, match=f"train_0.npy has token {wrong} at byte"):
            load(tmp_path).train.read(0, 9)


def test_skipped_counts_and_keeps_the_first_message():
    skipped = Skipped()
    for message in ("first", "second"):
        skipped.stop_or_count(data.DataError(message), "skip")
    assert (skipped.count, skipped.first) == (2, "first")
