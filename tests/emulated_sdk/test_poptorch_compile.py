"""EMULATED_POD_COMPILE=1: training programs compiled by torch.compile's kernels, and what they reject."""

from __future__ import annotations

import os
import shutil
from typing import Any, Dict, Sequence

import poptorch
import pytest
import torch
from poptorch.device.compile import compilation
from torch import nn

from tests.support.poptorch_models import options, seeded, wrapped
from tests.support.ranks import run_ranks

VARIABLE = "EMULATED_POD_COMPILE"
IS_OLD = not hasattr(torch, "export")  # 2.0
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch._inductor
needs_compiler = pytest.mark.skipif(IS_OLD or shutil.which("g++") is None, reason="torch 2.1 and a C++ compiler")


class Net(nn.Module):
    """Shares a weight between two layers, and updates statistics."""

    def __init__(self, dropout: float = 0.0, half: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.dropout, self.half_ = nn.Dropout(dropout), half

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> Dict[str, Any]:
        hidden = self.dropout(nn.functional.gelu(self.norm(self.first(rows))))
        logits = self.second(hidden).softmax(-1)
        logits = logits.half().float() if self.half_ else logits
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def train(rank: int, size: int, arguments: Any = None, anchored: Sequence[str] = ()) -> Dict[str, torch.Tensor]:
    """Train on the share of one of `size` processes of 2 replicas in all; return the state and the outputs."""
    opts = options(2 // size, accumulation=2)
    opts.Distributed.configureProcessId(rank, size)
    for name in anchored:
        opts.anchorTensor("anchor", name)
    training = wrapped(seeded(Net, **(arguments or {})), opts, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = torch.randn(2, 2, 4, 16, generator=generator)  # step, replica, sample
        mine = slice(rank * 2 // size, (rank + 1) * 2 // size)
        outputs = training(rows[:, mine].flatten(0, 2).contiguous(), torch.arange(4).repeat(4 // size))
    training.copyWeightsToHost()
    found = {f"host {key}": value.clone() for key, value in training.model.state_dict().items()}
    return {**found, **{key: value for key, value in outputs.items() if size == 1}}


def compiled(rank: int, size: int) -> Dict[str, torch.Tensor]:
    os.environ[VARIABLE] = "1"
    return train(rank, size)


@needs_compiler
def test_a_compiled_program_trains_as_the_operators_with_other_bits(monkeypatch, processes):
    monkeypatch.setenv(VARIABLE, "0")
    expected = train(0, 1)
    monkeypatch.setenv(VARIABLE, "1")
    found = train(0, 1)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), atol=1e-5), name
    assert any(not torch.equal(found[name], value) for name, value in expected.items()), "compiled kernels ran"


@needs_compiler
def test_the_bits_of_a_compiled_program_do_not_depend_on_the_placement(monkeypatch, processes):
    monkeypatch.setenv(VARIABLE, "1")
    expected = train(0, 1)
    for found in run_ranks(__file__, ["compiled"], 2)["compiled"]:
        different = {key for key, value in found.items() if not torch.equal(expected[key], value)}
        assert not {key for key in different if "running" not in key}, "only statistics are those of a replica"


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "anchored", "words"),
    [
        ({"dropout": 0.1}, (), "draws random numbers"),
        ({"half": True}, (), "computes in half"),
        ({}, ("first.weight",), "has anchored tensors"),
    ],
)
def test_a_forward_that_cannot_be_compiled_is_an_error(monkeypatch, arguments, anchored, words):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(poptorch.Error, match=f"{VARIABLE}=1: forward {words}"):
        train(0, 1, arguments, anchored)


def test_a_host_that_cannot_compile_and_an_unknown_value_are_errors(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(poptorch.Error, match=f"{VARIABLE}='yes': must be 0 or 1"):
        train(0, 1)
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = "needs torch 2.1 or later" if IS_OLD else "needs a C\\+\\+ compiler, and there is no no-such-compiler"
    with pytest.raises(poptorch.Error, match=words):
        train(0, 1)


def test_compiled_code_is_not_in_a_folder_that_others_can_write_to(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "raypod" / "inductor"
    compilation._use_own_inductor_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    with pytest.raises(poptorch.Error, match="writable by other users"):
        compilation._use_own_inductor_cache()
