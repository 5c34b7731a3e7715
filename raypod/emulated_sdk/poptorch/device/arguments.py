"""The arguments of a wrapped model: fixed by the compilation, and checked in every later call."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Set, Tuple

import torch

from poptorch.device.combined_batch import BatchLayout
from poptorch.device_mode import API_DTYPE
from poptorch.errors import Error
from poptorch.pytree import TreeSpec, flatten


class ArgumentSpec(NamedTuple):
    """The arguments that a model is compiled for.

    Attributes:
        tree: how the arguments nest, and their constants.
        tensors: the dtype at the API and the shape of each tensor.
        names: the name of each tensor: its parameter of `forward`, with the position if that holds several tensors.
    """

    tree: TreeSpec
    tensors: List[Tuple[torch.dtype, torch.Size]]
    names: List[str]


class Arguments:
    """Binds calls to the signature of `forward` and checks them against the compiled ones.

    Positional, keyword and default arguments are equivalent. Values that are not tensors are compile-time constants.

    Args:
        forward: the model's `forward`.
        spec: the arguments to compile for.
        example_inputs: the tensors of one micro-batch, on which the model is traced.
    """

    def __init__(self, forward: Callable[..., Any], spec: ArgumentSpec, example_inputs: List[torch.Tensor]) -> None:
        self.spec = spec
        self.example_inputs = example_inputs
        self._signature = inspect.signature(forward)
        self._constants = spec.tree.constants()
        self._warned: Set[str] = set()

    @classmethod
    def of_call(
        cls, forward: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], layout: BatchLayout
    ) -> Arguments:
        """Return the arguments of the call to compile for. Raises AssertionError if the batch does not divide."""
        bound = _bind(inspect.signature(forward), args, kwargs)
        tensors, tree = flatten((bound.args, bound.kwargs))
        layout.check(tensors)
        spec = ArgumentSpec(tree, [_describe(tensor) for tensor in tensors], _names(bound))
        return cls(forward, spec, [tensor.detach().clone() for tensor in layout.select(tensors, 0)])

    def tensors(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[torch.Tensor]:
        """Return the tensors of one call, in order. Raises Error if structure, dtypes or shapes are not as compiled."""
        bound = _bind(self._signature, args, kwargs)
        tensors, tree = flatten((bound.args, bound.kwargs))
        if tree != self.spec.tree:
            raise Error(f"The arguments have the structure {tree}, but the model was compiled for {self.spec.tree}")
        for index, (tensor, compiled) in enumerate(zip(tensors, self.spec.tensors)):
            if _describe(tensor) != compiled:
                raise Error(_mismatch(index, tensor, compiled))
        self._check_constants(tree.constants())
        if any(tensor.requires_grad for tensor in tensors):
            self._warn("inputs that require a gradient are detached: outputs of the device cannot be differentiated")
        return tensors

    def unflatten(self, tensors: List[torch.Tensor]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Return the arguments of `forward` with these tensors and the compile-time constants."""
        args, kwargs = self.spec.tree.unflatten(tensors)
        return args, kwargs

    def _check_constants(self, constants: List[Any]) -> None:
        for compiled, value in zip(self._constants, constants):
            if not _is_same(compiled, value):
                self._warn(f"a constant argument was compiled as {compiled!r}; the value {value!r} has no effect")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"poptorch: {message}", stacklevel=5)


def _bind(signature: inspect.Signature, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> inspect.BoundArguments:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def _names(bound: inspect.BoundArguments) -> List[str]:
    names: List[str] = []
    for name, value in bound.arguments.items():
        tensors = len(flatten(value)[0])
        names += [name] if tensors == 1 else [f"{name}/{index}" for index in range(tensors)]
    return names


def _is_same(compiled: Any, value: Any) -> bool:
    """Return whether two constants are equal; constants that cannot be compared count as equal."""
    if compiled is value:
        return True
    try:
        equal = compiled == value
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare item by item
    except (TypeError, ValueError, RuntimeError):
        return True


def _describe(tensor: torch.Tensor) -> Tuple[torch.dtype, torch.Size]:
    return API_DTYPE.get(tensor.dtype, tensor.dtype), tensor.shape


def _mismatch(index: int, tensor: torch.Tensor, compiled: Tuple[torch.dtype, torch.Size]) -> str:
    dtype, shape = compiled
    given = API_DTYPE.get(tensor.dtype, tensor.dtype)
    return (
        f"Tensor {index} of the arguments is {given} {list(tensor.shape)}, but the model was compiled for {dtype} "
        f"{list(shape)}. Shapes are fixed by the first call: drop the last short batch, or wrap the model again"
    )


def synthetic_inputs(spec: ArgumentSpec, layout: BatchLayout) -> List[torch.Tensor]:
    """Return the micro-batch that `options.enableSyntheticData` uses for all inputs; the same values in every run.

    Floating point tensors are normally distributed, others are zero: valid labels and indices.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for dtype, shape in spec.tensors:
        micro_batch = (shape[0] // layout.micro_batches, *shape[1:]) if shape else ()
        if dtype.is_floating_point:
            inputs.append(torch.randn(micro_batch, generator=generator).to(dtype))
        else:
            inputs.append(torch.zeros(micro_batch, dtype=dtype))
    return inputs
