"""Data: whole documents held out, the same batches every time, bounded memory, and errors by message."""

import gzip
import json

import jax
import numpy as np
import pytest
import zstandard
from jax.sharding import NamedSharding
from train_micro import micro_config, write_text

from train import data
from train.config import PRESETS, SettingError
from train.data.batches import StepSource, Windows, segment_ids
from train.data.corpus import ArrayTokens, Corpus
from train.data.documents import Skipped
from train.mesh import P, make_mesh

SEPARATOR = b"\0"


def make_config(folder, **overrides):
    return micro_config(data=str(folder), **overrides).data


def load(folder, **overrides):
    return data.load_corpus(make_config(folder, **overrides), 256)


def documents(tokens):
    """The texts between separators; one follows each document."""
    *parts, end = tokens.array.tobytes().split(SEPARATOR)
    assert end == b""
    return parts


def in_memory(train, held_out=()):
    return Corpus(ArrayTokens(np.asarray(train)), ArrayTokens(np.asarray(held_out, np.uint8)), 0, "", Skipped())


def windows(corpus, step=0, seed=0, length=24):
    source = StepSource(Windows(corpus.train, seed, length), 99, 2, 3, (0, 1, 2), None)
    return source[step].tokens


def test_documents_are_held_out_whole(tmp_path):
    write_text(tmp_path)
    corpus = load(tmp_path, held_out_fraction=0.3)
    parts = [documents(part) for part in (corpus.train, corpus.held_out)]
    files = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(parts[0]) + len(parts[1]) == len(files)
    assert set(parts[0]) | set(parts[1]) == files and not set(parts[0]) & set(parts[1])
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.2 < share <= 0.3


def test_a_copy_of_a_document_is_read_once(tmp_path):
    write_text(tmp_path, files=4)
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"copy_of_{path.name}").write_bytes(path.read_bytes())
    corpus = load(tmp_path, held_out_fraction=0.3)
    found = documents(corpus.train) + documents(corpus.held_out)
    assert len(found) == len(set(found)) == 4


def test_one_file_is_cut_at_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 251)) * 4)
    corpus = load(path, held_out_fraction=0.25)
    [train], [held_out] = documents(corpus.train), documents(corpus.held_out)
    assert train + held_out == path.read_bytes()
    assert (len(train), len(held_out)) == (750, 250)


def test_memory_is_bounded_and_the_sample_fair(tmp_path):
    write_text(tmp_path)
    corpus = load(tmp_path, max_bytes=6000)
    assert 5990 <= len(corpus.train) + len(corpus.held_out) <= 6010
    first = corpus.train.array.tobytes()[:400]
    # By name hash, not by name: a cap on an alphabetical list would never see the end of the alphabet.
    assert first[: first.index(b"(")] != b"def function_0_0"


