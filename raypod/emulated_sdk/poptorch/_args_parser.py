"""`poptorch._args_parser`: the class of PopTorch that published programs derive from (mmcv, graphium).

The executor here binds arguments by `poptorch.device.compile.arguments`, whatever its `_args_parser` is.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from poptorch._utils import flattenTensorStructure, reconstructTensorStructure
from poptorch.errors import Error

__all__ = ["ArgsParser"]

_POSITIONAL, _KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class ArgsParser:
    """Brings the arguments of a call into the order of a signature, with its defaults.

    Args:
        model: a module, whose `forward` counts, or a function.
    """

    class Args:
        """The arguments of one call: `args` with their `arg_names`, and `kwargs`."""

        def __init__(self) -> None:
            self.args: List[Any] = []
            self.arg_names: List[str] = []
            self.kwargs: Dict[str, Any] = {}
            self.first_none: Optional[int] = None

        def appendArg(self, arg: Any, name: str) -> None:
            """Add a positional argument."""
            self.args.append(arg)
            self.arg_names.append(name)

        def setNamedArg(self, name: str, arg: Any) -> None:
            """Add a keyword argument."""
            self.kwargs[name] = arg

        def popArg(self) -> None:
            """Remove the last positional argument."""
            self.args.pop()
            self.arg_names.pop()

        def clone(self) -> ArgsParser.Args:
            """Return a shallow copy."""
            clone = ArgsParser.Args()
            clone.args, clone.arg_names, clone.kwargs = list(self.args), list(self.arg_names), dict(self.kwargs)
            clone.first_none = self.first_none
            return clone

        def forEach(self, fn: Callable[[torch.Tensor], Any]) -> None:
            """Replace each tensor by `fn(tensor)`."""
            both = (self.args, self.kwargs)
            tensors = map(fn, flattenTensorStructure(both))
            self.args, self.kwargs = reconstructTensorStructure(both, tensors)

        def asPackedFlatTuple(self, canonical_args: Any = None) -> Tuple[torch.Tensor, ...]:
            """Return the tensors, in order."""
            return tuple(flattenTensorStructure((self.args, self.kwargs)))

    def __init__(self, model: Any) -> None:
        function = model.forward if isinstance(model, torch.nn.Module) else model
        if not callable(function):
            raise TypeError("Expected a torch.nn.Module or a callable")
        parameters = inspect.signature(function).parameters.values()
        self._varnames = [parameter.name for parameter in parameters]
        self._var_kinds = [parameter.kind for parameter in parameters]
        self._defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        self._has_variadic_arguments = any(kind in (_POSITIONAL, _KEYWORD) for kind in self._var_kinds)
        self._warned_not_contiguous_input = False

    def __call__(self, args: Sequence[Any], kwargs: Dict[str, Any], fast_path: bool = False) -> ArgsParser.Args:
        """Return the arguments in the order of the signature.

        Raises:
            AssertionError: there are too many arguments, one is unknown or given twice.
            Error: one is missing.
        """
        is_fixed = not self._has_variadic_arguments
        assert not (is_fixed and len(args) + len(kwargs) > len(self._varnames)), (
            f"Too many arguments provided: expected {self._varnames} ({len(self._varnames)}) but got "
            f"{len(args) + len(kwargs)}"
        )
        unknown = [name for name in kwargs if is_fixed and name not in self._varnames]
        assert not unknown, f"{unknown[0]} is not a valid parameter. Allowed values are {self._varnames}"
        parsed, positional, is_named = ArgsParser.Args(), list(args), False
        for index, (name, kind) in enumerate(zip(self._varnames, self._var_kinds)):
            assert not positional or name not in kwargs, f"Parameter {name} was passed more than once"
            if kind == _KEYWORD:
                parsed.kwargs.update({key: kwargs[key] for key in kwargs if key not in self._varnames[:index]})
            elif kind == _POSITIONAL:
                for position, value in enumerate(positional):
                    parsed.appendArg(value, f"*{name}[{position}]")
                positional, is_named = [], True
            else:
                value = positional.pop(0) if positional else self._named(name, kwargs)
                parsed.setNamedArg(name, value) if is_named else parsed.appendArg(value, name)
        parsed.forEach(torch.Tensor.contiguous)
        return parsed

    def _named(self, name: str, kwargs: Dict[str, Any]) -> Any:
        if name not in kwargs and name not in self._defaults:
            raise Error(f"Mandatory parameter {name} missing")
        return kwargs.get(name, self._defaults.get(name))
