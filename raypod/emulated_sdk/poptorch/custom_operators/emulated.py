"""One implementation of a custom operator, and its call in the forward of a model."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from poptorch.device_mode import API_DTYPE, off_device
from poptorch.errors import Error

_Tensors = Tuple[torch.Tensor, ...]


class OperatorId(NamedTuple):
    """The identification of an operator in PopART."""

    name: str
    domain: str
    version: int

    def __str__(self) -> str:
        return f"{self.domain}.{self.name}:{self.version}"


class Kind(NamedTuple):
    """Shape and dtype of an output, of the API or of the emulated device."""

    shape: Tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kind:
        """Return those of a tensor, with the dtype of the API."""
        return cls(tuple(tensor.shape), API_DTYPE.get(tensor.dtype, tensor.dtype))

    def __str__(self) -> str:
        return f"{str(self.dtype).replace('torch.', '')}{list(self.shape)}"


class Emulation:
    """A Python function that computes what a custom operator computes; call it as `poptorch.custom_op` does.

    Attributes:
        operator: the operator.
        is_flat: the outputs have one dimension in PopART, and in PopTorch the shapes of the examples.
    """

    def __init__(self, operator: OperatorId, function: Callable[..., Any], is_flat: bool = False) -> None:
        self.operator, self.is_flat = operator, is_flat
        self._function = function
        self._gradients: Optional[Callable[..., Any]] = None
        self.__doc__ = function.__doc__

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate `function(inputs, outputs, gradients, **attributes)`, which returns the gradients of the inputs."""
        self._gradients = function
        return function

    def __call__(self, *inputs: torch.Tensor, **attributes: Any) -> _Tensors:
        """Return the outputs. Raises Error if the function does not take the inputs and attributes."""
        try:
            inspect.signature(self._function).bind(*inputs, **attributes)
        except TypeError as error:
            given = ", ".join(sorted(attributes)) or "none"
            raise Error(
                f"{self._described}: {error}. The program passes {len(inputs)} inputs and the attributes: {given}"
            ) from None
        if self._gradients is None:
            return self.compute(inputs, attributes)
        outputs: _Tensors = _WithBackward.apply(self, attributes, *inputs)  # type: ignore[no-untyped-call]
        return outputs

    def compute(self, inputs: Sequence[torch.Tensor], attributes: Dict[str, Any]) -> _Tensors:
        """Return the outputs of the function itself; an output that is an input is copied."""
        outputs = self._tensors(self._function(*inputs, **attributes), "outputs")
        return tuple(output.clone() if any(output is each for each in inputs) else output for output in outputs)

    def gradients(
        self, inputs: _Tensors, outputs: _Tensors, gradients: _Tensors, attributes: Dict[str, Any]
    ) -> Tuple[Optional[torch.Tensor], ...]:
        """Return the gradients of the inputs by the function that `backward` decorates."""
        assert self._gradients is not None
        found = self._tensors(self._gradients(inputs, outputs, gradients, **attributes), "gradients", may_lack=True)
        if len(found) != len(inputs):
            raise Error(f"{self._described}: backward returned {len(found)} gradients for {len(inputs)} inputs")
        return found

    @property
    def _described(self) -> str:
        return f"{self._function.__module__}.{self._function.__qualname__}, which emulates {self.operator}"

    def _tensors(self, value: Any, what: str, may_lack: bool = False) -> Tuple[Any, ...]:
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        for each in values:
            if not isinstance(each, torch.Tensor) and not (may_lack and each is None):
                raise Error(f"{self._described}: the {what} must be tensors, not {type(each).__name__}")
        return values


class _WithBackward(torch.autograd.Function):
    """Computes gradients by the function that `Emulation.backward` decorates."""

    @staticmethod
    def forward(ctx: Any, emulation: Emulation, attributes: Dict[str, Any], *inputs: torch.Tensor) -> Any:
        outputs = emulation.compute(inputs, attributes)
        ctx.emulation, ctx.attributes, ctx.inputs = emulation, attributes, len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        inputs, outputs = saved[: ctx.inputs], saved[ctx.inputs :]
        return (None, None, *ctx.emulation.gradients(inputs, outputs, gradients, ctx.attributes))


def run(
    emulation: Emulation, kinds: Sequence[Kind], attributes: Dict[str, Any], inputs: Sequence[torch.Tensor]
) -> List[torch.Tensor]:
    """Return the outputs of an operator in the forward of a model, for outputs of these kinds.

    The implementation runs as code of the host: it may use all of torch, and read values of tensors.

    Raises:
        poptorch.Error: the implementation does not take these arguments, or returns other outputs.
    """
    # The modes of the forward see one function of the inputs, not the implementation's operators.
    if has_torch_function(tuple(inputs)):
        outputs: List[torch.Tensor] = handle_torch_function(run, tuple(inputs), emulation, kinds, attributes, inputs)
        return outputs
    with off_device():
        computed = emulation(*inputs, **attributes)
        if emulation.is_flat:
            computed = tuple(map(_shaped, computed, kinds))
    found = [Kind.of(output) for output in computed]
    if found != list(kinds):
        raise Error(
            f"{emulation.operator}: its emulation returned {_listed(found)}, but example_outputs of "
            f"poptorch.custom_op are {_listed(kinds)}"
        )
    return list(computed)


def _shaped(output: torch.Tensor, kind: Kind) -> torch.Tensor:
    return output.view(kind.shape) if output.numel() == math.prod(kind.shape) else output


def _listed(kinds: Sequence[Kind]) -> str:
    return ", ".join(map(str, kinds)) or "nothing"
