"""What a forward does to Python objects: seen once, on the user's objects, as PopTorch traces a model once.

The compilation traces a copy of the model, and then gives what that forward has changed to the user's objects. All
later forwards begin with the objects as they were before the trace, and their changes are discarded: the copies of a
replica are restored, and what the replicas share with the program (variables of modules, classes and closures, objects
that cannot be copied) is exchanged for the time of a forward.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ContextManager, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch

from poptorch.python_objects import Content, Node, ObjectPath, nodes

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

    def undo(self) -> None:
        """Undo the changes of the objects that the copy shares with the program."""
        for path in self._shared:
            if self._copy[path].has_changed():
                self._copy[path].node.replace(self._copy[path].content)

    def changes(self) -> Changes:
        """Return what has changed since."""
        changed = [path for path, saved in self._copy.items() if saved.has_changed()]
        if not changed:
            return Changes((), None, [], [])
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
        return Changes(copied, SharedObjects(shared) if shared else None, seen, tensors)


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


@contextlib.contextmanager
def visible_objects() -> Iterator[None]:
    """Context for a layer on the host, in a forward: the program sees what it does to Python objects."""
    shared: Optional[SharedObjects] = getattr(_active, "shared", None)
    with shared.on_host() if shared is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def suspended_forward() -> Iterator[None]:
    """Context for a wait, in a forward, for the forwards of other replicas."""
    shared: Optional[SharedObjects] = getattr(_active, "shared", None)
    with shared.suspended() if shared is not None else contextlib.nullcontext():
        yield


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
        self._versions = {
            index: value._version for index, value in enumerate(self.content.values) if _has_version(value)
        }
        values = self.content.values
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


def _has_version(value: Any) -> bool:
    return _is_tensor(value) and not value.is_inference()


def _is_tensor(value: Any) -> bool:
    # By its type: `isinstance` asks the object, and a weak proxy of an object that is gone raises ReferenceError.
    return issubclass(type(value), torch.Tensor)
