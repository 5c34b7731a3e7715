"""The device's optimizers run without torch's compiler and wrappers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from poptorch.optimizers.device_optimizer import plain_step

PROGRAM = """
import sys, torch, poptorch
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss())
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(torch.nn.functional.dropout(self.layer(x)), y)
net = Net()
optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
options = poptorch.Options().showCompilationProgressBar(False)
training = poptorch.trainingModel(net, options, optimizer)
for _ in range(3):
    training(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
optimizer.state_dict()
assert "torch._dynamo" not in sys.modules
"""


def test_training_does_not_import_torch_dynamo() -> None:
    """The import takes more than a second per process."""
    command = [sys.executable, "-c", PROGRAM]
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.parametrize("algorithm", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_plain_step_equals_step(algorithm: type) -> None:
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2)]
    optimizers = [algorithm([weight], lr=0.1) for weight in weights]
    for number in range(3):
        for weight in weights:
            weight.grad = torch.linspace(0, number, 7)
        optimizers[0].step()
        plain_step(optimizers[1])
    assert torch.equal(weights[0], weights[1])
    assert optimizers[1].state[weights[1]].keys() == optimizers[0].state[weights[0]].keys()
