"""Every public name of PopTorch exists with its parameters and their defaults (`poptorch_api.txt`)."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Tuple

import poptorch
import pytest

# Sections whose names are not importable modules.
PRIVATE_SECTIONS = {"poptorch (args)", "poptorch (options base)"}


class Entry(NamedTuple):
    """A line of the list: the path of the name, its parameters or value, and the kind of line."""

    path: str
    kind: str
    detail: str


def entries() -> Iterator[Entry]:
    module, owner = "", ""
    for line in (Path(__file__).parent / "poptorch_api.txt").read_text().splitlines():
        section = re.match(r"## (.+)", line)
        if section:
            private = section.group(1) in PRIVATE_SECTIONS
            module = "" if private else section.group(1).replace("(ops)", ".ops").split(" (")[0].replace(" ", "")
        elif module and line.startswith(("def ", "class ")):
            kind, name, detail = re.match(r"(def|class) (\w+)\((.*)\)", line).groups()
            owner = f"{module}.{name}"
            yield Entry(owner, kind, detail)
        elif module and line.startswith("    "):
            yield member(owner, line.strip())


def member(owner: str, line: str) -> Entry:
    value = re.match(r"(\w+) = (.+)", line)
    if value:
        return Entry(f"{owner}.{value.group(1)}", "value", value.group(2))
    kind, name, detail = re.match(r"(?:(property|setter|static) )?(\w+)\((.*)\)", line).groups()
    return Entry(f"{owner}.{name}", kind or "method", detail)


ENTRIES = list(entries())


def found(path: str) -> Any:
    value: Any = poptorch
    for name in path.split(".")[1:]:
        value = (
            inspect.getattr_static(value, name)
            if inspect.isclass(value) and value is not None
            else getattr(value, name)
        )
    return value


def parameters(function: Any) -> List[Tuple[str, Any]]:
    """Return names, with their stars, and defaults; without `self`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    listed = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    return [(stars.get(each.kind, "") + each.name, each.default) for each in listed]


def expected_parameters(detail: str) -> List[Tuple[str, Any]]:
    namespace = {name: getattr(poptorch, name) for name in ("DataLoaderMode", "SharingStrategy")}
    template = eval(f"lambda {detail}: None", namespace)
    return parameters(template)


@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.kind in ("def", "class")], ids=lambda e: e.path)
def test_names_exist(entry: Entry):
    name = entry.path.rpartition(".")[2]
    value = found(entry.path)
    assert getattr(poptorch, name, value) is value
    assert inspect.isclass(value) == (entry.kind == "class")


@pytest.mark.parametrize(
    "entry", [each for each in ENTRIES if each.kind in ("def", "method", "static")], ids=lambda e: e.path
)
def test_parameters_and_defaults_equal_those_of_the_sdk(entry: Entry):
    function = found(entry.path)
    function = getattr(function, "__func__", function)
    assert parameters(function) == expected_parameters(entry.detail)


@pytest.mark.parametrize(
    "entry", [each for each in ENTRIES if each.kind in ("property", "setter")], ids=lambda e: e.path
)
def test_properties_are_properties(entry: Entry):
    value = found(entry.path)
    assert isinstance(value, property)
    assert entry.kind != "setter" or value.fset is not None


@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.kind == "value"], ids=lambda e: e.path)
def test_members_of_enumerations_have_the_values_of_the_sdk(entry: Entry):
    owner, _, name = entry.path.rpartition(".")
    assert repr(found(owner)[name].value) == entry.detail
