"""The public names of PopTorch, with their parameters and defaults (`poptorch_api.txt`), errors, log levels."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Tuple

import poptorch
import pytest
import torch
from poptorch import environment

# Sections whose names are not importable modules.
PRIVATE_SECTIONS = {"poptorch (args)", "poptorch (options base)"}


class Entry(NamedTuple):
    """A line of the list."""

    path: str
    kind: str
    detail: str  # the parameters or the value


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
            value = re.match(r" +(\w+) = (.+)", line)
            if value:
                yield Entry(f"{owner}.{value.group(1)}", "value", value.group(2))
            else:
                kind, name, detail = re.match(r" +(?:(property|setter|static) )?(\w+)\((.*)\)", line).groups()
                yield Entry(f"{owner}.{name}", kind or "method", detail)


ENTRIES = list(entries())


def found(path: str) -> Any:
    value: Any = poptorch
    for name in path.split(".")[1:]:
        value = inspect.getattr_static(value, name) if inspect.isclass(value) else getattr(value, name)
    return value


def parameters(function: Any) -> List[Tuple[str, Any]]:
    """Return names, with their stars, and defaults; without `self`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    listed = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    return [(stars.get(each.kind, "") + each.name, each.default) for each in listed]


def expected_parameters(detail: str) -> List[Tuple[str, Any]]:
    namespace = {name: getattr(poptorch, name) for name in ("DataLoaderMode", "SharingStrategy")}
    return parameters(eval(f"lambda {detail}: None", namespace))


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    entries = [each for each in ENTRIES if each.kind in kinds]
    return pytest.mark.parametrize("entry", entries, ids=lambda each: each.path)


@of_kinds("def", "class")
def test_names_exist(entry: Entry):
    name = entry.path.rpartition(".")[2]
    value = found(entry.path)
    assert getattr(poptorch, name, value) is value
    assert inspect.isclass(value) == (entry.kind == "class")


@of_kinds("def", "method", "static")
def test_parameters_and_defaults_equal_those_of_the_sdk(entry: Entry):
    function = found(entry.path)
    function = getattr(function, "__func__", function)
    assert parameters(function) == expected_parameters(entry.detail)


@of_kinds("property", "setter")
def test_properties_are_properties(entry: Entry):
    value = found(entry.path)
    assert isinstance(value, property)
    assert entry.kind != "setter" or value.fset is not None


@of_kinds("value")
def test_members_of_enumerations_have_the_values_of_the_sdk(entry: Entry):
    owner, _, name = entry.path.rpartition(".")
    assert repr(found(owner)[name].value) == entry.detail


def test_exported_names_are_sorted_and_exist():
    assert poptorch.__all__ == sorted(poptorch.__all__)
    assert all(hasattr(poptorch, name) for name in poptorch.__all__)
    assert not hasattr(poptorch, "no_such_name")


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (poptorch, "AnchorMode", r"PopTorch 2\.5 removed it; use poptorch\.OutputMode"),
        (poptorch, "autocast", r"PopTorch 3\.1 removed it; cast in the model"),
        (poptorch.Options(), "Popart", r"PopTorch 2\.1 removed it; use _Popart"),
        (poptorch.Options().Precision, "autocastEnabled", r"'autocastEnabled': PopTorch 3\.1 removed it; cast in the"),
        (poptorch.Options().Precision, "autocastPolicy", r"PopTorch 3\.1 removed it; cast in the model"),
        (poptorch.Options().Training, "accumulationReductionType", "use accumulationAndReplicationReductionType"),
    ],
)
def test_a_name_of_an_older_version_is_an_error_with_its_version_and_replacement(owner, name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(owner, name)


def test_importing_sets_rdmav_fork_safe():
    assert os.environ["RDMAV_FORK_SAFE"]


@pytest.mark.parametrize("kind", [poptorch.Error, poptorch.RecoverableError, poptorch.UnrecoverableError])
def test_errors_can_be_pickled(kind):
    error = pickle.loads(pickle.dumps(kind("no IPU", "some_type", "here")))
    assert type(error) is kind
    assert (str(error), error.message, error.type, error.location) == ("no IPU", "no IPU", "some_type", "here")
    recoverable = poptorch.RecoverableError("link down", recovery_action="LINK_RESET")
    assert pickle.loads(pickle.dumps(recoverable)).recovery_action == "LINK_RESET"


def test_an_environment_variable_sets_the_number_of_available_ipus(monkeypatch):
    monkeypatch.delenv("EMULATED_POD_IPUS", raising=False)
    assert not poptorch.ipuHardwareIsAvailable()
    with pytest.raises(AssertionError, match="No IPU hardware"):
        poptorch.ipuHardwareVersion()
    monkeypatch.setenv("EMULATED_POD_IPUS", "16")
    assert {ipus for ipus in range(20) if poptorch.ipuHardwareIsAvailable(ipus)} == {1, 2, 4, 8, 16}
    assert poptorch.ipuHardwareVersion() == 2
    for text in ("", "many", "-1", "1.5"):
        monkeypatch.setenv("EMULATED_POD_IPUS", text)
        with pytest.raises(poptorch.Error, match=f"EMULATED_POD_IPUS='{text}' is not a number"):
            poptorch.ipuHardwareIsAvailable()


def test_log_levels_are_names_and_numbers(monkeypatch):
    logger = logging.getLogger("poptorch::python")
    monkeypatch.setattr(logger, "level", logger.level)
    severities = {"TRACE": 5, "DEBUG": 10, "WARN": 30, "ERR": 40, 0: 5, 2: 20, 6: 60}
    for level, severity in severities.items():
        poptorch.setLogLevel(level)
        assert logger.level == severity
    for level in ("LOUD", "WARNING", "debug", 5, 7, -1, True, None, []):
        with pytest.raises(ValueError, match=r"Unknown log level: .* OFF, TRACE and WARN|Invalid log level integer"):
            poptorch.setLogLevel(level)
    for text, severity in (("INFO", 20), ("1", 10), ("off", 60), ("LOUD", 30)):
        monkeypatch.setenv("POPTORCH_LOG_LEVEL", text)
        environment.set_level_from_environment()
        assert logger.level == severity


def results(values: object, dtype: torch.dtype = torch.float32) -> object:
    return {"loss": torch.tensor(values, dtype=dtype), "rest": (1, [torch.ones(2)])}


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("left", "right", "is_close"),
    [
        ([ONE, (ONE, ONE)], [ONE, (ONE, ONE + 1e-9)], True),
        (ONE, ONE + 0.1, False),
        *(([ONE], other, False) for other in (ONE, (ONE,), [ONE, ONE], {"a": ONE})),
    ],
)
def test_allclose_compares_nested_results(left, right, is_close):
    assert poptorch.testing.allclose(left, right) is is_close


@pytest.mark.parametrize(
    ("left", "right", "error"),
    [({"a": ONE}, {"a": ONE}, TypeError), (ONE, 1, TypeError), (ONE, ONE.double(), RuntimeError)],
)
def test_allclose_rejects_what_the_sdk_rejects(left, right, error):
    with pytest.raises(error):
        poptorch.testing.allclose(left, right)
