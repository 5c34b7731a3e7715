"""The device's copies of the user's module: shared weights, buffers of each replica, and their exchange with the host.

All local replicas share one copy of the weights, as they are equal. A parameter of which groups of replicas have their
own values is one tensor with the values of all groups, and the parameter of a replica is a view into it.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections import OrderedDict
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Tuple, TypeVar

import torch

from poptorch.device_mode import DEVICE_DTYPE
from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import Error

_Class = TypeVar("_Class", bound=type)

# What copying an arbitrary Python object may raise: such attributes are shared instead.
_UNCOPYABLE = (TypeError, RuntimeError, AttributeError, ValueError, ReferenceError, pickle.PickleError, copy.Error)
_TENSORS = ("_parameters", "_buffers")


class ReplicaMemory(NamedTuple):
    """One replica: its module and, by name, its parameters, floating point buffers and constant buffers.

    `updated` are the parameters as the optimizer updates them: float32 copies of those in half, the others themselves.
    `host_module` is the module of which `module` is a copy.
    `originals` holds by the `id` of each of the host's tensors that tensor, which keeps its `id` from being reused, and
    its copy.
    """

    module: torch.nn.Module
    host_module: torch.nn.Module
    parameters: Dict[str, torch.nn.Parameter]
    buffers: Dict[str, torch.Tensor]
    constants: Dict[str, torch.Tensor]
    updated: Dict[str, torch.nn.Parameter]
    originals: Dict[int, Tuple[torch.Tensor, torch.Tensor]]

    @property
    def tensors(self) -> Dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return {**self.parameters, **self.buffers, **self.constants}


class DeviceMemory:
    """Parameters and buffers of all local replicas.

    Args:
        model: the host's module. Every exchange looks up its tensors by name, as a program may replace them.
        replicas: the number of local replicas.
        groups: the parameters of which groups of replicas have their own values.
        first_replica: the position of the first local replica among those of all processes.
        user_model: the module that the program holds, of which `model` may be a shallow copy.
        channels_last: the names of the 4-D weights to store in the memory format `torch.channels_last`.

    Attributes:
        parameters: the weights, as the parameters of replica 0; of a grouped parameter the values of all groups.
        channels_last: the names of the weights in that memory format.
        updated: the same as the optimizer updates them: those in half as float32 copies.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        replicas: int,
        user_model: torch.nn.Module,
        groups: Mapping[str, ReplicaGroups],
        first_replica: int,
        channels_last: FrozenSet[str],
    ) -> None:
        self._model, self._user_model = model, user_model
        self.channels_last, self.groups = channels_last, groups
        self._first_replica = first_replica
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._weights = {
                name: _device_copy(self.groups[name].to_device(tensor) if name in self.groups else tensor)
                for name, tensor in model.named_parameters()
            }
            for name in channels_last:
                self._weights[name] = self._weights[name].contiguous(memory_format=torch.channels_last)
            half = {name: weight for name, weight in self._weights.items() if weight.dtype == torch.half}
            self._copies = {name: weight.float() for name, weight in half.items()}
            self.replicas = [self._replica(first_replica + index) for index in range(replicas)]
        self.parameters = {**self.replicas[0].parameters, **self._of_groups(self._weights)}
        of_groups = {name: self.parameters[name] for name in self.groups}
        self.updated = {**self.replicas[0].updated, **of_groups, **self._of_groups(self._copies)}

    def _of_groups(self, weights: Mapping[str, torch.Tensor]) -> Dict[str, torch.nn.Parameter]:
        """Return those of the weights of which groups have their own values, with the values of all groups."""
        own = self.replicas[0].parameters
        return {
            name: torch.nn.Parameter(weights[name], requires_grad=own[name].requires_grad)
            for name in self.groups
            if name in weights
        }

    @property
    def half_weights(self) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """The shared weights in half, each with its float32 copy."""
        return [(self._weights[name], copy) for name, copy in self._copies.items()]

    def scratch(self) -> ReplicaMemory:
        """Return another replica with the same weights, on which a forward can be traced without side effects."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return self._replica(self._first_replica)

    def upload(self) -> None:
        """Copy the host's weights and floating point buffers to every replica; other buffers are constants."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for name, tensor in self._model.named_parameters():
                self.parameters[name].copy_(self.groups[name].to_device(tensor) if name in self.groups else tensor)
                self.updated[name].copy_(self.parameters[name])
            for name, buffer in self._model.named_buffers():
                for replica in self.replicas:
                    if name in replica.buffers:
                        replica.buffers[name].copy_(buffer)

    def check_buffers(self, names: Sequence[str]) -> None:
        """Raise Error if a name is not that of a buffer."""
        host = dict(self._model.named_buffers())
        unknown = [name for name in names if name not in host]
        if unknown:
            raise Error(f"The model has no buffer {unknown[0]!r}: there are {', '.join(sorted(host)) or 'none'}")

    def upload_buffers(self, names: Sequence[str]) -> None:
        """Copy these buffers of the host to every replica, constants too. Raises Error for an unknown name."""
        self.check_buffers(names)
        host = dict(self._model.named_buffers())
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for replica in self.replicas:
                for name in names:
                    buffer = replica.buffers[name] if name in replica.buffers else replica.constants[name]
                    buffer.copy_(host[name])

    def download(self) -> None:
        """Copy the weights and the buffers of replica 0 to the host.

        Replica 0 is inferred: the SDK's documentation does not state whose buffers are read.
        """
        values: Dict[str, torch.Tensor] = {**self.parameters, **self.replicas[0].buffers}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for tensors in (self._model.named_parameters(), self._model.named_buffers()):
                for name, tensor in tensors:
                    if name in values:
                        tensor.copy_(self.groups[name].to_host(values[name]) if name in self.groups else values[name])

    def _replica(self, replica: int) -> ReplicaMemory:
        host = dict(self._model.named_parameters())
        weights, copies = dict(self._weights), dict(self._copies)
        for values in (weights, copies):
            own = {name: groups.group_of[replica] for name, groups in self.groups.items() if name in values}
            values.update({name: values[name][group] for name, group in own.items()})
        parameters = {
            name: torch.nn.Parameter(weight, requires_grad=host[name].requires_grad) for name, weight in weights.items()
        }
        updated = {
            name: torch.nn.Parameter(copies[name], requires_grad=parameter.requires_grad)
            if name in copies
            else parameter
            for name, parameter in parameters.items()
        }
        host_buffers = dict(self._model.named_buffers())
        buffers = {name: _device_copy(buffer) for name, buffer in host_buffers.items()}
        pairs: List[Tuple[torch.Tensor, torch.Tensor]] = [(host[name], parameters[name]) for name in parameters]
        pairs += [(host_buffers[name], buffers[name]) for name in buffers]
        floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        return ReplicaMemory(
            module=_copy_module(self._model, {id(tensor): copy for tensor, copy in pairs}, self._user_model),
            host_module=self._model,
            parameters=parameters,
            buffers=floating,
            constants={name: buffer for name, buffer in buffers.items() if name not in floating},
            updated=updated,
            originals={id(pair[0]): pair for pair in pairs},
        )


