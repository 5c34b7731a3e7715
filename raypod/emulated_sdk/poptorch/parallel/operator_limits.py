"""The arguments with which PopTorch rejects an operator that it supports otherwise."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F

Arguments = Tuple[Any, ...]
_Limit = Callable[[Arguments], Optional[str]]
_NONZERO = (
    "Operations using aten::nonzero are unsupported because the output shape is determined by the tensor values. The "
    "IPU cannot support dynamic output shapes"
)


def kernel_limit(operator: str, args: Arguments) -> Optional[str]:
    """Return why PopTorch rejects a call of an operator ("aten::name") with these arguments; None if it does not."""
    limit = _KERNELS.get(operator)
    return None if limit is None else limit(args)


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
