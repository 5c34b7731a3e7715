"""The Python objects that a forward can change: found from the model's modules, by their paths.

A path is the same in a model and in its copies. What belongs to torch, to this package or to the standard library is
left out: a forward does not keep its state there.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, MutableMapping, NamedTuple, Optional, Tuple

import torch

ObjectPath = Tuple[Any, ...]

_TENSORS = ("_parameters", "_buffers", "_modules")
_FOREIGN = frozenset(("torch", "torchvision", "numpy", "poptorch", "popdist", "horovod", "_pod", "ray"))
_RECORDS = frozenset(("types", "argparse", "collections"))  # of the standard library: namespaces and containers
_CONSTANTS = (str, bytes, int, float, type(None), torch.dtype, torch.Size)
_NO_OBJECTS = (torch.Tensor, type, types.ModuleType)
_STDLIB = f"{Path(os.__file__).parent}/"
_slot_names: MutableMapping[type, Tuple[str, ...]] = weakref.WeakKeyDictionary()
_LIMIT = 50_000  # objects; a model may refer to everything that its program has


class Content(NamedTuple):
    """The content of an object: its values, and the keys or names of these (None for a sequence)."""

    keys: Optional[List[Any]]
    values: List[Any]

    def parts(self) -> List[Tuple[Any, Any]]:
        """Return the keys with their values."""
        return list(zip(self.keys or range(len(self.values)), self.values))

    def equals(self, other: Content) -> bool:
        """Return whether both have the same objects under the same keys."""
        return _same(self.keys or [], other.keys or []) and _same(self.values, other.values)


def _same(objects: List[Any], others: List[Any]) -> bool:
    return len(objects) == len(others) and all(mine is its for mine, its in zip(objects, others))


class Node(NamedTuple):
    """An object that can change, with the functions that read and write its content."""

    owner: Any
    read: Callable[[Any], Content]
    write: Callable[[Any, Content], None]

    def content(self) -> Content:
        """Return the present content."""
        return self.read(self.owner)

    def replace(self, content: Content) -> None:
        """Replace the content."""
        self.write(self.owner, content)


def nodes(model: torch.nn.Module) -> Dict[ObjectPath, Node]:
    """Return the objects that the forward of a model can change, by their paths, in an order that copies share."""
    return _Walk(model).found


class _Walk:
    def __init__(self, model: torch.nn.Module) -> None:
        self.found: Dict[ObjectPath, Node] = {}
        self._pending: deque[Tuple[ObjectPath, Any]] = deque()
        self._seen: Dict[int, Any] = {}  # the objects, which keeps their ids from being used again
        named = list(model.named_modules())
        for _, module in named:
            self._seen[id(module)] = module
        for name, module in named:
            self._attributes((name,), module)
        while self._pending and len(self._seen) < _LIMIT:
            self._visit(*self._pending.popleft())

    def _visit(self, path: ObjectPath, value: Any) -> None:
        kind = type(value)  # not by isinstance, which asks a proxy for its class
        if id(value) in self._seen or issubclass(kind, _CONSTANTS):
            return
        self._seen[id(value)] = value
        if issubclass(kind, (list, deque)):
            self._add(path, value, _read_sequence, _write_sequence, enumerate(value))
        elif issubclass(kind, dict):
            self._add(path, value, _read_dict, _write_dict, list(value.items()))
        elif issubclass(kind, set):
            self._add(path, value, _read_sequence, _write_set, ())
        elif issubclass(kind, tuple):
            self._push(path, enumerate(value))
        for key, inner in _parts_of_callable(value):
            self._push(path, [(key, inner)])
        if issubclass(kind, types.FunctionType):
            self._function(path, value)
        elif issubclass(kind, types.CellType):
            self._add(path, value, _read_cell, _write_cell, _read_cell(value).parts())
        elif kind is not OrderedDict and _is_record(kind) and not issubclass(kind, _NO_OBJECTS):
            self._attributes(path, value)

    def _add(self, path: ObjectPath, owner: Any, read: Any, write: Any, parts: Any) -> None:
        self.found[path] = Node(owner, read, write)
        self._push(path, parts)

    def _push(self, path: ObjectPath, parts: Any) -> None:
        self._pending.extend(((*path, key), value) for key, value in parts)

    def _attributes(self, path: ObjectPath, value: Any) -> None:
        """Visit the attributes of an object, and of its class and the functions that it defines."""
        if _dictionary(value) is not None or _slots(type(value)):
            content = _read_attributes(value)
            parts = [(key, inner) for key, inner in content.parts() if not _is_of_torch(key, inner)]
            self._add((*path, "."), value, _read_attributes, _write_attributes, parts)
        for kind in type(value).__mro__:
            if id(kind) not in self._seen and not _is_foreign(kind.__module__):
                self._seen[id(kind)] = kind
                name = ("class", kind.__module__, kind.__qualname__)
                self._add(name, kind, _read_class, _write_class, _parts_of_class(kind))

    def _function(self, path: ObjectPath, function: types.FunctionType) -> None:
        """Visit the variables that a function can change: of closures, of its module, defaults and attributes."""
        module = function.__globals__.get("__name__", "")
        if _is_foreign(module):
            return
        self._push(path, zip(function.__code__.co_freevars, function.__closure__ or ()))
        self._push(path, [("defaults", function.__defaults__), ("keywords", function.__kwdefaults__)])
        self._push(path, [("attributes", vars(function))])
        names = [name for name in _global_names(function.__code__) if name in function.__globals__]
        read, write = _bindings([name for name in names if _is_data(function.__globals__[name])])
        self.found[("globals", module, function.__qualname__)] = Node(function.__globals__, read, write)
        package = module.split(".")[0]
        parts = [(name, function.__globals__[name]) for name in names]
        self._push(("global", module), [(name, value) for name, value in parts if _belongs(value, package)])


def _is_of_torch(name: str, value: Any) -> bool:
    """Return whether an attribute of a module is torch's: its tensors and modules, and hooks that it does not have."""
    return name in _TENSORS or ("_hooks" in name and type(value) in (dict, OrderedDict) and not value)


