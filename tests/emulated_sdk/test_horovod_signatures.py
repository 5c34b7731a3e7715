"""The emulated `horovod.torch` offers the real one's names with the real one's arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Dict

import pytest
from ranks import SDK, has_real_horovod

PROGRAM = """
import enum, inspect, json
import horovod.torch as hvd
from horovod.torch import mpi_ops

def told(default):
    if default is inspect.Parameter.empty:
        return "none"
    if isinstance(default, (int, float, str, bool, type(None))):
        return repr(int(default)) if isinstance(default, enum.Enum) else repr(default)
    return getattr(default, "__name__", type(default).__name__)

def signature(function):
    return [[each.name, each.kind.name, told(each.default)] for each in inspect.signature(function).parameters.values()]

names = [name for name in dir(hvd) if not name.startswith("_") and not inspect.ismodule(getattr(hvd, name))]
functions = {name: getattr(hvd, name) for name in names if inspect.isroutine(getattr(hvd, name))}
functions["is_homogeneous"] = mpi_ops.is_homogeneous
basics = getattr(mpi_ops, "_basics", None)
if basics is not None:  # the real one passes on whatever it gets
    functions.update(init=basics.init, shutdown=basics.shutdown)
values = {name: int(getattr(hvd, name)) for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
print(json.dumps([names, {name: signature(function) for name, function in functions.items()}, values]))
"""


def offered(choice: str) -> Any:
    environment: Dict[str, str] = {**os.environ, "PYTHONPATH": str(SDK), "EMULATED_POD_HOROVOD": choice}
    call = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(call, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=120)
    return json.loads(done.stdout)


@pytest.mark.skipif(not has_real_horovod(), reason="no Horovod is installed (scripts/install_horovod.sh)")
def test_names_arguments_and_defaults_are_the_real_ones() -> None:
    (ours, our_signatures, our_values), (theirs, their_signatures, their_values) = offered("emulated"), offered("real")
    assert set(theirs) - set(ours) <= {"check_extension"}
    assert our_values == their_values
    for name, signature in their_signatures.items():
        if name != "check_extension":
            assert our_signatures[name] == signature, name


def test_every_name_of_the_emulated_one_is_there() -> None:
    names, signatures, _ = offered("emulated")
    assert {"allreduce_async_", "grouped_allreduce", "join", "DistributedOptimizer", "SyncBatchNorm"} <= set(names)
    assert [each[0] for each in signatures["broadcast_object"]] == ["obj", "root_rank", "name", "process_set"]
