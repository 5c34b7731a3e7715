"""The emulated `horovod.torch` has the names, parameters and defaults of the installed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Dict

import pytest

from tests.support.ranks import SDK, has_real_horovod

PROGRAM = """
import enum, inspect, json
import horovod.torch as hvd
from horovod.torch import mpi_ops

def text_of(default):
    if default is inspect.Parameter.empty:
        return "none"
    if isinstance(default, (int, float, str, bool, type(None))):
        return repr(int(default)) if isinstance(default, enum.Enum) else repr(default)
    return getattr(default, "__name__", type(default).__name__)

def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return [[each.name, each.kind.name, text_of(each.default)] for each in parameters]

names = [name for name in dir(hvd) if not name.startswith("_") and not inspect.ismodule(getattr(hvd, name))]
functions = {name: getattr(hvd, name) for name in names if inspect.isroutine(getattr(hvd, name))}
functions["is_homogeneous"] = mpi_ops.is_homogeneous
basics = getattr(mpi_ops, "_basics", None)
if basics is not None:  # the installed one's `hvd.init` takes any arguments
    functions.update(init=basics.init, shutdown=basics.shutdown)
values = {name: int(getattr(hvd, name)) for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
print(json.dumps([names, {name: signature(function) for name, function in functions.items()}, values]))
"""


def interface(choice: str) -> Any:
    environment: Dict[str, str] = {**os.environ, "PYTHONPATH": str(SDK), "EMULATED_POD_HOROVOD": choice}
    call = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(call, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=120)
    return json.loads(done.stdout)


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(not has_real_horovod(), reason="no Horovod is installed (scripts/install_horovod.sh)")
def test_names_parameters_and_defaults_equal_the_installed_ones() -> None:
    (ours, our_signatures, our_values), (theirs, their_signatures, their_values) = (
        interface("emulated"),
        interface("real"),
    )
    assert set(theirs) - set(ours) <= {"check_extension"}
    assert our_values == their_values
    for name, signature in their_signatures.items():
        if name != "check_extension":
            assert our_signatures[name] == signature, name


@pytest.mark.usefixtures("processes")
def test_variants_of_collectives_have_horovods_parameters() -> None:
    names, signatures, _ = interface("emulated")
    assert {"allreduce_async_", "grouped_allreduce", "join", "DistributedOptimizer", "SyncBatchNorm"} <= set(names)
    parameters = {name: [each[0] for each in signature] for name, signature in signatures.items()}
    factors = ["prescale_factor", "postscale_factor"]
    allreduce = ["average", "name", "compression", "op", *factors, "process_set"]
    assert parameters["grouped_allreduce"] == ["tensors", *allreduce]
    assert parameters["allreduce_async_"] == ["tensor", "average", "name", "op", *factors, "process_set"]
    assert parameters["reducescatter_async"] == ["tensor", "name", "op", "process_set", *factors]
    assert parameters["grouped_allgather"] == ["tensors", "name", "process_set"]
    assert parameters["broadcast_"] == parameters["broadcast_async"] == ["tensor", "root_rank", "name", "process_set"]
    assert parameters["alltoall"] == ["tensor", "splits", "name", "process_set"]
    assert parameters["broadcast_object"] == ["obj", "root_rank", "name", "process_set"]


def test_every_variant_has_a_name_and_documentation() -> None:
    import horovod.torch as hvd

    for name in ("allreduce_", "grouped_allreduce_async_", "allgather_async", "reducescatter"):
        function = getattr(hvd, name)
        assert function.__name__ == name
        assert function.__doc__
    assert "Returns a handle" in str(hvd.allreduce_async.__doc__)
    with pytest.raises(TypeError, match="missing a required argument: 'tensor'"):
        hvd.allreduce()
