"""Tests of system/torchvision_import beside another program that declares torchvision's operators, too."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from typing import Callable

import pytest

from raypod.system import torchvision_import

DECLARE = """
import torch
shim = torch.library.Library("torchvision", "DEF")
for name in {names}:
    shim.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
IMPORT = """
from raypod.system import torchvision_import
torchvision_import.install()
import torch, torchvision
print(len(list(torchvision.models.resnet18().parameters())))
"""
# An import hook that declares the operators just before it executes torchvision, as raypod's did.
HOOK = """
import importlib.abc, importlib.machinery, sys
class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def declare_and_execute(module):
            exec(DECLARE, globals())
            execute(module)
        spec.loader.exec_module = declare_and_execute
        return spec
"""


@pytest.fixture(scope="module")
def library_is_not_loaded() -> None:
    torchvision_import.install()
    if importlib.import_module("torchvision.extension")._has_ops():
        pytest.skip("torchvision loads its C++ library here, which itself allows no other declaration")


@pytest.mark.usefixtures("library_is_not_loaded")
@pytest.mark.parametrize("names", [(), ("nms",), ("nms", "qnms")])
def test_operators_that_are_already_declared_are_kept(run_python: Callable[[str], str], names: tuple[str, ...]) -> None:
    assert run_python(DECLARE.format(names=names) + IMPORT) == "62\n"


@pytest.mark.usefixtures("library_is_not_loaded")
@pytest.mark.parametrize("position", [0, 1])
def test_another_import_hook_may_come_first_or_last(run_python: Callable[[str], str], position: int) -> None:
    install = IMPORT.replace("import torch,", f"sys.meta_path.insert({position}, Hook())\nimport torch,", 1)
    assert run_python(f"DECLARE = {DECLARE.format(names=('nms', 'qnms'))!r}\n{HOOK}{install}") == "62\n"


def test_torchs_compiler_is_imported_only_when_it_is_asked_for(run_python: Callable[[str], str]) -> None:
    """It takes seconds and 64 MiB in every process of a run with a model of torchvision."""
    before = IMPORT + "import sys\nprint('torch._dynamo' in sys.modules)\n"
    asked = (
        "asks = getattr(sys.modules['torchvision.ops.roi_align'], 'is_compile_supported', None)\n"
        "print(asks is None or (asks('cpu') in (True, False) and 'torch._dynamo' in sys.modules))"
    )
    assert run_python(before + asked) == "62\nFalse\nTrue\n"


def test_a_module_keeps_its_usual_loader() -> None:
    spec = importlib.machinery.PathFinder.find_spec("colorsys")
    assert spec is not None
    usual, spec.loader = spec.loader, torchvision_import._LateLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__loader__ is spec.loader is usual
    assert module.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
