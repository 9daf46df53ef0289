"""Text to tokens: bytes, or a Hugging Face tokenizer.json."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from train.config import BYTE_VOCABULARY, SettingError

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# Text has no zero byte.
BYTE_SEPARATOR = 0


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """``tokenizer`` is None for bytes; ``separator`` stands between two documents."""

    tokenizer: Tokenizer | None
    separator: int
    size: int

    def encode(self, documents: Iterable[bytes]) -> list[np.ndarray]:
        """The tokens of each document, without separators."""
        if self.tokenizer is None:
            return [np.frombuffer(document, np.uint8) for document in documents]
        texts = [document.decode("utf-8", "replace") for document in documents]
        return [np.asarray(e.ids, np.uint32) for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 show as U+FFFD."""
        if self.tokenizer is None:
            return bytes(token for token in tokens if token < BYTE_VOCABULARY).decode("utf-8", "replace")
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def load_tokenizer(path: str | None, separator: int | None, vocab_size: int) -> TextTokenizer:
    """Bytes for None, else the tokenizer at a path.

    Raises:
      SettingError: the file is not there or not a tokenizer, has more tokens than the model has rows, or no separator;
        bytes with a separator that is none.
    """
    if path is None:
        separator = BYTE_SEPARATOR if separator is None else separator
        if not 0 <= separator < BYTE_VOCABULARY:
            raise SettingError(
                f"separator={separator} must be at least 0 and below {BYTE_VOCABULARY}: text is read as bytes"
            )
        return TextTokenizer(None, separator, BYTE_VOCABULARY)
    if not Path(path).is_file():
        raise SettingError(f"tokenizer={path!r} is no file; accepted: a Hugging Face {FILE_NAME}")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises nothing narrower.
        raise SettingError(f"tokenizer={path!r} cannot be read: {error}") from error
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise SettingError(f"tokenizer={path!r} has {size} tokens; vocab_size={vocab_size} must be at least that")
    separator = tokenizer.token_to_id(END_OF_TEXT) if separator is None else separator
    if separator is None:
        raise SettingError(
            f"tokenizer={path!r} has no {END_OF_TEXT}: give separator=, the id of the token between documents"
        )
    return TextTokenizer(tokenizer, separator, size)


def join(documents: Sequence[np.ndarray], separator: int, dtype: type) -> np.ndarray:
    """One array, a separator after each document."""
    parts = [part for document in documents for part in (document, np.asarray([separator]))]
    return np.concatenate([part.astype(dtype) for part in parts]) if parts else np.zeros(0, dtype)
