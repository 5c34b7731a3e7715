"""What only the emulated SDK has: `custom_op_emulation` registers a Python implementation of a custom operator.

`custom_pattern` registers the name of a compiler pattern, which a library of operators may define, too. The modules
that EMULATED_POD_CUSTOM_OPS names import it; a program itself does not need it, and so runs on IPUs as it is.
"""

from __future__ import annotations

from poptorch.custom_operators.registry import custom_op_emulation, custom_pattern

__all__ = ["custom_op_emulation", "custom_pattern"]
