"""`import horovod` selects the installed Horovod or the emulated one, which has its names, parameters and defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from tests.support.ranks import SDK, has_real_horovod


def fake_horovod(folder: Path, has_extension: bool) -> Path:
    package = folder / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '0.0'\n")
    (package / "__init__.py").write_text("origin = 'installed'\n")
    if has_extension:
        (package / f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    return folder


def imported(other: Path, choice: Optional[str] = None) -> str:
    program = """
        import horovod, horovod.torch as hvd
        print(getattr(hvd, "origin", "emulated"), getattr(horovod, "__version__", "-"))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SDK), str(other)])}
    environment.pop("EMULATED_POD_HOROVOD", None)
    environment.update({} if choice is None else {"EMULATED_POD_HOROVOD": choice})
    call = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(call, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.usefixtures("processes")
def test_an_installed_horovod_with_torch_support_takes_precedence_if_none_is_selected(tmp_path: Path) -> None:
    installed = fake_horovod(tmp_path, has_extension=True)
    assert imported(installed) == "installed 0.0"
    assert imported(installed, "emulated") == "emulated 0.28.1+emulated"
    assert imported(fake_horovod(tmp_path / "other", has_extension=False)).startswith("emulated 0.28.1")


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
    ours, our_signatures, our_values = interface("emulated")
    theirs, their_signatures, their_values = interface("real")
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
    expected = {
        "grouped_allreduce": ["tensors", "average", "name", "compression", "op", *factors, "process_set"],
        "allreduce_async_": ["tensor", "average", "name", "op", *factors, "process_set"],
        "reducescatter_async": ["tensor", "name", "op", "process_set", *factors],
        "grouped_allgather": ["tensors", "name", "process_set"],
        **dict.fromkeys(("broadcast_", "broadcast_async"), ["tensor", "root_rank", "name", "process_set"]),
        "alltoall": ["tensor", "splits", "name", "process_set"],
        "broadcast_object": ["obj", "root_rank", "name", "process_set"],
    }
    assert {name: parameters[name] for name in expected} == expected


def test_every_variant_has_a_name_and_documentation() -> None:
    import horovod.torch as hvd

    for name in ("allreduce_", "grouped_allreduce_async_", "allgather_async", "reducescatter"):
        function = getattr(hvd, name)
        assert function.__name__ == name
        assert function.__doc__
    assert "Returns a handle" in str(hvd.allreduce_async.__doc__)
    with pytest.raises(TypeError, match="missing a required argument: 'tensor'"):
        hvd.allreduce()
