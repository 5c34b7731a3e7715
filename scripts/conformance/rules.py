"""Decides from the source of a test whether it uses the C++ backend, or downloads data.

The source of a test is its function, and the functions and classes of the tests' folder that it reaches by name.
Decorators do not count: those of PopTorch's tests set log levels and print what was captured.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, FrozenSet, Iterator, List, Optional, Tuple

from poptorch import poptorch_core

_COMPILED = "calls a custom operator compiled from C++"
_DOWNLOAD = "downloads weights, data or pages"
# The first expression that matches a dotted name or a string of the test's source gives the reason.
_RULES: List[Tuple[str, str]] = [
    (r"(.*\.)?_debugGetPopartIR", "reads the IR of PopART"),
    (rf"(.*\.)?poptorch_core\.(?!({'|'.join(vars(poptorch_core))})\b).*", "calls the private C++ module"),
    (r"(.*\.)?_impl\._.*", "uses the private module poptorch._impl"),
    (r"POPTORCH_EXPORT_PROTO_FILE", "exports a protobuf file"),
    (r"(.*\.)?LogChecker|(capfd|caplog)\..*", "checks captured log lines"),
    (r"(.*\.)?external_datasets_dir|(.*\.)?from_pretrained|requests\..*", _DOWNLOAD),
]


def reason_of(test: Callable[..., Any], fixtures: List[Callable[..., Any]], tests_folder: Path) -> Optional[str]:
    """The reason to exclude the test, or None."""
    names = _reached_names([test, *fixtures], tests_folder)
    for pattern, reason in _RULES:
        if any(re.fullmatch(pattern, name) for name in names):
            return reason
    module = inspect.getmodule(test)
    if module is not None and any(
        re.fullmatch(r"(ctypes\.)?cdll\.LoadLibrary", name) for name in _module_names(module)
    ):
        return _COMPILED
    return None


def _reached_names(functions: List[Callable[..., Any]], folder: Path) -> FrozenSet[str]:
    names: FrozenSet[str] = frozenset()
    seen: List[Any] = []
    pending: List[Any] = [inspect.unwrap(function) for function in functions]
    while pending:
        element = pending.pop()
        if any(element is other for other in seen):
            continue
        seen.append(element)
        own = _names(element)
        names |= own
        module = inspect.getmodule(element)
        if module is not None:
            pending.extend(_definitions(own, module, folder))
    return names


def _definitions(names: FrozenSet[str], module: ModuleType, folder: Path) -> Iterator[Any]:
    """The functions and classes of the tests' folder that `names` stand for in `module`."""
    for name in names:
        element: Any = module
        for part in name.split("."):
            element = getattr(element, "__dict__", {}).get(part)
            if inspect.isfunction(element) or inspect.isclass(element):
                element = inspect.unwrap(element)
                if is_of_folder(element, folder):
                    yield element
                break


def is_of_folder(element: Any, folder: Path) -> bool:
    """Whether a function or class is defined in a file below `folder`."""
    file = getattr(inspect.getmodule(element), "__file__", None)
    return file is not None and folder in Path(file).resolve().parents


@functools.lru_cache(maxsize=None)
def _names(element: Any) -> FrozenSet[str]:
    """The dotted names and the strings in the source of a function or class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(element)))
    except (OSError, TypeError, SyntaxError):  # made by exec, or a lambda in the middle of a statement
        return frozenset()
    return frozenset(_dotted_names(tree))


@functools.lru_cache(maxsize=None)
def _module_names(module: ModuleType) -> FrozenSet[str]:
    """The dotted names of the statements that run when `module` is imported."""
    tree = ast.parse(inspect.getsource(module))
    statements = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return frozenset(name for node in statements for name in _dotted_names(node))


def _dotted_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            node.decorator_list = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, (ast.Attribute, ast.Name)):
            yield _dotted(node)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
