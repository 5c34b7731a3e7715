"""The number and the CPUs of the threads in which replicas run, which change no result."""

from __future__ import annotations

import os
import threading

import poptorch
import pytest
import torch
from poptorch_models import Classifier, options, seeded

AT_A_TIME, CPUS = "EMULATED_POD_REPLICAS_AT_A_TIME", "EMULATED_POD_REPLICA_CPUS"


def trained(seen):
    """Return the weights after two updates of four replicas; add (thread, its CPUs) of each forward to `seen`."""

    class Observed(Classifier):
        def forward(self, images, labels=None):
            seen.add((threading.current_thread().name, tuple(sorted(os.sched_getaffinity(0)))))
            return super().forward(images, labels)

    model = seeded(Observed, dropout=0.25)
    chosen = options(replicas=4, accumulation=2)
    chosen.randomSeed(7)
    training = poptorch.trainingModel(model, chosen, poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    torch.manual_seed(3)
    for _ in range(2):
        training(torch.randn(16, 3, 8, 8), torch.randint(5, (16,)))
    training.copyWeightsToHost()
    training.destroy()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_threads_and_their_cpus_change_no_bit(monkeypatch):
    monkeypatch.setenv(AT_A_TIME, "1")
    seen = set()
    expected = trained(seen)
    assert len({thread for thread, _ in seen if thread.startswith("replica")}) == 1

    allowed = sorted(os.sched_getaffinity(0))
    bound = [[allowed[0]], [allowed[-1]], allowed]
    monkeypatch.setenv(CPUS, ";".join(",".join(map(str, cpus)) for cpus in bound))
    seen = set()
    found = trained(seen)
    of_replicas = sorted(cpus for thread, cpus in seen if thread.startswith("replica"))
    assert of_replicas == sorted(tuple(cpus) for cpus in bound)
    assert sorted(os.sched_getaffinity(0)) == allowed  # those of the caller's thread
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (AT_A_TIME, "0", "EMULATED_POD_REPLICAS_AT_A_TIME=0: must be a whole number, 1 or more"),
        (AT_A_TIME, "two", "must be a whole number"),
        (CPUS, "0;", "EMULATED_POD_REPLICA_CPUS=0;: must be lists of CPUs, as in 0,1;2,3"),
    ],
)
def test_an_invalid_variable_is_an_error(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(poptorch.Error, match=words):
        trained(set())
