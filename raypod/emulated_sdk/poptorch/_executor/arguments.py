"""The arguments of a wrapped model: what is fixed by compiling, and the check of every later call (contract 2.2)."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch

from poptorch._device.dtypes import API_DTYPE
from poptorch._errors import Error
from poptorch._executor.structure import Structure, flatten


class Compiled(NamedTuple):
    """How the arguments nest; of each tensor dtype at the API and shape, and name: the parameter's, if several with
    its position in it.
    """

    structure: Structure
    described: List[Tuple[torch.dtype, torch.Size]]
    names: List[str]


class Arguments:
    """Structure, shapes and dtypes of the arguments at compile time.

    Positional, keyword and default arguments are told apart no more: they are bound to the signature of `forward`.
    Values that are no tensors are compile-time constants. Made of what an earlier compilation found out, or by
    `of_call`.
    """

    def __init__(self, forward: Callable[..., Any], compiled: Optional[Compiled] = None) -> None:
        self._signature = inspect.signature(forward)
        self._warned: Set[str] = set()
        self._first_tensors: List[torch.Tensor] = []
        if compiled is not None:
            self._fix(compiled)

    @classmethod
    def of_call(cls, forward: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Arguments:
        """The arguments of the call to compile for."""
        arguments = cls(forward)
        bound = arguments._bind(args, kwargs)
        tensors, structure = flatten((bound.args, bound.kwargs))
        arguments._fix(Compiled(structure, [_describe(tensor) for tensor in tensors], _names(bound)))
        arguments._first_tensors = tensors
        return arguments

    def _fix(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self._structure, self._described = compiled.structure, compiled.described
        self._constants = self._structure.constants()

    def take_first_tensors(self) -> List[torch.Tensor]:
        """The tensors of the compiling call, in order; not held any longer afterwards."""
        tensors, self._first_tensors = self._first_tensors, []
        return tensors

    def tensors(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[torch.Tensor]:
        """The tensors of one call, in order. Error unless structure, dtypes and shapes are those of compilation."""
        bound = self._bind(args, kwargs)
        tensors, structure = flatten((bound.args, bound.kwargs))
        if structure != self._structure:
            raise Error(f"Arguments nest as {structure}, but the model was compiled for {self._structure}")
        for index, (tensor, compiled) in enumerate(zip(tensors, self._described)):
            if _describe(tensor) != compiled:
                raise Error(_mismatch(index, tensor, compiled))
        self._check_constants(structure.constants())
        if any(tensor.requires_grad for tensor in tensors):
            self._warn("inputs that require a gradient are detached: outputs of the device cannot be differentiated")
        return tensors

    def rebuild(self, tensors: List[torch.Tensor]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Positional and keyword arguments of `forward`, with these tensors and the compile-time constants."""
        args, kwargs = self._structure.rebuild(tensors)
        return args, kwargs

    def _bind(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> inspect.BoundArguments:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def _check_constants(self, constants: List[Any]) -> None:
        # The device runs the compiled values whatever is passed later; where the contract is silent, we say so once.
        for compiled, value in zip(self._constants, constants):
            if not _is_same(compiled, value):
                self._warn(f"a constant argument was compiled as {compiled!r}; the value {value!r} has no effect")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"poptorch: {message}", stacklevel=5)


def _names(bound: inspect.BoundArguments) -> List[str]:
    names: List[str] = []
    for name, value in bound.arguments.items():
        tensors = len(flatten(value)[0])
        names += [name] if tensors == 1 else [f"{name}/{index}" for index in range(tensors)]
    return names


def _is_same(compiled: Any, value: Any) -> bool:
    """Whether two constants are equal; those that cannot be compared count as equal."""
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
    got = API_DTYPE.get(tensor.dtype, tensor.dtype)
    return (
        f"Tensor {index} of the arguments is {got} {list(tensor.shape)}, but the model was compiled for {dtype} "
        f"{list(shape)}. Shapes are fixed by the first call: drop the last short batch, or wrap the model again"
    )
