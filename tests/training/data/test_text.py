"""Texts, their windows and splits, and examples with labels."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any, List, Optional, Sequence

import numpy as np
import pytest
import torch

from raypod.errors import DataMissing
from raypod.training.data import corpus
from raypod.training.data.arrays import fingerprint_of_bytes, fingerprint_of_values
from raypod.training.data.corpus import Piece, Text
from raypod.training.data.labelled_text import SEQUENCES, TOKENS, read_examples, texts_in
from raypod.training.data.text import PackedWindows, SequenceSource, TextSource, Windows
from tests.support.refused import refused


def files(folder: Path, sizes: Sequence[int]) -> List[str]:
    """Create text files of so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, size in enumerate(sizes):
        (folder / f"{index}.txt").write_bytes(bytes([65 + index]) * size)
    return [str(folder)]


def text(tokens: np.ndarray, sizes: Optional[np.ndarray] = None) -> Text:
    return Text(tokens, sizes, np.zeros(1, np.int64))


def total(pieces: Sequence[Piece]) -> int:
    return sum(each.stop - each.start for each in pieces)


def test_window_i_predicts_the_tokens_after_i_times_the_length() -> None:
    windows = Windows(text(np.arange(32, dtype=np.uint8)), 5)
    tokens, num_bytes = TextSource(windows, windows).gather(windows, np.array([2, 0]), None)
    assert len(windows) == 6  # 30 predicted tokens of the 31 that have one before them
    assert tokens.tolist() == [list(range(10, 16)), list(range(6))]
    assert tokens.dtype == num_bytes.dtype == torch.int32
    assert (num_bytes.tolist(), len(Windows(text(np.zeros(31, np.uint8)), 5))) == ([5, 5], 6)
    assert len(Windows(text(np.zeros(30, np.uint8)), 5)) == 5
    assert len(Windows(text(np.zeros(0, np.uint8)), 5)) == 0
    sized = text(np.zeros(7, np.int32), np.array([3, 1, 0, 5, 1, 1, 9]))
    assert Windows(sized, 2).num_bytes(np.arange(3)).tolist() == [1, 6, 10]
    windows = Windows(text(np.zeros(9, np.uint8)), 4)
    refused("the text on this host has 2 windows", TextSource(windows, windows).gather, windows, np.array([2]), None)


def test_the_fingerprint_of_a_text_is_that_of_earlier_versions_and_covers_both_splits_and_the_length() -> None:
    def fingerprint(train: int, test: int, length: int, size: Optional[int] = None) -> str:
        sizes = None if size is None else np.full(9, size)
        texts = [text(np.full(9, fill, np.uint8), sizes) for fill in (train, test)]
        return TextSource(*(Windows(each, length) for each in texts)).fingerprint

    cases = [(0, 0, 3), (1, 0, 3), (0, 1, 3), (0, 0, 4), (0, 0, 3, 1)]
    assert len({fingerprint(*case) for case in cases}) == len({fingerprint(*case) for case in 2 * cases}) == 5
    texts = [Text(np.arange(9, dtype=np.int32), np.arange(9), np.zeros(1, np.int64)) for _ in range(2)]
    arrays = [array for each in texts for array in (each.tokens, np.cumsum(each.sizes))]
    expected = fingerprint_of_values(3, fingerprint_of_bytes(*arrays))
    assert TextSource(*(Windows(each, 3) for each in texts)).fingerprint == expected
    smaller = [Text(each.tokens.astype(np.uint16), each.sizes.astype(np.uint32), each.starts) for each in texts]
    assert TextSource(*(Windows(each, 3) for each in smaller)).fingerprint == expected


