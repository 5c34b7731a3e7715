"""`custom_op`: an operator that a program brings as C++ and vertex code for the IPU, or one of PopART's own."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional

import torch

from poptorch.custom_operators import registry
from poptorch.custom_operators.emulated import Kind, OperatorId, run
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
    """Return what the Python implementation of the operator computes (`poptorch.emulation`).

    On the host, as in the SDK, return zeros of the shapes and dtypes of `example_outputs`.

    Args:
        attributes: floats, ints, strings, or lists of one of these, by ASCII names.

    Raises:
        ValueError: other attributes.
        poptorch.Error: on the device: there is no implementation, or it returns other outputs.
    """
    for key, value in (attributes or {}).items():
        _check_attribute(key, value)
    examples = list(example_outputs)
    if not is_on_device():
        return [torch.zeros_like(output, requires_grad=output.requires_grad) for output in examples]
    return _on_device(inputs, OperatorId(name, domain, domain_version), examples, attributes or {})


def custom_operation(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    num_outputs: int,
    outputs: List[torch.Tensor],
    attributes: str,
) -> List[torch.Tensor]:
    """Return `outputs` on the host, and those of the implementation on the device.

    Raises:
        poptorch.Error: on the device: as `custom_op`, or `attributes`, which PopTorch numbers internally, is not empty.
    """
    if not is_on_device():
        return outputs
    if attributes:
        raise Error(f"torch.ops.poptorch.custom_operation: pass the attributes of {name} by poptorch.custom_op")
    return _on_device(inputs, OperatorId(name, domain, domain_version), outputs, {})


def _on_device(
    inputs: Iterable[torch.Tensor], operator: OperatorId, examples: List[torch.Tensor], attributes: Dict[str, Any]
) -> List[torch.Tensor]:
    return run(registry.find(operator), [Kind.of(example) for example in examples], attributes, list(inputs))


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
