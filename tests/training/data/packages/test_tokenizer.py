"""The package tokenizers is optional."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from raypod.__main__ import main
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


def test_the_bytes_of_the_tokens_add_up_and_files_end_with_a_mark(tmp_path: Path) -> None:
    found = corpus.encode(pieces(tmp_path), Tokenizer(byte_pairs(tmp_path, "<|endoftext|>")))
    assert found.sizes is not None
    assert len(found.tokens) == len(found.sizes) < len(TEXT.encode()) / 2
    assert (found.sizes >= 0).all()
    replaced = len(b"\xff\xfe words".decode("utf-8", errors="replace").encode())
    assert (found.sizes.sum(), found.tokens[found.starts[1] - 1]) == (len(TEXT.encode()) + 1 + replaced + 1, 0)
    windows = Windows(found, 7)
    used = len(windows) * 7
    assert windows.num_bytes(np.arange(len(windows))).sum() == found.sizes[1 : used + 1].sum()
    _, sizes = Tokenizer(word_pieces(tmp_path)).encode(pieces(tmp_path)[0])
    assert sizes.sum() == len(TEXT.encode()) + 1
    given = Tokenizer(byte_pairs(tmp_path, "<|endoftext|>"))
    assert corpus.encode(pieces(tmp_path), given).tokens[-1] == 0  # special tokens have the first ids
    added = Tokenizer(byte_pairs(tmp_path))
    tokens = corpus.encode(pieces(tmp_path), added).tokens
    assert (tokens[-1], (tokens == added.vocabulary - 1).sum()) == (added.vocabulary - 1, 2)
    with pytest.raises(DataMissing, match="does not exist"):
        Tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="--tokenizer .*bad.json: "):
        Tokenizer(str(tmp_path / "bad.json"))


def test_a_packed_text_has_its_tokenizer_and_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer, text = byte_pairs(tmp_path, "<|endoftext|>"), "text.txt,more.txt"
    pieces(tmp_path)
    given = ["--text", text, "--tokenizer", tokenizer, "--held-out", "0.2"]
    assert main(["pack", "--task", "language-model", *given, "packed"]) == 0
    flags = ["--task", "language-model", "--sequence-length", "4", "--fleet", "inline", "--device", "emulated"]
    flags += ["--replicas", "2", "--batch-size", "2", "--updates", "2"]
    for packing in ([], ["--pack-sequences"]):
        assert main(["train", *flags, *packing, *given, "--run-dir", "with-text"]) == 0
        for name in (tokenizer, "text.txt", "more.txt"):
            Path(name).rename(f"{name}.gone")
        assert main(["train", *flags, *packing, "--data-dir", "packed", "--run-dir", "with-packed"]) == 0
        expected, found = (json.loads(Path(run, "summary.json").read_text()) for run in ("with-text", "with-packed"))
        for key in ("weights_sha256", "test_bits_per_byte"):
            assert found[key] == expected[key]
        for name in (tokenizer, "text.txt", "more.txt"):
            Path(f"{name}.gone").rename(name)
        for run in ("with-text", "with-packed"):
            shutil.rmtree(run)
    assert np.load("packed/train/tokens.npy").dtype == np.uint16
    assert np.load("packed/train/sizes.npy").dtype == np.uint32
    assert Path("packed/train/tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
