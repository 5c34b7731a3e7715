"""The graph of a micro-batch: recorded while PopTorch's front end runs the model, and replayed on the CPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_LOSSES = frozenset(("identity_loss", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "l1_loss", "huber_loss"))


class Value:
    """The place of a tensor in the arguments of a node; no tuple, whose items torch's pytree would visit."""

    def __init__(self, number: int) -> None:
        self.number = number


class IpuTensor(torch.Tensor):
    """A tensor without values on the device "ipu", as the dispatcher of PopTorch has them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: torch.Tensor, number: int) -> IpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, meta.size(), strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device="ipu:0",
        )  # fmt: skip
        tensor.meta, tensor.number = meta, number
        return tensor

    # torch's own methods of these names switch to the device first, which needs kernels.
    def contiguous(self, **_: Any) -> torch.Tensor:  # type: ignore[override]
        """As torch."""
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def __getitem__(self, index: Any) -> Any:
        """As torch, but without mixed slices and tensors."""
        items = index if isinstance(index, tuple) else (index,)
        if any(isinstance(item, (torch.Tensor, list)) for item in items):
            return torch.ops.aten.index.Tensor(self, list(items))
        result, dim = self, 0
        for place, item in enumerate(items):
            if item is Ellipsis:
                dim = result.dim() - sum(each is not None for each in items[place + 1 :])
            elif item is None:
                result, dim = result.unsqueeze(dim), dim + 1
            elif isinstance(item, slice):
                result, dim = torch.ops.aten.slice.Tensor(result, dim, item.start, item.stop, item.step or 1), dim + 1
            else:
                result = result.select(dim, item)
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        """As torch, for the same indices."""
        self[index].copy_(value)

    def __repr__(self, **_: Any) -> str:
        return f"IpuTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].meta, args[0].number)
        raise RuntimeError(f"{func} on a tensor of the IPU outside of a trace")


class Node(NamedTuple):
    """One operator: what it was called with, and its results: numbers, dtypes."""

    func: Any
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    results: Tuple[Tuple[int, torch.dtype], ...]


class Graph:
    """What the trace has recorded.

    Attributes:
        names: of the value of each parameter and buffer.
        trainable: the names of the parameters with a gradient.
        named_floats: tensors without values like the parameters and buffers that the device changes.
        named_constants: the other buffers, which are constants of the graph.
        groups: the values of the parameters of each group of the optimizer.
        ipus: the IPUs in the order in which blocks begin.
    """

    def __init__(self, inputs: List[torch.Tensor]) -> None:
        self._inputs = inputs
        self._input_values: List[Optional[int]] = [None] * len(inputs)
        self.nodes: List[Node] = []
        self.constants: Dict[int, torch.Tensor] = {}
        self.names: Dict[int, str] = {}
        self.trainable: Set[str] = set()
        self.named_floats: Dict[str, torch.Tensor] = {}
        self.named_constants: Dict[str, torch.Tensor] = {}
        self.outputs: List[int] = []
        self.groups: Dict[int, List[int]] = {}
        self.ipus = [0]
        self.is_moving_parameters = self.is_moving_outputs = False
        self._count = 0

    def new(self, meta: torch.Tensor) -> IpuTensor:
        """A tensor for a new value."""
        self._count += 1
        return IpuTensor(meta, self._count)

    def from_host(self, tensor: torch.Tensor) -> IpuTensor:
        """The IPU's copy of an input, a parameter, or a constant."""
        value = self.new(tensor.detach().to("meta"))
        place = next((place for place, each in enumerate(self._inputs) if each is tensor), None)
        if place is not None and not self.is_moving_parameters:
            self._input_values[place] = value.number
        else:
            self.constants[value.number] = tensor.detach().clone()
        return value

    def add_named(self, name: str, tensor: IpuTensor) -> None:
        """Names the value of a parameter or buffer."""
        self.names[tensor.number] = name
        if tensor.requires_grad:
            self.trainable.add(name)
        if tensor.is_floating_point():
            self.named_floats[name] = tensor.meta
        else:
            self.named_constants[name] = self.constants[tensor.number]

    def forward_stages(self) -> int:
        """The number of pipeline stages of the forward pass."""
        return 1 + sum(before != after for before, after in zip(self.ipus, self.ipus[1:]))

    def operators(self) -> Dict[str, int]:
        """The number of operators of PopTorch by their names, without the loss."""
        names = (node.func._schema.name.partition("::") for node in self.nodes)
        return dict(Counter(name for namespace, _, name in names if namespace == "poptorch" and name not in _LOSSES))

    def finish(self) -> None:
        """Removes nodes that only rename parameters; call it when the trace has ended."""
        self.nodes = [node for node in self.nodes if not self._is_rename(node)]
        self.constants = {number: value for number, value in self.constants.items() if number not in self.names}

    def _is_rename(self, node: Node) -> bool:
        operands = {each.number for each in tree_flatten((node.args, node.kwargs))[0] if _is_value(each)}
        return all(number in self.names and number not in operands for number, _ in node.results)

    def loss(self) -> int:
        """The value of the final loss. ValueError if there is none, or several that are independent."""
        losses = [node for node in self.nodes if node.func._schema.name.split("::")[1] in _LOSSES]
        if not losses:
            raise ValueError("Couldn't find a loss in graph!")
        final = losses[-1].results[0][0]
        needed: Set[int] = {final}
        for node in reversed(self.nodes):
            if any(number in needed for number, _ in node.results):
                needed.update(each.number for each in tree_flatten((node.args, node.kwargs))[0] if _is_value(each))
        if any(node.results[0][0] not in needed for node in losses):
            raise ValueError("Multiple independent losses found in graph")
        return final

    def run(self, named: Dict[str, torch.Tensor], inputs: List[torch.Tensor]) -> Dict[int, torch.Tensor]:
        """All values for the tensors of a replica and the inputs of a micro-batch; buffers change in place."""
        values = {number: named[name] for number, name in self.names.items()}
        values.update({number: tensor.clone() for number, tensor in self.constants.items()})
        values.update({number: tensor for number, tensor in zip(self._input_values, inputs) if number is not None})
        for node in self.nodes:
            args, kwargs = tree_map(
                lambda each: values[each.number] if _is_value(each) else each, (node.args, node.kwargs)
            )
            results, _ = tree_flatten(_call(node, args, kwargs))
            tensors = [each for each in results if isinstance(each, torch.Tensor)]
            values.update({number: tensor for (number, _), tensor in zip(node.results, tensors)})
        return values


