"""The Python objects that a forward can change, and what it does to them: seen once, as PopTorch traces a model once.

The compilation traces a copy of the model, and then gives what that forward has changed to the user's objects. All
later forwards begin with the objects as they were before the trace, and their changes are discarded: the copies of a
replica are restored, and what the replicas share with the program (variables of modules, classes and closures, objects
that cannot be copied) is exchanged for the time of a forward.

The objects are found from the model's modules, by their paths. A path is the same in a model and in its copies.
What belongs to torch, to this package or to the standard library is left out: a forward does not keep its state there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    MutableMapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch.nn.utils import parametrize

# One for all programs, as they may share objects. Reentrant: a layer on the host may run another model.
_lock = threading.RLock()
_active = threading.local()


class Changes:
    """What a traced forward changes.

    Args:
        copied: the paths of the changed objects of which each replica has a copy.
        shared: the other ones; None if there are none.
        seen: the host's objects with their contents after the forward.
        tensors: tensors of the host, each with its value after the forward.
    """

    def __init__(
        self,
        copied: Tuple[ObjectPath, ...],
        shared: Optional[SharedObjects],
        seen: List[Tuple[Node, Content]],
        tensors: List[Tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.copied, self.shared = copied, shared
        self._seen, self._tensors = seen, tensors

    def show(self) -> None:
        """Let the user's objects show the changes."""
        for host, value in self._tensors:
            host.detach().copy_(value.detach())
        for node, content in self._seen:
            node.replace(content)
        self._seen, self._tensors = [], []


