"""`for_loop` and `cond`: loops and branches of the device (contract 2.6).

Bodies get copies of their tensors: what they change in place stays inside, as on the device. Both are differentiable
here, through what was computed.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple, Union

import torch

from poptorch.device_mode import compiling_mode
from poptorch.ops.arguments import ArgumentError, Signature, checked_callable, checked_int, checked_tensor

_Body = Callable[..., Any]


def for_loop(count: int, body: _Body, inputs: List[torch.Tensor]) -> List[torch.Tensor]:
    """Run `body` `count` times, each time on what it returned before; returns the last outputs as a list.

    count: a constant of at least 0.
    body: takes as many tensors as there are `inputs` and returns as many, of the same shapes and dtypes.
    inputs: a list of tensors, not changed.

    Error, which is also a ValueError, for other arguments and for a body that returns something else.
    """
    checked_int("for_loop", "count", count, least=0)
    checked_callable("for_loop", "body", body)
    state = _inputs("for_loop", "inputs", inputs, (list,))
    carried = Signature.of(state)
    for iteration in range(count):
        state = _outputs("for_loop", "body", body(*_copies(state)))
        returned = Signature.of(state)
        if returned != carried:
            raise ArgumentError(
                "poptorch.for_loop: the body must return what it takes, in number, shape and dtype: it takes "
                f"{carried} and in iteration {iteration} returned {returned}"
            )
    return state if count else _copies(state)


def cond(
    condition: torch.Tensor,
    then_body: _Body,
    then_inps: Sequence[torch.Tensor],
    else_body: _Body,
    else_inps: Sequence[torch.Tensor],
) -> List[torch.Tensor]:
    """`then_body(*then_inps)` if the condition holds, else `else_body(*else_inps)`; returns the outputs as a list.

    condition: a tensor of one element, read whenever the model runs.
    then_body, else_body: return equally many tensors, of the same shapes and dtypes: compiling sees both.

    Error, which is also a ValueError, for other arguments and for branches that do not agree.
    """
    is_true = _condition(condition)
    then_state = _inputs("cond", "then_inps", then_inps, (list, tuple))
    else_state = _inputs("cond", "else_inps", else_inps, (list, tuple))
    checked_callable("cond", "then_body", then_body)
    checked_callable("cond", "else_body", else_body)
    if compiling_mode() is None:
        name, body, state = ("then", then_body, then_state) if is_true else ("else", else_body, else_state)
        return _outputs("cond", f"{name}_body", body(*_copies(state)))
    then_outputs = _outputs("cond", "then_body", then_body(*_copies(then_state)))
    else_outputs = _outputs("cond", "else_body", else_body(*_copies(else_state)))
    _check_branches(Signature.of(then_outputs), Signature.of(else_outputs))
    # Compiling must see both: weights that only the branch not taken uses are trained too.
    chosen = condition.reshape(()).bool()
    return [torch.where(chosen, one, other) for one, other in zip(then_outputs, else_outputs)]


def _condition(condition: Any) -> bool:
    checked_tensor("cond", "condition", condition)
    if condition.numel() != 1:
        raise ArgumentError(
            f"poptorch.cond: the condition is one bool, a tensor of shape [] or [1], not {list(condition.shape)}. "
            "For a choice element by element use torch.where"
        )
    return bool(condition.item())


def _check_branches(then_signature: Signature, else_signature: Signature) -> None:
    if then_signature != else_signature:
        raise ArgumentError(
            "poptorch.cond: both branches must return the same number, shapes and dtypes: then_body returned "
            f"{then_signature}, else_body {else_signature}"
        )


def _inputs(op: str, name: str, inputs: Any, kinds: Any) -> List[torch.Tensor]:
    if not isinstance(inputs, kinds):
        raise ArgumentError(
            f"poptorch.{op} expects input tensors ({name}) to be a list of tensors. (Object is not list) It is "
            f"{type(inputs).__name__}"
        )
    for index, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"poptorch.{op} expects input tensors ({name}) to be a list of tensors. (Object contained in list at "
                f"index {index} is not torch.tensor) It is {type(tensor).__name__}"
            )
    return list(inputs)


def _outputs(op: str, name: str, outputs: Any) -> List[torch.Tensor]:
    tensors = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"poptorch.{op}: `{name}` returned {type(tensor).__name__} where a tensor is expected")
    return tensors


def _copies(tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


_Start = Union[int, torch.Tensor]


def dynamic_slice(tensor: torch.Tensor, dim: int, start: _Start, size: int, step: int) -> torch.Tensor:
    """`tensor[start : start + size : step]` along `dim`, a copy; differentiable.

    start: an int, or a tensor of one integer. size, step: constants of at least 1.

    Returns a tensor with ceil(size / step) elements along `dim`. Error, which is also a ValueError, for other arguments
    and for a slice that leaves the tensor.
    """
    checked_tensor("dynamic_slice", "tensor", tensor)
    checked_int("dynamic_slice", "step", step, least=1)
    dim, begin = _place("dynamic_slice", tensor, dim, start, size)
    return tensor.narrow(dim, begin, size)[(slice(None),) * dim + (slice(None, None, step),)].clone()


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: _Start, size: int) -> torch.Tensor:
    """A copy of `input` whose slice [start : start + size] along `dim` is `src`; differentiable in both.

    start: an int, or a tensor of one integer. size: a constant of at least 1.

    Error, which is also a ValueError, for other arguments, a slice that leaves the tensor, and a `src` that is not of
    the slice's shape and dtype.
    """
    checked_tensor("dynamic_update", "input", input)
    checked_tensor("dynamic_update", "src", src)
    dim, begin = _place("dynamic_update", input, dim, start, size)
    slot = Signature.of([input.narrow(dim, begin, size)])
    given = Signature.of([src])
    if slot != given:
        raise ArgumentError(f"poptorch.dynamic_update: `src` is {given}, but the slice to replace is {slot}")
    return torch.slice_scatter(input, src, dim, begin, begin + size)


def _place(op: str, tensor: torch.Tensor, dim: int, start: _Start, size: int) -> Tuple[int, int]:
    checked_int(op, "size", size, least=1)
    checked_int(op, "dim", dim, least=-tensor.dim())
    if dim >= tensor.dim():
        raise ArgumentError(f"poptorch.{op}: `dim` is {dim}, but the tensor has {tensor.dim()} dimensions")
    dim %= tensor.dim()
    begin = _start(op, start)
    if not 0 <= begin <= tensor.shape[dim] - size:
        raise ArgumentError(
            f"poptorch.{op}: a slice of {size} from {begin} leaves dimension {dim}, which has {tensor.shape[dim]} "
            "elements"
        )
    return dim, begin


def _start(op: str, start: _Start) -> int:
    if not isinstance(start, torch.Tensor):
        return checked_int(op, "start", start, least=0)
    if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise ArgumentError(f"poptorch.{op}: `start` is one integer, not {Signature.of([start])}")
    return int(start.item())