def test_files_are_packed_into_the_fullest_windows_which_predict_within_each() -> None:
    found = corpus.pack_sequences([6, 13, 1, 4, 3, 10, 0, 3], 10)  # 5, 10 + 2, none, 3, 2, 9, none and 2 predictions
    assert (found.sizes.tolist(), found.first.tolist()) == ([5, 10, 2, 3, 2, 9, 2], [0, 6, 16, 20, 24, 27, 37])
    assert (found.windows.tolist(), found.num_windows) == ([0, 1, 0, 0, 2, 3, 2], 4)
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 70, 500).tolist()
    many = corpus.pack_sequences(counts, 32)
    used = np.bincount(many.windows, many.sizes)
    assert used.max() <= 32
    assert used.sum() == sum(max(0, each - 1) for each in counts)
    assert len(used) < 1.02 * used.sum() / 32
    assert corpus.pack_sequences([], 8).num_windows == 0
    starts = np.array([0, 4, 7])
    # 3, 2 and 4 predictions
    packed = PackedWindows(Text(np.arange(1, 13, dtype=np.int32), np.arange(1, 13), starts), 7)
    tokens, labels, segments, places, num_bytes = SequenceSource(packed, packed).gather(packed, np.array([1, 0]), None)
    assert tokens.tolist() == [[8, 9, 10, 11, 0, 0, 0], [1, 2, 3, 5, 6, 0, 0]]
    assert labels.tolist() == [[9, 10, 11, 12, -100, -100, -100], [2, 3, 4, 6, 7, -100, -100]]
    assert segments.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 2, 2, 0, 0]]
    assert places.tolist() == [[0, 1, 2, 3, 0, 0, 0], [0, 1, 2, 0, 1, 0, 0]]
    assert num_bytes.tolist() == [9 + 10 + 11 + 12, 2 + 3 + 4 + 6 + 7]


def test_whole_files_are_held_out_up_to_the_fraction_or_the_end_of_few(tmp_path: Path) -> None:
    text = files(tmp_path, [100] * 40)
    train, test = corpus.find_pieces(text, 0.1, None)
    assert (len(train), len(test)) == (36, 4)
    assert not {each.path for each in train} & {each.path for each in test}
    assert corpus.find_pieces(text, 0.0, None).test == []
    train, test = corpus.find_pieces(files(tmp_path / "few", [1000, 200]), 0.1, None)
    assert (sorted(each.start for each in test), total(test)) == ([180, 900], 120)
    assert [(each.path, each.stop) for each in train] == [(each.path, each.start) for each in test]
    single = corpus.find_pieces([str(tmp_path / "few" / "0.txt")], 0.25, None)
    assert (total(single.train), total(single.test)) == (750, 250)


def test_the_splits_do_not_depend_on_where_the_files_are(tmp_path: Path) -> None:
    first, second = (corpus.find_pieces(files(tmp_path / name, [50, 60, 70, 80] * 8), 0.1, 0.001) for name in "ab")
    for one, other in zip(first, second):
        assert [(each.path.name, each.stop) for each in one] == [(each.path.name, each.stop) for each in other]
        assert corpus.encode(one, None).tokens.tobytes() == corpus.encode(other, None).tokens.tobytes()
    assert total(first.train) + total(first.test) == 1000


def test_folders_are_searched_for_text_files_that_are_not_hidden(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.md", "b/d.rst", "e.py", "f.bin", ".git/g.txt", ".h.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    found = corpus.find_pieces([str(tmp_path)], 0.0, None).train
    assert sorted(each.path.name for each in found) == ["a.txt", "c.md", "d.rst", "e.py"]
    (tmp_path / "caf\udce9.txt").write_text("not UTF-8")
    assert len(corpus.find_pieces([str(tmp_path)], 0.0, None).train) == 5
    assert corpus.find_pieces([str(tmp_path / "f.bin")], 0.0, None).train[0].stop == 5


def test_text_that_is_missing_is_one_line_of_error(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(DataMissing, match="does not exist$"):
        corpus.find_pieces([str(tmp_path / "none")], 0.1, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataMissing, match=f"^--text none does not exist in {tmp_path}$"):
        corpus.find_pieces(["none"], 0.1, None)
    with pytest.raises(DataMissing, match="has no text files"):
        corpus.find_pieces([str(tmp_path)], 0.1, None)
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataMissing, match="are empty"):
        corpus.find_pieces([str(tmp_path)], 0.1, None)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataMissing, match="use --text"):
        corpus.find_pieces(None, 0.05, None)


def test_pieces_are_counted_without_reading_them(tmp_path: Path) -> None:
    pieces = corpus.find_pieces(files(tmp_path, [5, 7]), 0.0, None).train
    found = corpus.encode(pieces, None)
    assert sum(corpus.tokens_of_pieces(pieces, None)) == len(found.tokens) == 14
    assert sorted(np.flatnonzero(found.tokens == 0)) in ([5, 13], [7, 13])
    assert found.starts.tolist() in ([0, 6], [0, 8])
    pieces[0].path.write_bytes(b"")
    assert sum(corpus.tokens_of_pieces(pieces, None)) == 14
    refused("has become shorter", corpus.encode, pieces, None)


