"""Texts with a label each, or words with a tag each, in files of JSON lines or CSV; texts alone. Imports no torch."""

from __future__ import annotations

import csv
import io
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from raypod.errors import ConfigError, DataMissing
from raypod.system.files import looked_in, parse_json

_SUFFIXES = (".jsonl", ".json", ".csv")


class Form(NamedTuple):
    """The columns of a file: what is classified, and its class or classes."""

    inputs: str
    labels: str
    is_list: bool = False  # words and their tags, in CSV separated by spaces


SEQUENCES, TOKENS = Form("text", "label"), Form("tokens", "tags", is_list=True)
Example = Tuple[Any, Any]  # a text and its label, or words and their tags: strings


class Examples(NamedTuple):
    """The examples of both splits, and the names of the classes by number."""

    train: List[Example]
    test: List[Example]
    names: Tuple[str, ...]


def read_examples(
    form: Form,
    files: Optional[Sequence[str]],
    test_files: Optional[Sequence[str]],
    held_out: float,
    known: Sequence[str] = (),
) -> Examples:
    """Return the examples of files.

    Args:
        form: of the files.
        files: of the training split; with `test_files` None also of the test split.
        test_files: of the test split.
        held_out: fraction of `files` in the test split, chosen by a hash of the number of the example.
        known: the names of the classes, which count if they contain all labels; else the labels in sorted order.

    Raises:
        ConfigError: a file cannot be read, a line is not of the form, or a label occurs only in the test split.
        DataMissing: there is no such file.
    """
    if not files:
        raise ConfigError(f"--examples FILE is missing: JSON lines or CSV with {form.inputs} and {form.labels}")
    found = _read(form, "--examples", files)
    if test_files:
        train, test = found, _read(form, "--test-examples", test_files)
    else:
        ranked = sorted(range(len(found)), key=lambda number: (zlib.crc32(str(number).encode()), number))
        chosen = set(ranked[: int(held_out * len(found))])
        train = [example for number, example in enumerate(found) if number not in chosen]
        test = [found[number] for number in sorted(chosen)]
    labels = {label for example in train for label in _labels(form, example)}
    for number, example in enumerate(test):
        for label in _labels(form, example):
            if label not in labels and label not in known:
                raise ConfigError(f"test example {number} has the {form.labels} {label!r}, which no training one has")
            labels.add(label)
    return Examples(train, test, tuple(known) if labels <= set(known) else tuple(sorted(labels, key=_natural)))


def _labels(form: Form, example: Example) -> Sequence[str]:
    return example[1] if form.is_list else [example[1]]


def _natural(label: str) -> Tuple[int, int, str]:
    """Return a key that sorts numbers by their value, before other labels."""
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)


def _read(form: Form, flag: str, names: Sequence[str]) -> List[Example]:
    found: List[Example] = []
    for name in names:
        rows = _rows(form, name, _content(f"{flag} {name}", name, _SUFFIXES))
        examples = [_example(form, row, f"{name}, line {line}") for line, row in rows]
        if not examples:
            raise ConfigError(f"{flag} {name} has no examples")
        found += examples
    return found


def texts_in(form: Form, names: Sequence[str]) -> Iterator[str]:
    """Yield the texts of files: the lines of `.txt`, or the column of JSON lines or CSV. Errors as `read_examples`."""
    for name in names:
        content = _content(name, name, (".txt", *_SUFFIXES))
        if Path(name).suffix == ".txt":
            texts = [line for line in content.split("\n") if line.strip()]
        else:
            texts = [_text(form, row, f"{name}, line {line}") for line, row in _rows(form, name, content)]
        if not texts:
            raise ConfigError(f"{name} has no texts")
        yield from texts


def _text(form: Form, row: Dict[str, Any], where: str) -> str:
    if not isinstance(row.get(form.inputs), str):
        raise ConfigError(f"{where} has no {form.inputs}; it has {', '.join(map(str, row))}")
    return str(row[form.inputs])


def _content(shown: str, name: str, suffixes: Sequence[str]) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataMissing(f"{shown} does not exist{looked_in(path)}")
    if path.suffix not in suffixes:
        raise ConfigError(f"{shown}: files end with {', '.join(suffixes)}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from None


def _rows(form: Form, name: str, text: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
    return _csv_rows(form, name, text) if Path(name).suffix == ".csv" else _json_rows(name, text)


def _json_rows(name: str, text: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
    # JSON text may contain other characters at which `splitlines` divides, as U+2028.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = parse_json(content)
        except ValueError as error:
            raise ConfigError(f"{name}, line {line} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{name}, line {line} is no JSON object")
        yield line, row


def _csv_rows(form: Form, name: str, text: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            split = (form.inputs, form.labels) if form.is_list else ()
            yield reader.line_num, {key: str(row[key]).split() if key in split else row[key] for key in row if key}
    except csv.Error as error:
        raise ConfigError(f"{name}, line {reader.line_num} is not CSV: {error}") from None


def _example(form: Form, row: Dict[str, Any], where: str) -> Example:
    missing = [key for key in (form.inputs, form.labels) if row.get(key) is None]
    if missing:
        raise ConfigError(f"{where} has no {' and no '.join(missing)}; it has {', '.join(map(str, row))}")
    inputs, labels = row[form.inputs], row[form.labels]
    if not form.is_list:
        if not isinstance(inputs, str) or isinstance(labels, (list, dict, float)):
            raise ConfigError(f"{where}: {form.inputs} must be a string, and {form.labels} a string or a whole number")
        return inputs, str(labels)
    if not isinstance(inputs, list) or not isinstance(labels, list) or len(inputs) != len(labels) or not inputs:
        raise ConfigError(f"{where}: {form.inputs} and {form.labels} must be lists of the same length, not empty")
    return [str(each) for each in inputs], [str(each) for each in labels]
