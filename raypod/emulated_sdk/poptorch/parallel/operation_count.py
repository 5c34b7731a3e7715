"""What one operation costs, for the eye: scalar operations, counted from shapes.

Matrix products and convolutions count two per multiplication and addition, everything else one per element of its
result. It tells how stages compare, not how long an IPU takes.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import torch

_Rule = Callable[[Tuple[Any, ...], torch.Tensor], int]


def operations(operator: Any, args: Tuple[Any, ...], result: Any) -> int:
    """Scalar operations of an operator (an overload of `torch.ops`), out of its arguments and its result."""
    first = next((item for item in _as_tuple(result) if isinstance(item, torch.Tensor)), None)
    if first is None or _is_view(operator):
        return 0
    name = operator._schema.name
    rule = _RULES.get(name)
    if rule is not None:
        return rule(args, first)
    if name.startswith("aten::_scaled_dot_product"):
        return _attention(args, first)
    return first.numel()


def _is_view(operator: Any) -> bool:
    """Whether the result only looks at an argument's memory in another way."""
    aliases = [argument.alias_info for argument in operator._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _product(left: int) -> _Rule:
    """Of a matrix product whose left operand is argument number `left`: two per element of the result and of a row."""
    return lambda args, result: 2 * result.numel() * int(args[left].shape[-1])


def _convolution(args: Tuple[Any, ...], result: torch.Tensor) -> int:
    source, weight = args[0], args[1]
    is_transposed = len(args) > 6 and args[6] is True
    positions = source.numel() if is_transposed else result.numel()
    return 2 * int(positions * weight.numel()) // int(weight.shape[0])


def _attention(args: Tuple[Any, ...], result: torch.Tensor) -> int:
    query, key, value = args[:3]
    rows, keys = int(query.numel()) // int(query.shape[-1]), int(key.shape[-2])
    return 2 * rows * keys * (int(query.shape[-1]) + int(value.shape[-1]))


def _recurrent(args: Tuple[Any, ...], result: torch.Tensor) -> int:
    # mkldnn_rnn_layer(input, weight of inputs, weight of states, ...)
    positions = int(args[0].numel()) // int(args[0].shape[-1])
    return 2 * positions * int(args[1].numel() + args[2].numel())


def _as_tuple(result: Any) -> Tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


_RULES: Dict[str, _Rule] = {
    "aten::addbmm": lambda args, result: 2 * args[1].numel() * int(args[2].shape[-1]),
    "aten::addmm": _product(1),
    "aten::addmv": _product(1),
    "aten::baddbmm": _product(1),
    "aten::bmm": _product(0),
    "aten::convolution": _convolution,
    "aten::dot": _product(0),
    "aten::linear": _product(0),
    "aten::matmul": _product(0),
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mm": _product(0),
    "aten::mv": _product(0),
}
