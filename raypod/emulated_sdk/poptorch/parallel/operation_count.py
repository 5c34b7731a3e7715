"""Count the scalar operations of a torch operator from shapes.

Matrix products and convolutions count two operations per multiply-add, all other operators one per element of the
result. The counts compare the work of stages; they do not predict the time on an IPU.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import torch

_Rule = Callable[[Tuple[Any, ...], torch.Tensor], int]


def count_operations(operator: Any, args: Tuple[Any, ...], result: Any) -> int:
    """Return the scalar operations of one call of an operator, an overload of `torch.ops`."""
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    first = next((item for item in results if isinstance(item, torch.Tensor)), None)
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
    """Return whether the result is a view of an argument."""
    aliases = [argument.alias_info for argument in operator._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _product(left: int) -> _Rule:
    """Return the rule of a matrix product whose left operand is argument number `left`."""
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
