"""Examples with labels: files of JSON lines and CSV, the split, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raypod.errors import ConfigError, DataMissing
from raypod.training.data.labelled_text import SEQUENCES, TOKENS, read_examples, texts_in


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_lines_and_csv_have_the_same_examples(tmp_path: Path) -> None:
    rows = [("a\u2028b, c", "yes"), ("d", "no"), ("e\x85f", "yes")]
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows]
    as_json = write(tmp_path / "a.jsonl", "\r\n".join([*lines, ""]))
    as_csv = write(tmp_path / "a.csv", "label,text\n" + "".join(f'{label},"{text}"\n' for text, label in rows))
    found = read_examples(SEQUENCES, [as_json], [as_csv], 0.0)
    assert (found.train, found.test, found.names) == (rows, rows, ("no", "yes"))


def test_words_and_tags_and_a_part_that_is_held_out(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=words) as caught:
        read_examples(SEQUENCES, [good], [write(tmp_path / "b.jsonl", text)], 0.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("files", "flag"), [((["no.jsonl"], None), "--examples"), ((None, ["no.csv"]), "--test-exam")])
def test_a_missing_file_is_named_with_its_flag(tmp_path: Path, files: Any, flag: str) -> None:
    good = [write(tmp_path / "a.jsonl", '{"text": "a", "label": "yes"}\n')]
    with pytest.raises(DataMissing, match=f"^{flag}"):
        read_examples(SEQUENCES, files[0] or good, files[1], 0.0)


def test_texts_alone_are_lines_or_a_column(tmp_path: Path) -> None:
    lines, table = write(tmp_path / "a.txt", "one\n\ntwo\n"), write(tmp_path / "a.csv", "id,text\n1,three\n")
    assert list(texts_in(SEQUENCES, [lines, table])) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "\n \n", "a.txt has no texts"),
        ("a.jsonl", "", "a.jsonl has no texts"),
        ("a.jsonl", '{"label": 1}', "a.jsonl, line 1 has no text; it has label"),
        ("a.pdf", "", "a.pdf: files end with .txt"),
    ],
)
def test_a_file_without_texts_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(texts_in(SEQUENCES, [write(tmp_path / name, text)]))
