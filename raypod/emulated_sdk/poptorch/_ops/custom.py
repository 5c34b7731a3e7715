"""`custom_op`: refused, as C++ for the IPU cannot run on a CPU (contract 2.6)."""

from __future__ import annotations

from typing import Any, Dict, List, NoReturn, Optional

import torch

from poptorch._errors import Error


def custom_op(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: List[torch.Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> NoReturn:
    """Raises Error: a custom operator is a library of C++ and vertex code for the device, which is not there."""
    raise Error(
        f"poptorch.custom_op: the custom operator {domain}.{name}:{domain_version} is C++ for the IPU and cannot run "
        "on the emulated SDK. Run the program on IPUs, or call a torch implementation of the operator where "
        "poptorch.ipuHardwareVersion() is 0"
    )
