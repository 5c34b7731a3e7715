"""A YAML loader for which a duplicate key is an error, and its syntax errors in one line.

PyYAML's own loaders silently use the last of duplicate keys.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Tuple

import yaml

_MOST_LEVELS = 100  # of nodes in each other; for JSON see system/files.py
_HINTS = {  # by a part of PyYAML's message
    "<block end>": ": indent it like the other keys of this section",
    "character '\\t'": ": a tab; YAML is indented with spaces",
    "mapping values are not": ": is it indented too far, is a colon missing before it, or must its value be quoted?",
    "could not find expected ':'": ": is a colon missing, or the space after it?",
}


class DuplicateKey(yaml.YAMLError):
    """Raised for a key that a mapping has twice. `line` and `first_line` are 1-based."""

    def __init__(self, key: str, line: int, first_line: int) -> None:
        super().__init__(key, line, first_line)
        self.key, self.line, self.first_line = key, line, first_line

    def __str__(self) -> str:
        return f"{self.key} is a duplicate key, first given in line {self.first_line}"


class UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader`, which raises DuplicateKey for a duplicate key at any level.

    Content that is nested too deeply is a YAMLError, before it is a RecursionError.
    """

    _levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node of the document."""
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            raise yaml.YAMLError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a mapping. A key may override one that is merged with `<<`."""
        for duplicate in duplicate_keys(node):
            raise duplicate
        return super().construct_mapping(node, deep)


def syntax_error(path: str, error: yaml.YAMLError) -> str:
    """Return the message for a file that is not YAML: its line, and the cause in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path} is not YAML: {' '.join(str(error).split())}"
    began, problem = error.context_mark, error.problem or ""
    within = f" ({error.context} that begins in line {began.line + 1})" if began and error.context else ""
    return f"{path} is not YAML, line {error.problem_mark.line + 1}: {problem}{within}{_hint(problem, within)}"


def _hint(problem: str, within: str) -> str:
    """Return the likely cause of a syntax error, for the end of its message."""
    if "quoted scalar" in within and "end of stream" in problem:
        return ": its quote is not closed"
    if "<block end>" in problem and "'<scalar>'" in problem:  # a text begins in the same line as another one ends
        return ": is a quote not closed, or does text follow a closing quote or bracket?"
    return next((hint for words, hint in _HINTS.items() if words in problem), "")


def duplicate_keys(node: yaml.MappingNode) -> Iterator[DuplicateKey]:
    """Yield an error for each key of a mapping that is given again. The mapping must not have been flattened."""
    first: Dict[Tuple[str, str], int] = {}
    for key, _ in node.value:
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in first:
            yield DuplicateKey(name[1], line, first[name])
        first.setdefault(name, line)
