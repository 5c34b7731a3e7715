"""Checks the operators of a compilation's forward: unsupported ones, reads of values, and operands on the host.

The findings are reported once per compilation, with the module that called the operator and the line in its code.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
import torch.nn.functional as F
from _pod.activation import is_strict
from torch.overrides import TorchFunctionMode

from poptorch import findings
from poptorch.device_mode import is_on_device
from poptorch.environment import logger
from poptorch.findings import reject
from poptorch.parallel.supported_operators import base_name, is_supported
from poptorch.parallel.tracing import StageRecorder, tensors_in

_PACKAGE = f"{findings.SDK_FOLDER}poptorch/"
_OWN_OPS = f"{_PACKAGE}ops/"
_COMPILATION = str(Path(__file__).resolve().with_name("compilation.py"))
_AUTOGRAD = (f"{findings.TORCH_FOLDER}autograd/__init__.py", f"{findings.TORCH_FOLDER}autograd/graph.py")
_DISTRIBUTIONS = f"{findings.TORCH_FOLDER}distributions/"  # validates its arguments, which PopTorch disables

# What PopTorch lowers as a whole, and a CPU computes by operators that PopTorch does not have.
_WHOLE = (
    F.ctc_loss,
    F.one_hot,
    torch.bilinear,
    torch.gru,
    torch.lstm,
    torch.rnn_relu,
    torch.rnn_tanh,
)
_VALUE = (
    "{} is only supported in eager mode, but was intercepted in a static graph: forward reads the value of a tensor, "
    "which is known when the model runs, not when it is compiled"
)
_MOVE = (
    'Illegal move to CPU (via `.to("cpu")`): {} reads the values of a tensor; return the tensor from forward instead'
)
_READS: Dict[Any, str] = {
    torch.Tensor.tolist: _MOVE.format("tolist()"),
    torch.Tensor.numpy: _MOVE.format("numpy()"),
    torch.Tensor.__array__: _MOVE.format("numpy()"),
}
_ON_HOST = (
    "Expected an IPU tensor but got tensor(device=cpu, shape={}, dtype={}). Constant tensors should be moved "
    'explicitly to the IPU, via cpu_tensor.to("ipu"), or be buffers of the model'
)
# What copies a tensor to the device, or reads only the shape of its second operand.
_MOVES = frozenset((torch.Tensor.to, torch.Tensor.type_as, torch.as_tensor, torch.asarray))
_ALWAYS_MOVES = frozenset((torch.zeros_like, torch.full_like))  # whose results PopTorch forces to the device
_TAKES_HOST = frozenset(
    (
        *_MOVES,
        torch.Tensor.copy_,
        torch.Tensor.__setitem__,
        torch.Tensor.expand_as,
        torch.Tensor.reshape_as,
        torch.Tensor.view_as,
    )
)

# What a forward calls that computes gradients itself, as of the forces of an energy.
_GRADIENTS = frozenset(
    (torch.autograd.grad, torch.Tensor.backward, torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
)
_NO_GRADIENT = "does not require grad"  # in torch's error, where none of these was seen
# Operands that keep their dtype beside a half input: they are no operands of the arithmetic in half.
_STATISTICS = {F.batch_norm: (1, 2), F.instance_norm: (1, 2), torch.batch_norm: (3, 4), torch.instance_norm: (3, 4)}
_MIXED = (
    "{} has operands in half and in float32: whether its result is half or float32 depends on how the SDK resolves "
    "them, about which its tests, its guide and its source disagree; cast one of them"
)

_References = Dict[int, Any]  # weak references to tensors, by id


class NeedsGradients(BaseException):
    """The forward of an inference model computes gradients: it has to be traced with gradients enabled.

    Not an Exception, which the program might catch.
    """


class OperatorCheck:
    """Observes the operators of one forward on the device.

    An operator whose tensors are all constants is not checked, as PopTorch computes it at compile time.

    Args:
        recorder: names the module that is running.
        inputs: the tensors that are known only at run time: inputs, parameters and buffers.
        originals: tensors of the host that stand for tensors of the device.
    """

    def __init__(
        self, recorder: StageRecorder, inputs: Iterable[torch.Tensor], originals: Iterable[torch.Tensor] = ()
    ) -> None:
        self._recorder = recorder
        self._known: _References = {}  # the tensors known only at run time
        self._on_device: _References = {}  # the tensors on the device; those that forward finds elsewhere are not
        self._unsupported: Dict[str, List[str]] = {}  # places by operator
        self._rejected: Dict[str, List[str]] = {}  # places by reason
        self._mixed: Dict[str, List[str]] = {}  # places by function
        self._depth = 0
        self.functions = _FunctionCheck(self)
        for tensor in inputs:
            _track(self._known, tensor)
            _track(self._on_device, tensor)
        for tensor in originals:
            _track(self._on_device, tensor)

    def observe(self, operator: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], result: Any) -> None:
        """Check one call of an operator, an overload of `torch.ops`."""
        operands = tensors_in((args, kwargs))
        if operands:  # other constructors of tensors are functions, or create tensors of the host
            self._place(operands, result)
        if not any(id(tensor) in self._known for tensor in operands):
            return
        for tensor in tensors_in(result):
            _track(self._known, tensor)
        if self._depth:
            return
        name = operator._schema.name
        if name == "aten::_local_scalar_dense":
            self._reject(_VALUE.format("aten::item"))
            return
        limit = _KERNELS.get(base_name(name))
        reason = None if limit is None else limit(args)
        if reason is not None:
            self._reject(reason)
        elif not is_supported(name):
            self._add(self._unsupported, base_name(name))

    def call(self, function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Check and run one call of a torch function."""
        if isinstance(function, torch._ops.OpOverload):  # an operator that `observe` checks
            return function(*args, **kwargs)
        if function in _GRADIENTS and not torch.is_grad_enabled():
            raise NeedsGradients
        operands = tensors_in((args, kwargs))
        on_host = [tensor for tensor in operands if id(tensor) not in self._on_device]
        if on_host and len(on_host) < len(operands) and function not in _TAKES_HOST:
            self._reject(_ON_HOST.format(list(on_host[0].shape), str(on_host[0].dtype).replace("torch.", "")))
        if _is_mixed(function, args, kwargs) and any(id(tensor) in self._known for tensor in operands):
            self._add(self._mixed, function.__name__)
        result = self._run(function, args, kwargs)
        to = (*args[1:], *kwargs.values())
        is_moved = function in _MOVES and any(isinstance(value, (str, torch.device, torch.Tensor)) for value in to)
        self._place([] if is_moved or function in _ALWAYS_MOVES else operands, result)
        return result

    def _run(self, function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        reason = _READS.get(function)
        if reason is not None:
            if id(args[0]) in self._known:
                self._reject(reason)
            return function(*args, **kwargs)
        limit = function_limit(function, args, kwargs)
        if limit is not None:
            self._reject(limit)
        if function not in _WHOLE:
            return function(*args, **kwargs)
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1

    def check_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """Warn of outputs that are not computed on the device."""
        if any(id(output) not in self._on_device for output in outputs):
            warnings.warn("Output expected to be on the IPU but is on cpu", stacklevel=2)

    def report(self) -> None:
        """Warn of what was found; in strict mode raise Error, and warn of what an IPU may compute in two ways."""
        if findings.is_active():
            self._record()
            return
        if is_strict():
            for name, places in self._mixed.items():
                logger.warning("%s. %s.", _MIXED.format(name), _places(places))
        messages = [f"{reason}. {_places(places)}." for reason, places in self._rejected.items()]
        if self._unsupported:
            names = ", ".join(sorted(self._unsupported))
            where = "; ".join(f"{name}: {_places(places)}" for name, places in sorted(self._unsupported.items()))
            messages.append(
                f"Unsupported ops found in compiled model: [{names}]. PopTorch does not support them. {where}."
            )
        if messages:
            reject(" ".join(messages))

    def _record(self) -> None:
        for name, places in self._unsupported.items():
            findings.add(findings.TROUBLE, "operator", f"{name}: PopTorch does not support it", places)
        for reason, places in self._rejected.items():
            findings.add(findings.TROUBLE, "forward", reason, places)
        for name, places in self._mixed.items():
            findings.add(findings.WARN, "precision", _MIXED.format(name), places)

    def _place(self, operands: List[torch.Tensor], result: Any) -> None:
        """Track the results as tensors of the device, unless there are operands and all are on the host."""
        if not operands or any(id(tensor) in self._on_device for tensor in operands):
            for tensor in tensors_in(result):
                _track(self._on_device, tensor)

    def _reject(self, reason: str) -> None:
        self._add(self._rejected, reason)

    def _add(self, found: Dict[str, List[str]], what: str) -> None:
        line = _line_of_program()
        if line is None or not is_on_device():
            return
        place = f"{self._recorder.describe_module()}{line}"
        places = found.setdefault(what, [])
        if place not in places:
            places.append(place)


def needs_gradients(error: RuntimeError) -> bool:
    """Return whether a forward without gradients fails because it needs them."""
    return _NO_GRADIENT in str(error)


def _is_mixed(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
    """Whether the dtype of the result depends on the meaning of operands in half and float32."""
    name = getattr(function, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if function in _TAKES_HOST or is_in_place:
        return False
    statistics = _STATISTICS.get(function, ())
    named = {key: value for key, value in kwargs.items() if not statistics or not key.startswith("running_")}
    operands = tensors_in(([each for index, each in enumerate(args) if index not in statistics], named))
    deciding = [operand for operand in operands if operand.dim()] or operands  # as torch's type promotion
    return {torch.float16, torch.float32} <= {operand.dtype for operand in deciding}


class _FunctionCheck(TorchFunctionMode):
    """Passes the torch functions that the program calls to an `OperatorCheck`; enter it last."""

    def __init__(self, check: OperatorCheck) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        return self._check.call(func, args, kwargs or {})


def _track(references: _References, tensor: torch.Tensor) -> None:
    key = id(tensor)
    references[key] = weakref.ref(tensor, lambda reference: references.pop(key, None))


def _line_of_program() -> Optional[str]:
    """Return file and line of the call in the program, after a comma; empty if only torch's modules are between.

    None if an op of this package, a check of torch's own, or autograd makes the call: PopTorch lowers what it makes.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _COMPILATION:
        file = frame.f_code.co_filename
        if file.startswith((_OWN_OPS, _DISTRIBUTIONS, *_AUTOGRAD)):
            return None
        if not file.startswith((_PACKAGE, findings.TORCH_FOLDER, "<")):
            return f", {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _places(places: List[str]) -> str:
    shown = "; ".join(places[:3])
    return f"Called by {shown}" + (f" and {len(places) - 3} more" if len(places) > 3 else "")


Arguments = Tuple[Any, ...]
_Limit = Callable[[Arguments], Optional[str]]
_NONZERO = (
    "Operations using aten::nonzero are unsupported because the output shape is determined by the tensor values. The "
    "IPU cannot support dynamic output shapes"
)


def function_limit(function: Any, args: Arguments, kwargs: Dict[str, Any]) -> Optional[str]:
    """Return why PopTorch rejects a call of a torch function; None if it does not."""
    if function in _RECURRENT:
        reason = _recurrent(_RECURRENT[function], args)
        return None if reason is None else f"aten::{function.__name__}: {reason}"
    if function is F.ctc_loss and (kwargs.get("reduction") or (*args, *[None] * 6)[5]) == "none":
        return 'CTCLoss with reduction="none" is currently not supported'
    if function is F.one_hot and (kwargs.get("num_classes", -1) if len(args) < 2 else args[1]) == -1:
        return "OneHot num classes must be specified and must be constant"
    if function is F.cross_entropy:
        reduction, smoothing = (
            kwargs.get(name, _argument(args, index, default)) for name, index, default in _SMOOTHING
        )
        if smoothing and reduction == "mean":
            return (
                "cross_entropy with label_smoothing uses aten::masked_select, whose shape is determined by the values"
            )
    return None


def _argument(args: Arguments, index: int, default: Any = None) -> Any:
    return args[index] if len(args) > index else default


def _recurrent(name: str, args: Arguments) -> Optional[str]:
    # (input, state, weights, bias, layers, dropout, training, bidirectional, batch first); the overload for packed
    # sequences, which cannot be made on an IPU, has a tensor of batch sizes before the state.
    if len(args) != 9 or not isinstance(args[2], (list, tuple)) or not isinstance(args[8], bool):
        return None
    has_bias, layers, dropout, is_bidirectional = args[3], args[4], args[5], args[7]
    if layers != 1:
        return f"Only {name} with 1 layer supported"
    if dropout != 0:
        return f"{name} only supports dropout = 0.0"
    if is_bidirectional:
        return f"bidirectional {name} not supported"
    return None if has_bias or name == "GRU" else f"{name} without biases not supported"


def _boolean_index(args: Arguments) -> Optional[str]:
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return _NONZERO if masks else None


def _class_weights(args: Arguments) -> Optional[str]:
    return 'Parameter "weight" is unsupported for aten::nll_loss_nd' if _argument(args, 2) is not None else None


def _embedding(args: Arguments) -> Optional[str]:
    return "Unsupported aten::embedding operation" if any(args[3:5]) else None


def _bincount(args: Arguments) -> Optional[str]:
    if _argument(args, 2, 0):
        return None
    return (
        "Bincount `minlength` must be specified and must be a constant. On the IPU MK2 platform the minimum length is "
        "also the maximum length"
    )


def _upsample(mode: str) -> _Limit:
    return lambda args: f"Unsupported upsample mode aten::{mode}: currently only 'nearest' is supported"


def _bicubic(args: Arguments) -> Optional[str]:
    return "Only support align_corners=False" if args[2] else None


def _triangle(name: str) -> _Limit:
    return lambda args: f"torch.{name} is only supported within constant expressions"


_SMOOTHING = (("reduction", 6, "mean"), ("label_smoothing", 7, 0.0))  # name, position and default
_RECURRENT = {torch.lstm: "LSTM", torch.gru: "GRU", torch.rnn_tanh: "RNN", torch.rnn_relu: "RNN"}
# For an operator: why PopTorch rejects a call with these arguments; None if it does not.
_KERNELS: Dict[str, _Limit] = {
    "aten::nonzero": lambda args: _NONZERO,
    "aten::index": _boolean_index,
    "aten::nll_loss_forward": _class_weights,
    "aten::nll_loss2d_forward": _class_weights,
    "aten::embedding": _embedding,
    "aten::bincount": _bincount,
    "aten::upsample_linear1d": _upsample("upsample_linear1d"),
    "aten::upsample_trilinear3d": _upsample("upsample_trilinear3d"),
    "aten::upsample_bicubic2d": _bicubic,
    "aten::triu": _triangle("triu"),
}
