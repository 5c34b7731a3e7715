"""The package tokenizers is optional."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypod.errors import ConfigError, DataMissing
from raypod.training.data import corpus
from raypod.training.data.corpus import Piece, Tokenizer
from raypod.training.data.text import Windows

tokenizers = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
TEXT = "Größe und Maß: 😀 are 2 words, and more words. " * 20


def byte_pairs(folder: Path, *special: str) -> str:
    """Return the file of a small byte-level tokenizer as that of GPT-2, trained on `TEXT`."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=list(special), show_progress=False)
    tokenizer.enable_truncation(max_length=4)  # must not cut the text
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def word_pieces(folder: Path) -> str:
    """Return the file of a tokenizer that drops spaces and folds case."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"are": 0, "words": 1, "?": 2}, unk_token="?"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "words.json"))
    return str(folder / "words.json")


def pieces(folder: Path) -> list[Piece]:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "more.txt").write_bytes(b"\xff\xfe words")
    return [Piece(folder / name, 0, (folder / name).stat().st_size) for name in ("text.txt", "more.txt")]


def test_the_bytes_of_the_tokens_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    found = Tokenizer(byte_pairs(tmp_path, "<|endoftext|>")).encode(pieces(tmp_path))
    assert found.ends is not None
    assert len(found.tokens) == len(found.ends) < len(TEXT.encode()) / 2
    assert (np.diff(found.ends, prepend=0) >= 0).all()
    replaced = len(b"\xff\xfe words".decode("utf-8", errors="replace").encode())
    assert found.ends[-1] == len(TEXT.encode()) + 1 + replaced + 1
    windows = Windows(found, 7)
    used = len(windows) * 7
    assert windows.num_bytes(np.arange(len(windows))).sum() == found.ends[used] - found.ends[0]


def test_text_that_a_tokenizer_drops_counts_as_well(tmp_path: Path) -> None:
    found = Tokenizer(word_pieces(tmp_path)).encode(pieces(tmp_path)[:1])
    assert found.ends is not None
    assert found.ends[-1] == len(TEXT.encode()) + 1


def test_files_end_with_the_tokens_own_mark_or_a_further_one(tmp_path: Path) -> None:
    given = Tokenizer(byte_pairs(tmp_path, "<|endoftext|>"))
    assert given.encode(pieces(tmp_path)).tokens[-1] == 0  # special tokens have the first ids
    added = Tokenizer(byte_pairs(tmp_path))
    tokens = added.encode(pieces(tmp_path)).tokens
    assert tokens[-1] == added.vocabulary - 1
    assert (tokens == added.vocabulary - 1).sum() == 2


def test_a_file_that_is_no_tokenizer_is_one_line_of_error(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="does not exist"):
        Tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="--tokenizer .*bad.json: "):
        Tokenizer(str(tmp_path / "bad.json"))
    assert corpus.num_tokens(pieces(tmp_path), None) > 0
