"""YAML of any author: too many levels are an error before Python's limit of recursion is reached."""

from __future__ import annotations

import pytest
import yaml

from raypod.plan.unique_keys import UniqueKeyLoader


@pytest.mark.parametrize("text", ["[" * 101 + "]" * 101, "[" * 5_000 + "]" * 5_000, "{a: " * 200 + "1" + "}" * 200])
def test_too_many_levels_are_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        yaml.load(text, UniqueKeyLoader)


def test_nodes_beside_each_other_are_no_levels() -> None:
    text = "{b: [" + "{a: [1]}, " * 500 + "]}"
    assert yaml.load(text, UniqueKeyLoader) == {"b": [{"a": [1]}] * 500}
