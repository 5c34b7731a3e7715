"""The session options of PopTorch, with their types, read from its C++ sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Set

_SETTER = re.compile(r'registerSetter\(\s*(\w+?)_options,\s*"([^"]+)"')
_DIRECT = re.compile(r'(\w+?)_options\["([^"]+)"\]')
_POPART = re.compile(r"ADD_POPART_(\w+?)_OPTION\(\s*([\w.]+)")
_LOCATION = re.compile(r'(?:location_tensor|opt) == "([^"]+)"')
_OPERATOR = re.compile(r"m\.def\((.*?)\);", re.DOTALL)
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


class SessionOptions:
    """Names by type: bool, uint64, string, double, container; and the settings of tensor locations."""

    def __init__(self, source: Path) -> None:
        """`source`: popart_compiler/source/SessionOptions.cpp."""
        text = source.read_text()
        self.names: Dict[str, Set[str]] = {}
        for kind, name in (*_SETTER.findall(text), *_DIRECT.findall(text), *_POPART.findall(text)):
            if name != "name":  # the parameter of the macros
                self.names.setdefault("uint64" if kind == "ENUM" else kind.lower(), set()).add(name)
        self._locations = set(_LOCATION.findall(text))

    def check(self, options: Dict[str, Any]) -> None:
        """Raises ValueError for the first option that the core does not know, or with another type."""
        for name, value in options.items():
            if name in ("patterns_level", "anchored_tensors", "compilation_progress_bar_fn"):
                continue
            if isinstance(value, dict) and name in ("available_memory_proportion", "patterns"):
                continue
            if isinstance(value, dict) and name.startswith("location_"):
                unknown = ({name} | set(value)) - self._locations
                if unknown:
                    raise ValueError(f"Unknown tensor location {sorted(unknown)[0]}")
                continue
            kind = _kind(value)
            if not kind:
                raise ValueError(f"Unknown value type {type(value)} for option {name}")
            if kind == "container" and not value:  # the core is called for each item
                continue
            if name not in self.names[kind]:
                raise ValueError(f"Unknown {kind} option {name}")
            if kind == "uint64" and value < 0:
                raise ValueError(f"Unable to cast {value} of option {name} to uint64")


def _kind(value: Any) -> str:
    kinds = (bool, "bool"), (float, "double"), (int, "uint64"), (str, "string"), ((set, list, tuple, dict), "container")
    return next((kind for types, kind in kinds if isinstance(value, types)), "")  # type: ignore[arg-type]


def operators(source: Path) -> List[str]:
    """The schemas of PopTorch's operators, from poptorch/source/dispatch_tracer/RegisterAtenOverloads.cpp."""
    text = source.read_text()
    library = text[text.index("TORCH_LIBRARY(poptorch, m) {") :]
    return ["".join(_TEXT.findall(each)) for each in _OPERATOR.findall(library[: library.index("\n}\n")])]
