"""The sections of a cluster file: mappings with the lines of their keys, which record wrong values as mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import yaml

from raypod.plan.unique_keys import DuplicateKey, duplicate_keys
from raypod.system.command_line import suggestion


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake or a warning, and its line (1-based)."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


class _Entry(NamedTuple):
    value: Any
    line: int
    item_lines: Tuple[int, ...] = ()  # of a list


class Section:
    """A mapping of the file with the lines of its keys. A wrong value is recorded as a mistake and reads as None."""

    def __init__(self, name: str, line: int, entries: Dict[str, _Entry], mistakes: List[Mistake]) -> None:
        self.name, self.line, self._entries, self._mistakes = name, line, entries, mistakes

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def add_mistake(self, key: str, text: str, item: Optional[int] = None) -> None:
        """Record a mistake at the line of a key, or of an item of its list, or of the section if the key is missing."""
        self._mistakes.append(Mistake(self.line_of(key, item), text))

    def line_of(self, key: str, item: Optional[int] = None) -> int:
        """Return the line of a key, or of an item of its list, or of the section if the key is missing."""
        entry = self._entries.get(key, _Entry(None, self.line))
        return entry.item_lines[item] if item is not None and item < len(entry.item_lines) else entry.line

    def value(self, key: str) -> Any:
        """Return the parsed YAML value of a key; None if the key is missing."""
        return self._entries.get(key, _Entry(None, self.line)).value

    def names(self) -> List[str]:
        """Return the keys in the order of the file."""
        return list(self._entries)

    def check_keys(self, known: Iterable[str]) -> None:
        """Record every unknown key, with the nearest known one."""
        known = list(known)
        for key in self._entries:
            if key not in known:
                self.add_mistake(key, f"unknown key {self.full(key)}{suggestion(key, known)}")

    def section(self, key: str) -> Section:
        """Return the mapping of a key; an empty one if the value is missing or not a mapping."""
        value = self.value(key)
        if isinstance(value, Section):
            return value
        if value is not None:
            self.add_mistake(key, f"{self.full(key)} must be a mapping, not {kind_of(value)}")
        return Section(self.full(key), self.line_of(key), {}, self._mistakes)

    def text(self, key: str) -> Optional[str]:
        """Return a string; numbers are converted, because YAML parses some addresses as numbers."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "":
            return str(value)
        self.add_mistake(key, f"{self.full(key)} = {_format_value(value)} must be a string")
        return None

    def texts(self, key: str) -> Tuple[str, ...]:
        """Return a list of strings; a single string is a list of one."""
        value = self.value(key)
        entries = [value] if isinstance(value, str) else value
        if entries is None:
            return ()
        if not isinstance(entries, list):
            self.add_mistake(key, f"{self.full(key)} must be a list of strings")
            return ()
        for number, each in enumerate(entries):
            if not isinstance(each, (str, int, float)) or isinstance(each, bool) or each == "":
                self.add_mistake(key, f"{self.full(key)} has the entry {each!r}, which must be a string", number)
        return tuple(map(str, entries))

    def integer(self, key: str, least: int = 1, most: Optional[int] = None) -> Optional[int]:
        """Return an integer of at least `least` and at most `most`."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.add_mistake(key, f"{self.full(key)} = {_format_value(value)} must be an integer of at least {least}")
            return None
        if most is not None and value > most:
            self.add_mistake(key, f"{self.full(key)} = {value} must be at most {most}")
            return None
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; False if the key is missing."""
        value = self.value(key)
        if not isinstance(value, (bool, type(None))):
            self.add_mistake(key, f"{self.full(key)} = {_format_value(value)} must be true or false")
        return value is True

    def full(self, key: str) -> str:
        """Return the name of a key with those of the sections around it."""
        return f"{self.name}.{key}" if self.name else key


def read_section(name: str, node: yaml.MappingNode, loader: yaml.SafeLoader, mistakes: List[Mistake]) -> Section:
    """Return a section and its subsections; `file_mounts` and `docker` stay plain values.

    Args:
        name: the full name of the section; "" for the whole file.
        node: its mapping.
        loader: the loader that has composed the node.
        mistakes: the list to which this section and its subsections add.
    """
    prefix = f"{name}." if name else ""
    mistakes += (Mistake(each.line, f"{prefix}{each}") for each in duplicate_keys(node))
    loader.flatten_mapping(node)
    entries: Dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        key, line = str(loader.construct_document(key_node)), key_node.start_mark.line + 1
        full = f"{prefix}{key}"
        value: Any = None
        if isinstance(value_node, yaml.MappingNode) and full not in ("file_mounts", "docker"):
            value = read_section(full, value_node, loader, mistakes)
        else:
            try:
                value = loader.construct_document(value_node)
            except DuplicateKey as error:
                mistakes.append(Mistake(error.line, f"{full}: {error}"))
        items = value_node.value if isinstance(value_node, yaml.SequenceNode) else ()
        entries[key] = _Entry(value, line, tuple(item.start_mark.line + 1 for item in items))
    return Section(name, node.start_mark.line + 1, entries, mistakes)


def kind_of(value: Any) -> str:
    """Return how a message names the type of a value."""
    return "a mapping" if isinstance(value, Section) else type(value).__name__


def _format_value(value: Any) -> str:
    return "a mapping" if isinstance(value, Section) else repr(value)