def _device_copy(tensor: torch.Tensor) -> torch.Tensor:
    # Integer buffers are constants that no kernel writes, so they keep their dtype.
    dtype = DEVICE_DTYPE.get(tensor.dtype, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


def original_class(kind: _Class) -> _Class:
    """Return the class that wrapping a model replaced by a subclass; `kind` itself if it was not wrapped."""
    return getattr(kind, "_poptorch_original", kind)


def _copy_module(
    root: torch.nn.Module, tensors: Dict[int, torch.Tensor], user_model: torch.nn.Module
) -> torch.nn.Module:
    """Return a copy of `root` in which the tensor with id i is replaced by `tensors[i]`.

    Submodules are copied, and other attributes where Python can copy them; the rest is shared. Methods, closures and
    hooks that refer to a copied object, or to `user_model`, refer to the copy.
    """
    memo: Dict[int, Any] = dict(tensors)
    modules = list(root.modules())
    for module in modules:
        memo[id(module)] = object.__new__(original_class(type(module)))
    memo[id(user_model)] = memo[id(root)]
    memo.update({id(copied): copied for copied in memo.values()})  # a copy is not copied again
    for module in modules:
        attributes = {name: _copied(name, value, memo) for name, value in vars(module).items()}
        vars(memo[id(module)]).update(attributes)
    copied: torch.nn.Module = memo[id(root)]
    return copied


def _copied(name: str, value: Any, memo: Dict[int, Any]) -> Any:
    if name in _TENSORS or name == "_modules":
        return type(value)((key, memo.get(id(item), item)) for key, item in value.items())
    if name.endswith("_hooks") and type(value) in (dict, OrderedDict):  # the user's own may be anything
        return type(value)((key, _rebound(hook, memo)) for key, hook in value.items())
    value = _rebound(value, memo)
    try:
        return copy.deepcopy(value, memo)
    except _UNCOPYABLE:
        return value


def _rebound(value: Any, memo: Dict[int, Any]) -> Any:
    """Rebind a method, a function or a container of these to the copies of the objects that it refers to.

    Any other value is returned as it is. `copy.deepcopy` does not copy functions.
    """
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)  # not by isinstance: a weak proxy of an object that is gone has no class
    if kind is types.MethodType:
        function, owner = _rebound(value.__func__, memo), _rebound(value.__self__, memo)
        is_same = function is value.__func__ and owner is value.__self__
        return value if is_same else types.MethodType(function, owner)
    if kind is types.FunctionType and value.__closure__:
        return _rebound_function(value, memo)
    if issubclass(kind, functools.partial):
        return _rebound_partial(value, memo)
    if kind in (list, tuple):
        items = [_rebound(item, memo) for item in value]
        return value if all(new is old for new, old in zip(items, value)) else kind(items)
    if kind is dict:
        rebound = {key: _rebound(item, memo) for key, item in value.items()}
        return value if all(rebound[key] is item for key, item in value.items()) else rebound
    return value