def _parts_of_callable(value: Any) -> List[Tuple[str, Any]]:
    kind = type(value)  # as in `_visit`: a weak proxy of an object that is gone has no class
    if issubclass(kind, types.MethodType):
        return [("function", value.__func__), ("self", value.__self__)]
    if issubclass(kind, functools.partial):
        return [("function", value.func), ("args", value.args), ("keywords", value.keywords)]
    if issubclass(kind, (staticmethod, classmethod)):
        return [("function", value.__func__)]
    return [("get", value.fget)] if issubclass(kind, property) else []


def _parts_of_class(kind: type) -> List[Tuple[str, Any]]:
    """Return what a class defines, without the records of Python and of libraries, as of the fields of a dataclass."""
    return [(name, value) for name, value in vars(kind).items() if not name.startswith("__") or callable(value)]


def _belongs(value: Any, package: str) -> bool:
    """Return whether a value of a module's variable is to be visited: containers, and what its package defines."""
    if issubclass(type(value), (list, dict, set, deque)):
        return True
    kind = value if issubclass(type(value), (type, types.FunctionType)) else type(value)
    return str(getattr(kind, "__module__", "")).split(".")[0] == package


def _is_data(value: Any) -> bool:
    return not issubclass(type(value), (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


@functools.lru_cache(maxsize=None)
def _is_foreign(module: str) -> bool:
    """Return whether a module is not the program's: of torch, of this package, or of the standard library."""
    package = module.split(".")[0]
    if package in _FOREIGN or package in sys.builtin_module_names:
        return package != "__main__"
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return file.startswith(_STDLIB) and not is_installed


def _is_record(kind: type) -> bool:
    """Return whether objects of a class can have the program's values as attributes."""
    return kind.__module__ in _RECORDS or not _is_foreign(kind.__module__)


def _read_sequence(owner: Any) -> Content:
    return Content(None, list(owner))


def _write_sequence(owner: Any, content: Content) -> None:
    owner.clear()
    owner.extend(content.values)


def _read_dict(owner: Any) -> Content:
    return Content(list(owner.keys()), list(owner.values()))


def _write_dict(owner: Any, content: Content) -> None:
    owner.clear()
    owner.update(zip(content.keys or (), content.values))


def _write_set(owner: Any, content: Content) -> None:
    owner.clear()
    owner.update(content.values)


def _read_cell(owner: types.CellType) -> Content:
    try:
        return Content(["content"], [owner.cell_contents])
    except ValueError:  # not assigned yet
        return Content([], [])


def _write_cell(owner: types.CellType, content: Content) -> None:
    if content.values:
        owner.cell_contents = content.values[0]
    elif _read_cell(owner).values:
        del owner.cell_contents


def _slots(kind: type) -> Tuple[str, ...]:
    """Return the names of the attributes that the objects of a class have outside of a dictionary."""
    if kind not in _slot_names:
        slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
        names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
        members = [name for name in names if isinstance(getattr(kind, name, None), types.MemberDescriptorType)]
        _slot_names[kind] = tuple(members)
    return _slot_names[kind]


def _has(owner: Any, slot: str) -> bool:
    """Return whether a slot of an object has a value."""
    try:
        object.__getattribute__(owner, slot)
    except AttributeError:
        return False
    return True


def _dictionary(owner: Any) -> Optional[Dict[str, Any]]:
    """Return the attributes of an object, past its own `__getattr__`; None if it has no dictionary."""
    try:
        attributes: Dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError, ValueError, RuntimeError):  # of a property of the name
        return None
    return attributes if type(attributes) is dict else None


def _read_attributes(owner: Any) -> Content:
    found = dict(_dictionary(owner) or {})
    for name in _slots(type(owner)):
        if _has(owner, name):
            found[name] = object.__getattribute__(owner, name)
    return Content(list(found), list(found.values()))


def _write_attributes(owner: Any, content: Content) -> None:
    values = dict(zip(content.keys or (), content.values))
    for name in _slots(type(owner)):
        if name in values:
            object.__setattr__(owner, name, values.pop(name))
        elif _has(owner, name):
            object.__delattr__(owner, name)
    attributes = _dictionary(owner)
    if attributes is not None:
        attributes.clear()
        attributes.update(values)


def _read_class(owner: type) -> Content:
    found = {name: value for name, value in vars(owner).items() if not name.startswith("__") and _is_data(value)}
    return Content(list(found), list(found.values()))


def _write_class(owner: type, content: Content) -> None:
    values = dict(zip(content.keys or (), content.values))
    for name in set(_read_class(owner).keys or ()) - values.keys():
        delattr(owner, name)
    for name, value in values.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


def _bindings(names: List[str]) -> Tuple[Callable[[Any], Content], Callable[[Any, Content], None]]:
    """Return the functions that read and write variables of a module, given its dictionary."""

    def read(owner: Dict[str, Any]) -> Content:
        present = [name for name in names if name in owner]
        return Content(present, [owner[name] for name in present])

    def write(owner: Dict[str, Any], content: Content) -> None:
        for name in names:
            owner.pop(name, None) if name not in (content.keys or ()) else None
        owner.update(zip(content.keys or (), content.values))

    return read, write
