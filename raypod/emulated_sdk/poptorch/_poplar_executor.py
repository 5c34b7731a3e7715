"""`poptorch._poplar_executor`: the module of PopTorch that published programs import `PoplarExecutor` from."""

from __future__ import annotations

from poptorch.executor.executor import PoplarExecutor
from poptorch.substitutions import Substitutions

__all__ = ["PoplarExecutor"]

_OverwriteContextManager = Substitutions  # the SDK's name, by which poptorch_geometric registers
