"""`custom_op`: an operator that a program brings as C++ and vertex code for the IPU."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional

import torch

from poptorch.device_mode import is_on_device
from poptorch.errors import Error

_ATTRIBUTE_TYPES = (float, int, str)


def custom_op(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[torch.Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> List[torch.Tensor]:
    """Return zeros of the shapes and dtypes of `example_outputs` on the host, as the SDK does.

    Args:
        attributes: floats, ints, strings, or lists of one of these, by ASCII names.

    Raises:
        ValueError: other attributes.
        poptorch.Error: on the device, where the operator is code for the IPU.
    """
    for key, value in (attributes or {}).items():
        _check_attribute(key, value)
    outputs = [torch.zeros_like(output, requires_grad=output.requires_grad) for output in example_outputs]
    return custom_operation(inputs, name, domain, domain_version, len(outputs), outputs, "")


def custom_operation(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    num_outputs: int,
    outputs: List[torch.Tensor],
    attributes: str,
) -> List[torch.Tensor]:
    """Return `outputs` on the host; Error on the device."""
    if is_on_device():
        raise Error(
            f"poptorch.custom_op: the custom operator {domain}.{name}:{domain_version} is C++ for the IPU and cannot "
            "run on the emulated SDK. Run the program on IPUs, or call a torch implementation of the operator where "
            "poptorch.ipuHardwareIsAvailable() is False"
        )
    return outputs


def _check_attribute(key: Any, value: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"All attribute keys must be strings, not {key!r}")
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(each, _ATTRIBUTE_TYPES) and isinstance(each, type(values[0])) for each in values):
        raise ValueError(
            f"Attribute values must be floats, ints, strings or a list of one of these, but {key} is {value!r}"
        )
    for text in (key, *values):
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"{text} contains non-ASCII characters.")