def test_hidden_and_binary_files_are_left_out(tmp_path):
    write_text(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index.py").write_text("hidden folder " * 50)
    (tmp_path / ".hidden").write_text("hidden file " * 50)
    (tmp_path / "image.bin").write_bytes(b"binary\0" * 50)
    corpus = load(tmp_path)
    text = corpus.train.array.tobytes() + corpus.held_out.array.tobytes()
    assert b"function" in text and b"hidden" not in text and b"binary" not in text


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    corpus = load(write_text(tmp_path))
    first = windows(corpus, step=3)
    assert first.shape == (2, 3, 25) and first.dtype == np.int32
    np.testing.assert_array_equal(first, windows(load(tmp_path), step=3))
    assert (first != windows(corpus, step=4)).any()
    assert (first != windows(corpus, step=3, seed=1)).any()
    assert len({row.tobytes() for row in first.reshape(6, 25)}) == 6


@pytest.mark.parametrize("size", [25, 26, 48, 49, 73, 500])
def test_an_epoch_sees_every_sequence_once_and_the_next_in_another_order(size):
    tokens = Windows(ArrayTokens(np.arange(size, dtype=np.uint16)), seed=0, length=24)
    count = max(1, (size - 1) // 24 - 1)
    epochs = [[tokens[epoch * count + index] for index in range(count)] for epoch in range(6)]
    for epoch in epochs:
        starts = sorted(int(row[0]) for row in epoch)
        np.testing.assert_array_equal(np.diff(starts), 24)  # so none overlaps another
        assert all((row == row[0] + np.arange(25)).all() for row in epoch)
    firsts = [min(int(row[0]) for row in epoch) for epoch in epochs]
    assert len(set(firsts)) > 1 or size == 25
    orders = {tuple(int(row[0]) - first for row in epoch) for epoch, first in zip(epochs, firsts, strict=True)}
    assert len(orders) == (6 if count > 3 else len(orders))


@pytest.mark.parametrize(("sequences", "sizes"), [(7, [4, 3]), (1000, [4, 4, 2])])
def test_held_out_windows_are_spread_and_do_not_overlap(sequences, sizes):
    corpus = in_memory(np.zeros(0, np.uint8), np.arange(250))
    batches = list(data.held_out_batches(corpus, sequences=sequences, batch=4, length=24, packed=False))
    assert [int(weights.sum()) for _, weights in batches] == sizes
    assert all(batch.tokens.shape == (4, 25) and batch.segment_ids is None for batch, _ in batches)
    tokens = np.concatenate([batch.tokens[weights == 1] for batch, weights in batches]).ravel()
    assert len(set(tokens.tolist())) == len(tokens)
    assert (tokens.min(), tokens.max()) == (0, 249)


def test_a_separator_ends_its_document():
    np.testing.assert_array_equal(segment_ids(np.asarray([[5, 0, 7, 7, 0, 0, 8]]), 0), [[0, 0, 1, 1, 1, 2, 3]])


def batches(config, corpus, step=0):
    sharding = NamedSharding(make_mesh("data=1", config.model), P(None, ("data", "fsdp"), None))
    return [jax.device_get(batch) for batch in data.training_batches(config, corpus, sharding, 1, step)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_with_the_next_batch_with_any_number_of_workers(tmp_path, workers):
    config = micro_config(data=write_text(tmp_path), steps=7, documents="packed", tokens_per_step=2 * 96)
    corpus = load(tmp_path)
    whole = batches(config, corpus)
    assert len(whole) == 7 and whole[0].tokens.shape == whole[0].segment_ids.shape == (2, 4, 25)
    config = micro_config(**vars(config.data) | dict(workers=workers, steps=7, tokens_per_step=2 * 96))
    rest = batches(config, corpus, step=3)
    assert len(rest) == 4
    for got, expected in zip(rest, whole[3:], strict=True):
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_array_equal(got.segment_ids, expected.segment_ids)


def test_accumulation_cuts_the_same_tokens_differently(tmp_path):
    corpus = load(write_text(tmp_path))
    four, two = (
        batches(micro_config(data=str(tmp_path), micro_batch=size, tokens_per_step=192, steps=6), corpus)
        for size in (4, 2)
    )
    assert two[0].tokens.shape == (4, 2, 25)
    for first, second in zip(four, two, strict=True):
        np.testing.assert_array_equal(first.tokens.reshape(8, 25), second.tokens.reshape(8, 25))


def test_unigram_loss_is_the_cross_entropy_of_byte_frequencies():
    corpus = in_memory(np.frombuffer(b"aaab" * 25_000, np.uint8), np.frombuffer(b"ab", np.uint8))
    expected = -(np.log(0.75) + np.log(0.25)) / 2
    np.testing.assert_allclose(data.unigram_loss(corpus, 256), expected, rtol=1e-2)


def test_default_is_the_standard_library():
    corpus = data.load_corpus(PRESETS["tiny"].data, 256)
    assert len(corpus.train) > 3_000_000 and 100_000 < len(corpus.held_out) < len(corpus.train) / 15
    text = corpus.train.array.tobytes() + corpus.held_out.array.tobytes()
    assert b"class JSONDecoder" in text and b"class ZipFile" in text
    assert b"class Flax" not in text and b"unittest.TestCase)" not in text[: len(text) // 50]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"noise\n", "has no text; accepted: .*; 1 left out as damaged, first: .*a.jsonl line 1"),
        ("train.bin", b"odd", "leaves 0 tokens for train; .*; 1 left out as damaged, first: .*train.bin: 3 bytes"),
    ],
)
def test_where_all_was_left_out_the_error_says_why(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=message):
        load(tmp_path, on_bad_data="skip")


def test_shards_whose_names_say_nothing_are_named(tmp_path):
    for name in ("tokens.bin", "shard_0.npy"):
        (tmp_path / name).write_bytes(b"\0\1\2\3")
    message = (
        "has no text; .*; 2 .bin or .npy files there, such as shard_0.npy, have neither train nor val in their names"
    )
    with pytest.raises(SettingError, match=message):
        load(tmp_path)


def test_what_the_cap_left_out_is_known(tmp_path):
    write_text(tmp_path)
    assert load(tmp_path, max_bytes=6000).is_capped and not load(tmp_path).is_capped


LINES = [{"text": f"document {number} " * 9, "id": number} for number in range(40)]


def test_bytes_are_told_apart_by_a_byte(tmp_path):
    folder = write_text(tmp_path)
    corpus = data.load_corpus(make_config(folder, separator=255, vocab_size=384), 384)
    assert corpus.separator == 255 and corpus.train.read(len(corpus.train) - 1, 1).tolist() == [255]
    with pytest.raises(SettingError, match="separator=256 must be at least 0 and below 256: text is read as bytes"):
        data.load_corpus(make_config(folder, separator=256, vocab_size=384), 384)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("lines", [".jsonl", ".ndjson", ".json", ".JSONL"])
def test_json_lines_are_documents(tmp_path, lines, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix.lower()]
    content = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    (tmp_path / f"a{lines}{suffix}").write_bytes(pack(content))
    corpus = load(tmp_path, held_out_fraction=0.2)
    assert set(documents(corpus.train) + documents(corpus.held_out)) == {line["text"].encode() for line in LINES}


def test_a_json_file_that_holds_no_lines_of_text_is_text(tmp_path):
    package = {"name": "a package", "text": ["no"], "files": list(range(200))}
    contents = [json.dumps(package, indent=2), '{"name": "minified"}', '"a text"', "[1, 2]", "7"]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.json").write_text(content)
    corpus = load(tmp_path, held_out_fraction=0.2)
    assert set(documents(corpus.train) + documents(corpus.held_out)) == {content.encode() for content in contents}


def damaged_files(path):
    good = "".join(json.dumps(line) + "\n" for line in LINES)
    for name, content in {
        "good.jsonl": good.encode(),
        "line.jsonl": (good[:300] + "\n" + good).encode(),
        "field.jsonl": b'{"body": "no text"}\n',
        "cut.jsonl.gz": gzip.compress(good.encode())[:-20],
        "noise.jsonl.zst": zstandard.compress(good.encode())[:30] + b"noise" * 9,
    }.items():
        (path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("line.jsonl", "line.jsonl line 3, byte 242: no JSON object with text in its field 'text'"),
        ("field.jsonl", "field.jsonl line 1, byte 0: no JSON object with text in its field 'text' .KeyError"),
        ("cut.jsonl.gz", r"cut.jsonl.gz is damaged at byte \d+ of \d+: "),
        ("noise.jsonl.zst", r"noise.jsonl.zst is damaged at byte \d+ of \d+: "),
    ],
)
def test_damaged_text_is_an_error_with_its_place(tmp_path, name, message):
    damaged_files(tmp_path)
    with pytest.raises(data.DataError, match=message):
        load(tmp_path / name, held_out_fraction=0.2)


def test_damaged_text_is_left_out_and_counted_if_asked(tmp_path):
    damaged_files(tmp_path)
    corpus = load(tmp_path, held_out_fraction=0.2, on_bad_data="skip")
    assert corpus.skipped.count == 4 and str(tmp_path) in (corpus.skipped.first or "")
    assert f"held out; 4 damaged left out, first: {tmp_path}/" in corpus.summary(1 << 20)
    assert set(documents(corpus.train) + documents(corpus.held_out)) == {line["text"].encode() for line in LINES}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, FileNotFoundError, "does not exist; accepted: a UTF-8 text file, JSON lines"),
        (lambda path: path.mkdir(), SettingError, "has no text; accepted: a UTF-8 text file, JSON lines"),
        (lambda path: path.write_bytes(b"\0\1\2" * 99), SettingError, "has no text"),
        (
            lambda path: path.write_text("word " * 20),
            SettingError,
            "leaves 6 tokens for held_out; one sequence of sequence_length=24 needs 25; accepted: more data, a shorter "
            "sequence_length, another share by held_out_fraction=0.05$",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_path(tmp_path, make, error, message):
    path = tmp_path / "corpus"
    make(path)
    with pytest.raises(error, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