def _is_value(item: Any) -> bool:
    return isinstance(item, Value)


def _identity_loss(tensor: torch.Tensor, reduction: int) -> torch.Tensor:
    return (torch.sum, torch.mean, torch.clone)[reduction](tensor)


def _internal_cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(torch.float16 if dtype == "FLOAT16" else torch.float32)


def value_of_operator(name: str) -> Any:
    """The function of an operator of PopTorch; None if it has no value."""
    if name in ("nop", "recomputation_checkpoint", "set_available_memory") or name.startswith("set_overlap_for_"):
        return lambda tensor, *_: tensor.clone()
    return {"identity_loss": _identity_loss, "internal_cast": _internal_cast}.get(name)


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    """Calls an operator; with half operands it runs in float32, as torch lacks kernels, and its result is rounded."""
    schema = node.func._schema
    namespace, _, name = schema.name.partition("::")
    function = value_of_operator(name) if namespace == "poptorch" else node.func
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    is_view = not writes and any(each.alias_info is not None for each in schema.returns)
    if is_view or not any(each.dtype == torch.float16 for each in tensors):
        return function(*args, **kwargs)
    if writes:
        with contextlib.suppress(RuntimeError):
            return function(*args, **kwargs)
        result = function(*tree_map(_float, args), **tree_map(_float, kwargs))
        return args[0].copy_(result)
    floats = tree_map(_float, args)
    result = function(*floats, **tree_map(_float, kwargs))
    if name == "native_batch_norm":  # changes its statistics, though its schema does not say so
        for own, changed in zip(args[3:5], floats[3:5]):
            if changed is not own:
                own.copy_(changed)
    dtypes = iter([dtype for _, dtype in node.results])
    return tree_map(lambda each: each.to(next(dtypes)) if isinstance(each, torch.Tensor) else each, result)


def _zeros(item: Any) -> Any:
    return torch.zeros(item.shape, dtype=item.dtype, device="cpu") if isinstance(item, IpuTensor) else item


def _float(item: Any) -> Any:
    return item.float() if isinstance(item, torch.Tensor) and item.dtype == torch.float16 else item


class Recorder(TorchDispatchMode):
    """Records every operator on tensors of the IPU while it is active."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "poptorch" and value_of_operator(name) is None:
            self._note(name, args)
            return None
        flat = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        has_ipu = any(isinstance(each, IpuTensor) for each in flat)
        if not has_ipu and (device is None or device.type != "ipu"):
            return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            if not has_ipu:
                moved = self.graph.from_host(args[0])
                kwargs.pop("device")
                dtype = kwargs.get("dtype")
                return moved if dtype in (None, moved.dtype) else self._record(func, (moved,), {"dtype": dtype})
            if device is not None and device.type == "cpu":
                return self._to_host(args[0])
        return self._record(func, args, kwargs)

    def _note(self, name: str, args: Any) -> None:
        if name == "begin_ipu_block":
            self.graph.ipus.append(args[2])
        elif name == "optimizer_group":
            self.graph.groups[args[0]] = [each.number for each in args[1]]
        elif name not in ("end_ipu_block", "push_name_scope", "pop_name_scope", "set_attribute", "clear_attribute"):
            raise NotImplementedError(f"this core has no operator poptorch::{name}")

    def _to_host(self, tensor: IpuTensor) -> torch.Tensor:
        if not self.graph.is_moving_outputs:
            raise RuntimeError("a tensor cannot be moved from the IPU to the CPU in forward")
        self.graph.outputs.append(tensor.number)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        lift = lambda each: (  # noqa: E731
            self.graph.from_host(each) if isinstance(each, torch.Tensor) and not isinstance(each, IpuTensor) else each
        )
        args, kwargs = tree_map(lift, (args, kwargs))
        known = {id(each.meta): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, IpuTensor)}
        to_meta = lambda each: each.meta if isinstance(each, IpuTensor) else each  # noqa: E731
        meta_kwargs = tree_map(to_meta, kwargs)
        if kwargs.get("device") is not None:
            meta_kwargs["device"], kwargs["device"] = torch.device("meta"), torch.device("cpu")
        namespace, _, name = func._schema.name.partition("::")
        function = value_of_operator(name) if namespace == "poptorch" else func
        try:
            found = function(*tree_map(to_meta, args), **meta_kwargs)
        except NotImplementedError:  # torch computes no shapes for a few operators
            with_values = function(*tree_map(_zeros, args), **tree_map(_zeros, kwargs))
            found = tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, with_values)
        results: List[IpuTensor] = []

        def wrap(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            results.append(known[id(each)] if id(each) in known else self.graph.new(each))
            return results[-1]

        wrapped = tree_map(wrap, found)
        to_value = lambda each: Value(each.number) if isinstance(each, IpuTensor) else each  # noqa: E731
        numbers = tuple((each.number, each.dtype) for each in results)
        self.graph.nodes.append(Node(func, tree_map(to_value, tuple(args)), tree_map(to_value, kwargs), numbers))
        return wrapped
