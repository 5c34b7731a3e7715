"""`poptorch._poplar_executor`: the module of PopTorch that published programs import `PoplarExecutor` from."""

from __future__ import annotations

from poptorch.executor.compile_context import Substitutions
from poptorch.executor.executor import PoplarExecutor

__all__ = ["PoplarExecutor"]

_OverwriteContextManager = Substitutions  # the SDK's name, by which poptorch_geometric registers
