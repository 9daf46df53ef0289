"""Data: whole documents held out, the same batches every time, bounded memory, and errors by message."""

import numpy as np
import pytest
from train_micro import micro_config, write_text

from train import data
from train.config import PRESETS, SettingError


def make_config(folder, **overrides):
    return micro_config(data=str(folder), **overrides).data


def windows(corpus, step=0, seed=0, length=24):
    return data.training_batch(corpus, seed=seed, step=step, accumulation=2, micro_batch=3, sequence_length=length)


def test_documents_are_held_out_whole(tmp_path):
    write_text(tmp_path)
    corpus = data.load_corpus(make_config(tmp_path, held_out_fraction=0.3))
    parts = [part.tobytes().split(data.SEPARATOR) for part in (corpus.train, corpus.held_out)]
    files = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(parts[0]) + len(parts[1]) == len(files)
    assert set(parts[0]) | set(parts[1]) == files and not set(parts[0]) & set(parts[1])
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.2 < share <= 0.3


def test_a_copy_of_a_document_is_read_once(tmp_path):
    write_text(tmp_path, files=4)
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"copy_of_{path.name}").write_bytes(path.read_bytes())
    corpus = data.load_corpus(make_config(tmp_path, held_out_fraction=0.3))
    documents = (corpus.train.tobytes() + data.SEPARATOR + corpus.held_out.tobytes()).split(data.SEPARATOR)
    assert len(documents) == len(set(documents)) == 4


def test_one_file_is_cut_at_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 251)) * 4)
    corpus = data.load_corpus(make_config(path, held_out_fraction=0.25))
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == path.read_bytes()
    assert (len(corpus.train), len(corpus.held_out)) == (750, 250)


def test_memory_is_bounded_and_the_sample_fair(tmp_path):
    write_text(tmp_path)
    corpus = data.load_corpus(make_config(tmp_path, max_bytes=6000))
    assert 5990 <= len(corpus.train) + len(corpus.held_out) <= 6010
    first = corpus.train.tobytes()[:400]
    # By name hash, not by name: a cap on an alphabetical list would never see the end of the alphabet.
    assert first[: first.index(b"(")] != b"def function_0_0"


def test_hidden_and_binary_files_are_left_out(tmp_path):
    write_text(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index.py").write_text("hidden folder " * 50)
    (tmp_path / ".hidden").write_text("hidden file " * 50)
    (tmp_path / "image.bin").write_bytes(b"binary\0" * 50)
    corpus = data.load_corpus(make_config(tmp_path))
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert b"function" in text and b"hidden" not in text and b"binary" not in text


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    corpus = data.load_corpus(make_config(write_text(tmp_path)))
    first = windows(corpus, step=3)
    assert first.shape == (2, 3, 25) and first.dtype == np.int32
    np.testing.assert_array_equal(first, windows(data.load_corpus(make_config(tmp_path)), step=3))
    assert (first != windows(corpus, step=4)).any()
    assert (first != windows(corpus, step=3, seed=1)).any()
    assert len({row.tobytes() for row in first.reshape(6, 25)}) == 6


def test_batches_are_windows_of_the_training_text_up_to_both_ends():
    text = np.arange(1, 31, dtype=np.uint8)
    corpus = data.Corpus(text, text[:0], "")
    rows = np.concatenate([windows(corpus, step).reshape(6, 25) for step in range(20)])
    np.testing.assert_array_equal(rows - rows[:, :1], np.tile(np.arange(25), (120, 1)))
    assert (rows.min(), rows.max()) == (1, 30)


@pytest.mark.parametrize(("sequences", "sizes"), [(7, [4, 3]), (1000, [4, 4, 2])])
def test_held_out_windows_are_spread_and_do_not_overlap(sequences, sizes):
    corpus = data.Corpus(np.zeros(0, np.uint8), np.arange(250, dtype=np.uint8), "")
    batches = list(data.held_out_batches(corpus, sequences=sequences, micro_batch=4, sequence_length=24))
    assert [len(batch) for batch in batches] == sizes
    tokens = np.concatenate(batches).ravel()
    assert len(set(tokens.tolist())) == len(tokens)
    assert (tokens.min(), tokens.max()) == (0, 249)


def test_unigram_loss_is_the_cross_entropy_of_byte_frequencies():
    train, held_out = np.frombuffer(b"aaab" * 25_000, np.uint8), np.frombuffer(b"ab", np.uint8)
    expected = -(np.log(0.75) + np.log(0.25)) / 2
    np.testing.assert_allclose(data.unigram_loss(data.Corpus(train, held_out, "")), expected, rtol=1e-2)


def test_default_is_the_standard_library():
    corpus = data.load_corpus(PRESETS["tiny"].data)
    assert len(corpus.train) > 3_000_000 and 100_000 < len(corpus.held_out) < len(corpus.train) / 15
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert b"class JSONDecoder" in text and b"class ZipFile" in text
    assert b"class Flax" not in text and b"unittest.TestCase)" not in text[: len(text) // 50]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, FileNotFoundError, "does not exist; accepted: a UTF-8 text file, or a folder"),
        (lambda path: path.mkdir(), SettingError, "has no text; accepted: a UTF-8 text file, or a folder"),
        (lambda path: path.write_bytes(b"\0\1\2" * 99), SettingError, "has no text"),
        (
            lambda path: path.write_text("word " * 20),
            SettingError,
            "leaves 5 bytes for held_out; one sequence of sequence_length=24 needs 25",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_path(tmp_path, make, error, message):
    path = tmp_path / "corpus"
    make(path)
    with pytest.raises(error, match=message) as caught:
        data.load_corpus(make_config(path))
    assert str(path) in str(caught.value)