def _rebound_function(function: types.FunctionType, memo: Dict[int, Any]) -> Any:
    memo[id(function)] = function  # ends the recursion of a function that refers to itself
    cells = [_rebound_cell(cell, memo) for cell in function.__closure__ or ()]
    if all(new is old for new, old in zip(cells, function.__closure__ or ())):
        return function
    rebound = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    vars(rebound).update(vars(function))
    memo[id(function)] = rebound
    return rebound


def _rebound_cell(cell: Any, memo: Dict[int, Any]) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    rebound = _rebound(content, memo)
    return cell if rebound is content else types.CellType(rebound)


def _rebound_partial(value: Any, memo: Dict[int, Any]) -> Any:
    function, args = _rebound(value.func, memo), _rebound(value.args, memo)
    return functools.partial(function, *args, **_rebound(value.keywords, memo))


Groupings = Mapping[str, Tuple[CommGroupType, int, VariableRetrievalMode]]  # by parameter


class ReplicaGroups(NamedTuple):
    """The groups of one parameter.

    On the device its values are one tensor of shape [groups, *shape]. On the host dimension 0 is the number of groups,
    or with `VariableRetrievalMode.AllReplicas` the number of replicas.

    Attributes:
        group_of: the group of each replica of all processes.
        is_per_replica: whether the host has a value of each replica.
    """

    group_of: Sequence[int]
    is_per_replica: bool

    @property
    def number(self) -> int:
        """Number of groups."""
        return max(self.group_of) + 1

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Return the values of the groups; of a value for each replica, those of the first replica of each group."""
        first = [list(self.group_of).index(group) for group in range(self.number)]
        return host[first] if self.is_per_replica else host

    def to_host(self, device: torch.Tensor) -> torch.Tensor:
        """Return the values as the host has them."""
        return device[list(self.group_of)] if self.is_per_replica else device


def groups_of(groupings: Groupings, parameters: Mapping[str, torch.Tensor], replicas: int) -> Dict[str, ReplicaGroups]:
    """Return the groups of the parameters with a grouping. `CommGroupType.All` has no effect.

    Args:
        replicas: the number of replicas of all processes.

    Raises:
        Error: a parameter is a scalar, its first dimension does not fit, or the size does not divide the replicas.
    """
    found = {}
    for name, (kind, shards, mode) in groupings.items():
        if kind == CommGroupType.All:
            continue
        groups = ReplicaGroups(_group_of(kind, shards, replicas), mode == VariableRetrievalMode.AllReplicas)
        shape = list(parameters[name].shape)
        if not shape:
            raise Error("Scalars cannot be passed as per-replica weight tensor values")
        expected = replicas if groups.is_per_replica else groups.number
        if shape[0] != expected:
            raise Error(
                f"replicaGrouping: dimension 0 of {name!r} of shape {shape} must be {expected}, one value for each"
            )
        found[name] = groups
    return found


def _group_of(kind: CommGroupType, shards: int, replicas: int) -> List[int]:
    size = 1 if kind == CommGroupType.NoGrouping else shards
    if size < 1 or replicas % size:
        raise Error(f"replicaGrouping: groups of {size} replicas do not divide the {replicas} replicas")
    if kind == CommGroupType.Orthogonal:
        return [replica % (replicas // size) for replica in range(replicas)]
    return [replica // size for replica in range(replicas)]


def stacked(gradient: Any, groups: ReplicaGroups, replica: int) -> Any:
    """Return the gradient of one replica as a gradient of all groups, which is zero for the others; None stays None."""
    if gradient is None:
        return None
    result = torch.zeros((groups.number, *gradient.shape), dtype=gradient.dtype)
    result[groups.group_of[replica]] = gradient
    return result