def test_the_default_text_is_a_bounded_part_of_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = corpus._standard_library()
    monkeypatch.setattr(corpus, "_standard_library", lambda: found)  # looking for the files takes seconds
    train, test = corpus.find_pieces(None, 0.05, None)
    root = Path(sysconfig.get_paths()["stdlib"])
    assert 4e6 < total(train) + total(test) <= corpus.MAX_DEFAULT_MB * 1e6
    assert 0.03 < total(test) / (total(train) + total(test)) <= 0.05
    names = [each.path.relative_to(root).as_posix() for each in (*train, *test)]
    assert {Path(name).suffix for name in names} == {".py"}
    assert not [name for name in names if "site-packages" in name or "_sysconfigdata" in name or "/test" in name]
    assert total(corpus.find_pieces(None, 0.05, 0.3).train) < 0.3e6


def test_character_offsets_become_bytes_and_a_tokenizer_without_its_package_names_the_extra(monkeypatch: Any) -> None:
    text = "aé€😀b"
    found = corpus._bytes_before(text)
    assert found.tolist() == [len(text[:end].encode()) for end in range(len(text) + 1)]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused("pip install 'raypod\\[tokenizers\\]'", corpus.Tokenizer, "tokenizer.json")


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_lines_and_csv_have_the_same_examples_and_a_part_is_held_out(tmp_path: Path) -> None:
    rows = [("a\u2028b, c", "yes"), ("d", "no"), ("e\x85f", "yes")]
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows]
    as_json = write(tmp_path / "a.jsonl", "\r\n".join([*lines, ""]))
    as_csv = write(tmp_path / "a.csv", "label,text\n" + "".join(f'{label},"{text}"\n' for text, label in rows))
    found = read_examples(SEQUENCES, [as_json], [as_csv], 0.0)
    assert (found.train, found.test, found.names) == (rows, rows, ("no", "yes"))
    file = write(tmp_path / "a.csv", "tokens,tags\n" + "".join(f"word {number},B O\n" for number in range(10)))
    found = read_examples(TOKENS, [file], None, 0.3, known=("O", "B", "I"))
    assert (len(found.train), len(found.test), found.names) == (7, 3, ("O", "B", "I"))
    assert sorted(words[1] for words, _ in [*found.train, *found.test]) == [str(number) for number in range(10)]
    assert found == read_examples(TOKENS, [file], None, 0.3, known=("O", "B", "I"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"--test-examples \S+ has no examples"),
        ("[" * 2000 + "]" * 2000, r"b.jsonl, line 1 is not JSON"),
        ("{", r"b.jsonl, line 1 is not JSON"),
        ("[1]", r"b.jsonl, line 1 is no JSON object"),
        ('\n{"text": "a"}', r"b.jsonl, line 2 has no label; it has text"),
        ('{"text": "a", "label": 0.5}', r"text must be a string, and label a string or a whole number"),
        ('{"text": "a", "label": "other"}', r"test example 0 has the label 'other', which no training one has"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    good = write(tmp_path / "a.jsonl", '{"text": "a", "label": "yes"}\n')
    assert "\n" not in refused(words, read_examples, SEQUENCES, [good], [write(tmp_path / "b.jsonl", text)], 0.0)


@pytest.mark.parametrize(("files", "flag"), [((["no.jsonl"], None), "--examples"), ((None, ["no.csv"]), "--test-exam")])
def test_a_missing_file_is_named_with_its_flag(tmp_path: Path, files: Any, flag: str) -> None:
    good = [write(tmp_path / "a.jsonl", '{"text": "a", "label": "yes"}\n')]
    with pytest.raises(DataMissing, match=f"^{flag}"):
        read_examples(SEQUENCES, files[0] or good, files[1], 0.0)


def test_texts_alone_are_lines_or_a_column_and_a_file_without_some_is_named(tmp_path: Path) -> None:
    lines, table = write(tmp_path / "a.txt", "one\n\ntwo\n"), write(tmp_path / "a.csv", "id,text\n1,three\n")
    assert list(texts_in(SEQUENCES, [lines, table])) == ["one", "two", "three"]
    for name, text, words in (
        ("a.txt", "\n \n", "a.txt has no texts"),
        ("a.jsonl", "", "a.jsonl has no texts"),
        ("a.jsonl", '{"label": 1}', "a.jsonl, line 1 has no text; it has label"),
        ("a.pdf", "", "a.pdf: files end with .txt"),
    ):
        refused(words, list, texts_in(SEQUENCES, [write(tmp_path / name, text)]))
