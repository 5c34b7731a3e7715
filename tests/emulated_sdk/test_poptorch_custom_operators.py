"""`custom_op` on the device: Python implementations by name, their gradients, and what is rejected."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import poptorch
import pytest
import torch
from poptorch.custom_operators import registry
from poptorch.emulation import custom_op_emulation
from torch import nn

from tests.support import ROOT
from tests.support.poptorch_models import Apply, on_device, options, wrapped

PAGE = ROOT / "docs" / "reference" / "emulated-sdk.md"


@custom_op_emulation("Cube", domain="com.acme")
def cube(x, bias, alpha=1.0, name=""):
    values = x.tolist()  # an implementation may read values, and is no operator of the program
    return torch.triu(x**3).mul(alpha) + bias, torch.tensor([len(values)])


@custom_op_emulation("RoundTwice", domain="com.acme", version=2)
def round_twice(x):
    return torch.round(x)


@round_twice.backward
def _round_twice_backward(inputs, outputs, gradients):
    assert torch.equal(outputs[0], inputs[0].round())
    return 2 * gradients[0]


def call_cube(x, bias, **attributes):
    examples = [x, torch.zeros(1, dtype=torch.int32)]
    return poptorch.custom_op([x, bias], "Cube", "com.acme", 1, examples, attributes)


def test_an_implementation_computes_what_custom_op_returns_on_the_device(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    x, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 2)
    y, count = on_device(lambda x, bias: call_cube(x, bias, alpha=2.0, name="a"), x, bias)
    assert torch.equal(y, torch.triu(x**3) * 2 + 1)
    assert (count.tolist(), count.dtype) == ([2], torch.int32)
    assert torch.equal(on_device(lambda x, bias: call_cube(x, bias)[0], x, bias), torch.triu(x**3) + 1)


def test_half_tensors_are_passed_as_they_are():
    x = torch.full((2, 2), 0.1, dtype=torch.half)
    y = on_device(lambda x: call_cube(x, torch.zeros_like(x))[0], x)
    assert (y.dtype, y[0, 1]) == (torch.half, (x[0, 1].float() ** 3).half())


class Weighted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), 1.25))
        self.function = function

    def forward(self, x):
        return poptorch.identity_loss(self.function(self.weight * x), "sum")


@pytest.mark.parametrize("is_plain", [True, False])
def test_gradients_are_those_of_autograd_or_of_a_backward_function(is_plain):
    x = torch.full((2, 2), 2.0)

    def weights_after(function):
        model = Weighted(function if is_plain else lambda x: function(x).to(torch.float64))
        wrapped(model, lr=1.0)(x)
        return model.weight.detach()

    by_autograd = weights_after(lambda x: call_cube(x, torch.zeros(2, 2))[0])
    assert torch.equal(by_autograd, 1.25 - torch.triu(torch.full((2, 2), 3 * 2.5**2 * 2)))
    by_function = weights_after(lambda x: poptorch.custom_op([x], "RoundTwice", "com.acme", 2, [x])[0])
    assert torch.equal(by_function, torch.full((2, 2), 1.25 - 2 * 2))


def test_an_output_that_is_the_input_is_a_copy():
    custom_op_emulation("Same", domain="com.acme")(lambda x: x)

    def change(x):
        return poptorch.custom_op([x], "Same", "com.acme", 1, [x])[0].add_(1), x

    assert [each.item() for each in on_device(change, torch.ones(1))] == [2.0, 1.0]


def test_a_function_that_does_not_take_the_attributes_is_an_error():
    with pytest.raises(poptorch.Error, match=r"cube, which emulates com.acme.Cube:1: .*'beta'.*2 inputs and .*: beta"):
        on_device(lambda x: call_cube(x, x, beta=1)[0], torch.ones(1))


@pytest.mark.parametrize("returned", [torch.ones(2), torch.ones(3, dtype=torch.half), (torch.ones(3), torch.ones(1))])
def test_other_outputs_than_those_of_the_examples_are_an_error(returned):
    custom_op_emulation("Wrong", domain="com.acme")(lambda x: returned)
    with pytest.raises(poptorch.Error, match=r"com.acme.Wrong:1: its emulation returned .*example_.* float32\[3\]"):
        on_device(lambda x: poptorch.custom_op([x], "Wrong", "com.acme", 1, [x])[0], torch.ones(3))


def test_what_is_no_tensor_or_lacks_gradients_is_an_error():
    custom_op_emulation("List", domain="com.acme")(lambda x: 1.0)
    with pytest.raises(poptorch.Error, match="List:1: the outputs must be tensors, not float"):
        on_device(lambda x: poptorch.custom_op([x], "List", "com.acme", 1, [x])[0], torch.ones(3))
    lacking = custom_op_emulation("Lacking", domain="com.acme")(lambda x: x * 1)
    lacking.backward(lambda inputs, outputs, gradients: ())
    model = Weighted(lambda x: poptorch.custom_op([x], "Lacking", "com.acme", 1, [x])[0])
    with pytest.raises(poptorch.Error, match="Lacking:1: backward returned 0 gradients for 1 inputs"):
        wrapped(model)(torch.ones(2, 2))


def test_an_operator_without_an_implementation_is_an_error_with_the_hook():
    message = (
        r"com.acme.Missing:3 is C\+\+ for the IPU.*@custom_op_emulation\('Missing', domain='com.acme', version=3\) of "
        r"poptorch.emulation, in a module that EMULATED_POD_CUSTOM_OPS names"
    )
    with pytest.raises(poptorch.Error, match=message):
        on_device(lambda x: poptorch.custom_op([x], "Missing", "com.acme", 3, [x])[0], torch.ones(1))


def test_a_named_module_registers_its_implementations(monkeypatch, tmp_path):
    (tmp_path / "other_operators.py").write_text(
        "from poptorch.emulation import custom_op_emulation\n"
        "@custom_op_emulation('Named', domain='com.acme', version=4)\n"
        "def named(x): return x + 4\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "json, other_operators")

    def call(x):
        return torch.ops.poptorch.custom_operation([x], "Named", "com.acme", 4, 1, [x], "")[0]

    assert on_device(call, torch.ones(1)).item() == 5.0
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "no_such_module")
    with pytest.raises(poptorch.Error, match="EMULATED_POD_CUSTOM_OPS=no_such_module cannot be imported: .*PYTHONPATH"):
        on_device(call, torch.ones(1))


def test_an_entry_point_registers_its_implementations(monkeypatch):
    def load():
        custom_op_emulation("Entered", domain="com.acme")(lambda x: x + 7)

    found = SimpleNamespace(
        select=lambda group: [SimpleNamespace(name="own", load=load)] * (group == registry.ENTRY_POINTS)
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: found)
    registry._entry_points.cache_clear()
    try:
        result = on_device(lambda x: poptorch.custom_op([x], "Entered", "com.acme", 1, [x])[0], torch.ones(1))
    finally:
        registry._entry_points.cache_clear()
    assert result.item() == 8.0


def test_a_constant_of_the_host_as_an_input_is_rejected(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    constant = torch.zeros(2, 2)
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        on_device(lambda x: call_cube(x, constant)[0], torch.ones(2, 2))


def test_an_input_of_the_host_module_is_the_tensor_of_the_device():
    layer = nn.Linear(2, 2)

    def forward(x):
        y, _ = call_cube(layer.weight, x)
        return poptorch.identity_loss(y, "sum")

    model = Apply(forward)
    model.layer = layer
    before = layer.weight.detach().clone()
    wrapped(model, options(), lr=1.0)(torch.zeros(2, 2))
    assert torch.allclose(layer.weight, before - torch.triu(3 * before**2))


@pytest.mark.parametrize("load", [ctypes.cdll.LoadLibrary, torch.ops.load_library])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_library_that_cannot_be_loaded_is_one_warning_if_a_module_is_named(
    monkeypatch, caplog, tmp_path, load, is_empty
):
    path = tmp_path / f"custom_ops_{load.__name__}_{is_empty}.so"
    if is_empty:
        path.touch()
    with pytest.raises(OSError, match=path.name):
        load(str(path))
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "json")
    for _ in range(2):
        library = load(str(path))
    assert [record.message.split(": ")[0] for record in caplog.records] == [f"{path} was not loaded"]
    with pytest.raises(AttributeError, match="has no 'add' here"):
        library.add(1)


@pytest.mark.parametrize("name", ["libraypod_absent.so", "libabsent.so.1", "/usr/lib/absent.so", "./absent.txt"])
def test_loads_of_other_libraries_are_unchanged(monkeypatch, name):
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "json")
    assert ctypes.cdll.LoadLibrary(None).getpid
    with pytest.raises(OSError, match="absent"):
        ctypes.cdll.LoadLibrary(name)


def test_the_documented_program_trains(monkeypatch, tmp_path, capsys):
    section = PAGE.read_text().partition("\n## Custom operators")[2].partition("\n## ")[0]
    operators, program = re.findall("```python\n(.*?)```", section, re.S)
    (tmp_path / "own_operators.py").write_text(operators)
    (tmp_path / "leaky.py").write_text(program)
    assert "EMULATED_POD_CUSTOM_OPS=own_operators raypod launch --device emulated python leaky.py" in section
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "own_operators")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_operators", raising=False)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("leaky.py")
    first, last = map(float, re.findall(r"loss (.+) -> (.+)\n", capsys.readouterr().out)[0])
    assert last < first / 2


def test_a_library_is_tolerated_before_poptorch_is_imported(processes, tmp_path):
    program = "import ctypes, sys; ctypes.cdll.LoadLibrary('./own.so'); print('poptorch' in sys.modules)"
    paths = [ROOT / "raypod" / "host" / "startup", ROOT / "raypod" / "emulated_sdk"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "EMULATED_POD_CUSTOM_OPS": "json"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "True\n"
    assert "./own.so was not loaded" in ended.stderr
