"""Ops that depend on values known only at run time: loops, branches and dynamic slices.

Loops and branches are for inference only; dynamic slices are differentiable.

The bodies of loops and branches take copies of their tensors, so in-place changes have no effect outside, as on the
device.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, List, Tuple

import torch

from poptorch.device_mode import API_DTYPE, compiling_mode
from poptorch.errors import Error
from poptorch.ops.annotations import ArgumentError, Signature, checked_callable, checked_int, checked_tensor
from poptorch.parallel.tracing import active_recorder

_Body = Callable[..., Any]


def for_loop(count: int, body: _Body, inputs: List[torch.Tensor]) -> List[torch.Tensor]:
    """Run `body` `count` times, each time on its previous outputs, and return the last outputs as a list.

    Args:
        count: a constant of at least 0.
        body: takes one tensor for each of the `inputs` and returns as many, of the same shapes and dtypes.
        inputs: a list of tensors; not modified.

    Raises:
        poptorch.Error: the model is compiled for training.
        poptorch.Error and ValueError: other arguments, or other outputs of the body.
    """
    checked_int("for_loop", "count", count, minimum=0)
    checked_callable("for_loop", "body", body)
    state = _tensors("for_loop", "inputs", _listed("for_loop", "inputs", inputs))
    _check_inference("for_loop")
    expected = Signature.of(state)
    for iteration in range(count):
        state = _outputs("for_loop", "body", body(*_copies(state)))
        returned = Signature.of(state)
        if returned != expected:
            raise ArgumentError(
                "poptorch.for_loop: the body must return the number, shapes and dtypes of its inputs: it takes "
                f"{expected} and in iteration {iteration} returned {returned}"
            )
    return state if count else _copies(state)


def cond(
    condition: torch.Tensor,
    then_body: _Body,
    then_inps: List[Any],
    else_body: _Body,
    else_inps: List[Any],
) -> List[torch.Tensor]:
    """Return the outputs of `then_body(*then_inps)` if the condition is true, else of `else_body(*else_inps)`.

    Args:
        condition: a tensor of one element, evaluated in every run of the model.
        then_inps, else_inps: lists of tensors, or of constants for the bodies.
        then_body, else_body: return the same number of tensors, of the same shapes and dtypes; compilation runs both.

    Raises:
        poptorch.Error: the model is compiled for training.
        poptorch.Error and ValueError: other arguments, or different outputs of the branches.
    """
    is_true = _condition(condition)
    then_state = _listed("cond", "then_inps", then_inps)
    else_state = _listed("cond", "else_inps", else_inps)
    checked_callable("cond", "then_body", then_body)
    checked_callable("cond", "else_body", else_body)
    _check_inference("cond")
    if compiling_mode() is None:
        name, body, state = ("then", then_body, then_state) if is_true else ("else", else_body, else_state)
        return _outputs("cond", f"{name}_body", body(*_copies(state)))
    then_outputs = _outputs("cond", "then_body", then_body(*_copies(then_state)))
    else_outputs = _outputs("cond", "else_body", else_body(*_copies(else_state)))
    then_signature, else_signature = Signature.of(then_outputs), Signature.of(else_outputs)
    if then_signature != else_signature:
        raise ArgumentError(
            "poptorch.cond: both branches must return the same number, shapes and dtypes: then_body returned "
            f"{then_signature}, else_body {else_signature}"
        )
    return then_outputs if is_true else else_outputs


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return a copy of `tensor[start : start + size : step]` along `dim`, with ceil(size / step) elements there.

    Args:
        start: a tensor of one integer.
        size, step: constants of at least 1; in the forward of a model `size` divides the dimension.

    Raises:
        poptorch.Error and ValueError: other arguments, or a slice that exceeds the tensor.
    """
    checked_tensor("dynamic_slice", "tensor", tensor)
    checked_int("dynamic_slice", "step", step, minimum=1)
    dim, begin = _slice_start("dynamic_slice", tensor, dim, start, size)
    if compiling_mode() is not None and tensor.shape[dim] % size:
        raise ArgumentError(
            f"The size of the slice ({size}) must be a factor of the slicing dimension ({tensor.shape[dim]})."
        )
    return tensor.narrow(dim, begin, size)[(slice(None),) * dim + (slice(None, None, step),)].clone()


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """Return a copy of `input` whose slice [start : start + size] along `dim` is `src`; differentiable in both.

    Args:
        start: a tensor of one integer.
        size: a constant of at least 1.

    Raises:
        poptorch.Error and ValueError: other arguments, a slice that exceeds the tensor, or a `src` with another shape
            or dtype than the slice.
    """
    checked_tensor("dynamic_update", "input", input)
    checked_tensor("dynamic_update", "src", src)
    if input.dim() != src.dim():
        raise ArgumentError(f"input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})")
    if input.dtype != src.dtype:
        dtypes = " vs ".join(str(API_DTYPE.get(tensor.dtype, tensor.dtype)) for tensor in (input, src))
        raise ArgumentError(f"input and src tensor must have same dtype. ({dtypes})")
    dim, begin = _slice_start("dynamic_update", input, dim, start, size)
    replaced = Signature.of([input.narrow(dim, begin, size)])
    given = Signature.of([src])
    if replaced != given:
        raise ArgumentError(f"poptorch.dynamic_update: `src` is {given}, but the slice to replace is {replaced}")
    return torch.slice_scatter(input, src, dim, begin, begin + size)


