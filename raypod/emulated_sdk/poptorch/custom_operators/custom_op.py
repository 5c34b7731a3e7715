"""`custom_op`: an operator that a program brings as C++ and vertex code for the IPU, or one of PopART's own."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional

import torch

from poptorch import findings
from poptorch.custom_operators import registry
from poptorch.custom_operators.registry import Emulation, Kind, OperatorId, run
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
    attributes = {} if attributes is None else attributes
    for key, value in attributes.items():
        _check_attribute(key, value)
    examples = list(example_outputs)
    if not is_on_device():
        return [torch.zeros_like(output, requires_grad=output.requires_grad) for output in examples]
    return _on_device(inputs, OperatorId(name, domain, domain_version), examples, attributes)


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
    kinds = [Kind.of(example) for example in examples]
    if findings.is_active() and registry.lookup(operator) is None:
        text = f"{operator} has no implementation here, so what it computes is unknown: the check went on with zeros"
        findings.add_here(findings.WARN, "custom operator", text)
        return run(_zeros(operator, kinds), kinds, attributes, list(inputs))
    return run(registry.find(operator), kinds, attributes, list(inputs))


def _zeros(operator: OperatorId, kinds: List[Kind]) -> Emulation:
    """Return an implementation whose outputs are zeros that depend on all inputs."""

    def zeros(*inputs: torch.Tensor, **attributes: Any) -> Any:
        values = [each.flatten()[:1].sum().float() * 0 for each in inputs if each.is_floating_point()]
        zero = torch.stack(values).sum() if values else torch.zeros(())
        return tuple(zero.to(kind.dtype).expand(kind.shape).clone() for kind in kinds)

    return Emulation(operator, zeros)


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
