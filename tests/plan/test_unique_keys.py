from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from raypod.errors import ConfigError
from raypod.plan.resolve import load_yaml
from raypod.plan.unique_keys import DuplicateKey, UniqueKeyLoader, syntax_error


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "- {a: 1,\n   b: {x: 1},\n   a: 2}", "c:\n  a: 1\n\n  a: 1"])
def test_a_duplicate_key_is_an_error_with_both_lines(text: str) -> None:
    with pytest.raises(DuplicateKey) as error:
        yaml.load(text, UniqueKeyLoader)
    assert str(error.value).startswith("a is a duplicate key, first given in line ")
    assert error.value.line > error.value.first_line


def test_a_key_may_override_a_merged_one() -> None:
    assert yaml.load("x: &x {a: 1}\ny: {<<: *x, a: 2}", UniqueKeyLoader)["y"] == {"a": 2}


def test_a_duplicate_key_of_a_config_file_is_named_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("training:\n  epochs: 2\n  batch_size: 8\n  epochs: 3\n")
    with pytest.raises(ConfigError, match="config.yaml, line 4: epochs is a duplicate key, first given in line 2"):
        load_yaml(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:\n\tb: 1", r"line 2: found character '\\t' that cannot start any token: a tab"),
        ("a:\n\tb: 1", r": a tab; YAML is indented with spaces$"),
        (
            "a:\n  b 1\n  c: 2",
            r"line 3: mapping values are not allowed here: is it indented too far, is a colon missing before it",
        ),
        ("a: 1\nb:2  # c\nd: 3", r"line 3: could not .*: is a colon missing, or the space after it\?$"),
        ("a: b: c", r"or must its value be quoted\?$"),
        ("a: 'b\nc: d", r"\(while scanning a quoted scalar that begins in line 1\): its quote is not closed$"),
        ("a: 'b\nc: 'd'", r"line 2: .*: is a quote not closed, or does text follow a closing quote or bracket\?$"),
        ("a: [b] c", r": is a quote not closed, or does text follow a closing quote or bracket\?$"),
        ("a:\n  b: 1\n c: 2", r"line 3: .*: is its indentation that of its siblings\?$"),
        ("a: 1\n- b", r"line 2: .*: is its indentation that of its siblings\?$"),
    ],
)
def test_a_syntax_error_is_explained(text: str, words: str) -> None:
    with pytest.raises(yaml.YAMLError) as error:
        yaml.load(text, UniqueKeyLoader)
    assert re.search(words, syntax_error("config.yaml", error.value))


@pytest.mark.parametrize("section", ["[]", "0", "false", '""'])
def test_a_section_that_is_no_mapping_is_an_error(section: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"training: {section}\n")
    with pytest.raises(ConfigError, match="expected sections"):
        load_yaml(path)


def test_a_key_that_is_a_number_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("training: {1: 2}\n")
    with pytest.raises(ConfigError, match=r"unknown key training\.1 "):
        load_yaml(path)