def _check_inference(op: str) -> None:
    recorder = active_recorder()
    if recorder is not None and recorder.is_training:
        raise Error(f"poptorch.{op}() is only supported in inference models, and this one is compiled for training")


def _condition(condition: Any) -> bool:
    checked_tensor("cond", "condition", condition)
    if condition.numel() != 1:
        raise ArgumentError(
            f"poptorch.cond: `condition` must be a tensor of shape [] or [1], not {list(condition.shape)}. For an "
            "elementwise condition use torch.where"
        )
    return bool(condition.item())


def _listed(op: str, name: str, inputs: Any) -> List[Any]:
    if not isinstance(inputs, list):
        raise ArgumentError(
            f"poptorch.{op} expects input tensors ({name}) to be a list of tensors. (Object is not list) It is "
            f"{type(inputs).__name__}"
        )
    return list(inputs)


def _tensors(op: str, name: str, inputs: List[Any]) -> List[torch.Tensor]:
    for index, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"poptorch.{op} expects input tensors ({name}) to be a list of tensors. (Object contained in list at "
                f"index {index} is not torch.tensor) It is {type(tensor).__name__}"
            )
    return inputs


def _outputs(op: str, name: str, outputs: Any) -> List[torch.Tensor]:
    tensors = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"poptorch.{op}: `{name}` must return tensors, not {type(tensor).__name__}")
    return tensors


def _copies(values: List[Any]) -> List[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _slice_start(op: str, tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> Tuple[int, int]:
    """Return the non-negative dimension and the start of a slice; ArgumentError if it exceeds the tensor."""
    checked_int(op, "size", size, minimum=-sys.maxsize)
    if size < 1:
        raise ArgumentError(
            f"The start and end of a slice must be different. poptorch.{op}: `size` is 0"
            if size == 0
            else "Taking a slice of a tensor with the end less than the start is not supported. "
            f"poptorch.{op}: `size` is {size}"
        )
    checked_int(op, "dim", dim, minimum=-tensor.dim())
    if dim >= tensor.dim():
        raise ArgumentError(f"poptorch.{op}: `dim` is {dim}, but the tensor has {tensor.dim()} dimensions")
    dim %= tensor.dim()
    begin = _checked_start(op, start)
    if compiling_mode() is not None:  # the values of the compiling call do not count: the start is known at run time
        begin = max(0, min(begin, tensor.shape[dim] - size))
    if not 0 <= begin <= tensor.shape[dim] - size:
        raise ArgumentError(
            f"poptorch.{op}: the slice [{begin} : {begin + size}] exceeds dimension {dim}, which has "
            f"{tensor.shape[dim]} elements"
        )
    return dim, begin


def _checked_start(op: str, start: torch.Tensor) -> int:
    checked_tensor(op, "start", start)
    if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise ArgumentError(f"poptorch.{op}: `start` must be one integer, not {Signature.of([start])}")
    return int(start.item())