class TracedState:
    """The Python objects that the model and a copy of it refer to, before a forward of the copy is traced.

    Args:
        tensors: the parameters and buffers of the host, each with its copy.
    """

    def __init__(
        self, host: torch.nn.Module, copy: torch.nn.Module, tensors: Iterable[Tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._host = nodes(host)
        self._before = {path: node.content() for path, node in self._host.items()}
        self._copy = {path: _Saved(node) for path, node in nodes(copy).items()}
        own = {id(node.owner) for node in self._host.values()}
        self._shared = {path for path, saved in self._copy.items() if id(saved.node.owner) in own}
        self._pairs = [*zip(copy.modules(), host.modules()), *((tensor, original) for original, tensor in tensors)]
        self._parametrize_cache = parametrize._cache

    def undo(self) -> None:
        """Undo the changes of the objects that the copy shares with the program."""
        for path in self._shared:
            if self._copy[path].has_changed():
                self._copy[path].node.replace(self._copy[path].content)

    def changes(self) -> Changes:
        """Return what has changed since."""
        changed = [path for path, saved in self._copy.items() if saved.has_changed()]
        # `parametrize.cached()` ends with a new cache. There is one for all threads.
        has_cached = parametrize._cache is not self._parametrize_cache
        if not changed:
            return Changes((), SharedObjects([]) if has_cached else None, [], [])
        hosts, tensors = _Hosts(self._pairs), []
        for path, content in self._before.items():
            if path in self._copy:
                tensors += hosts.add_parts(self._copy[path], content)
                hosts.add(self._copy[path].node.owner, self._host[path].owner)
        seen = [
            (self._host.get(path, self._copy[path].node), hosts.content(self._copy[path].node.content()))
            for path in changed
            if path in self._host or path in self._shared
        ]
        shared = [(self._copy[path].node, self._copy[path].content) for path in changed if path in self._shared]
        copied = tuple(path for path in changed if path not in self._shared)
        return Changes(copied, SharedObjects(shared) if shared or has_cached else None, seen, tensors)


class _Hosts:
    """The host's objects, by those of the copy that stand for them."""

    def __init__(self, pairs: Sequence[Tuple[Any, Any]]) -> None:
        self._hosts: Dict[int, Any] = {}
        self._copies: List[Any] = []  # keeps their ids from being used again
        for copy, host in pairs:
            self.add(copy, host)

    def add(self, copy: Any, host: Any) -> None:
        self._copies.append(copy)
        self._hosts[id(copy)] = host

    def add_parts(self, copy: _Saved, host: Content) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """Pair the values in an object; return the tensors of the host with their copies that were changed in place."""
        changed = []
        originals = dict(host.parts())
        for index, (key, value) in enumerate(copy.content.parts()):
            original = originals.get(key, value)
            if original is not value:
                self.add(value, original)
                if copy.has_changed_tensor(index) and _is_tensor(original):
                    changed.append((original, value))
        return changed

    def content(self, content: Content) -> Content:
        """Return a content with the host's objects."""
        return Content(content.keys, [self.of(value) for value in content.values])

    def of(self, value: Any) -> Any:
        """Return the host's object; of an object that the forward has made, that with the host's objects in it.

        Tensors are without their graph, which belongs to the trace.
        """
        if id(value) in self._hosts:
            return self._hosts[id(value)]
        self.add(value, value)
        if _is_tensor(value) and value.grad_fn is not None:
            self.add(value, value.detach())
        elif type(value) is list:
            value[:] = map(self.of, value)
        elif type(value) is dict:
            value.update({key: self.of(item) for key, item in value.items()})
        elif type(value) is tuple:
            self.add(value, tuple(map(self.of, value)))
        return self._hosts[id(value)]


class SharedObjects:
    """Objects that all replicas share with the program, and that the forward changes: a context for each forward.

    Args:
        objects: the objects with their contents before the trace.
    """

    def __init__(self, objects: List[Tuple[Node, Content]]) -> None:
        self._objects = objects
        self._visible: List[Content] = []

    def __enter__(self) -> None:
        _lock.acquire()
        self._visible = [node.content() for node, _ in self._objects]
        self._write([content for _, content in self._objects])
        _active.shared = self

    def __exit__(self, *exc_info: Any) -> None:
        _active.shared = None
        self._write(self._visible)
        _lock.release()

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Context in which the objects are as the program sees them."""
        on_device = [node.content() for node, _ in self._objects]
        self._write(self._visible)
        try:
            yield
        finally:
            self._visible = [node.content() for node, _ in self._objects]
            self._write(on_device)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which other replicas may run their forwards."""
        on_device = [node.content() for node, _ in self._objects]
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            self._write(on_device)

    def _write(self, contents: List[Content]) -> None:
        for (node, _), content in zip(self._objects, contents):
            node.replace(content)


def visible_objects() -> ContextManager[None]:
    """Context for a layer on the host, in a forward: the program sees what it does to Python objects."""
    shared: Optional[SharedObjects] = getattr(_active, "shared", None)
    return contextlib.nullcontext() if shared is None else shared.on_host()


def suspended_forward() -> ContextManager[None]:
    """Context for a wait, in a forward, for the forwards of other replicas."""
    shared: Optional[SharedObjects] = getattr(_active, "shared", None)
    return contextlib.nullcontext() if shared is None else shared.suspended()


class ReplicaObjects:
    """The objects of one replica that the forward changes; `restore` undoes what the last forward has changed.

    Attributes:
        shared: the context of a forward.
    """

    def __init__(self, module: torch.nn.Module, changes: Changes) -> None:
        self.shared: ContextManager[Any] = changes.shared or contextlib.nullcontext()
        found = nodes(module) if changes.copied else {}
        self._saved = [_Saved(found[path], stores_tensors=True) for path in changes.copied if path in found]

    def restore(self) -> None:
        """Restore the objects."""
        for saved in self._saved:
            saved.restore()


class _Saved:
    """The content of an object at construction time, and with `stores_tensors` the values of the tensors in it."""

    def __init__(self, node: Node, stores_tensors: bool = False) -> None:
        self.node, self.content = node, node.content()
        values = self.content.values
        tensors = ((index, value) for index, value in enumerate(values) if _is_tensor(value))
        self._versions = {index: tensor._version for index, tensor in tensors if not tensor.is_inference()}
        self._values = {index: values[index].detach().clone() for index in self._versions if stores_tensors}

    def has_changed_tensor(self, index: int) -> bool:
        """Return whether value number `index` is a tensor that was changed in place."""
        return index in self._versions and self.content.values[index]._version != self._versions[index]

    def has_changed(self) -> bool:
        """Return whether the content has changed."""
        return any(map(self.has_changed_tensor, self._versions)) or not self.content.equals(self.node.content())

    def restore(self) -> None:
        """Restore the content."""
        values = self.content.values
        for index, version in self._versions.items():
            if values[index]._version != version:  # a new tensor, as the changed one may be an output
                with torch.inference_mode(False):
                    values[index] = self._values[index].clone()
                self._versions[index] = values[index]._version
        self.node.replace(self.content)


def _is_tensor(value: Any) -> bool:
    # By its type: `isinstance` asks the object, and a weak proxy of an object that is gone raises ReferenceError.
    return issubclass(type(value), torch.Tensor)


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
