"""The call of a survivor of a lost process, and its device, as EMULATED_POD_DEVICE_FAULT says."""

from __future__ import annotations

import os
import tempfile
from typing import Any, Callable, Dict, List

import poptorch
import pytest
import torch
from poptorch.device.execute import program

from tests.support.poptorch_models import Classifier, batch, options, seeded, wrapped

USABLE, BROKEN = "no error", "Error: Application runtime error: the device is in an error state"


def survivor(fault: str, process: int, processes: int) -> Dict[str, Any]:
    """Return how a call ends in which the other process is lost, and how the device can be used afterwards."""
    opts = options()
    opts.Distributed.configureProcessId(process, processes)
    training = wrapped(seeded(Classifier), opts)
    training(*batch(1))
    if process:
        return {}
    os.environ.update({program.FAULT_VARIABLE: fault, "EMULATED_POD_TIMEOUT_S": "0.1"})
    try:
        training(*batch(1))
    except (RuntimeError, poptorch.Error) as error:
        raised = error
    uses: List[Callable[[], Any]] = [
        lambda: training._optimizer.state_dict(),
        training.copyWeightsToHostIfNeeded,
        training.detachFromDevice,
        training.attachToDevice,
    ]
    return {
        "raised": type(raised).__name__,
        "action": getattr(raised, "recovery_action", ""),
        "uses": [error_of_use(each) for each in uses],
    }


def error_of_use(use: Callable[[], Any]) -> str:
    """Return the error of a use of the device, or USABLE."""
    try:
        use()
    except poptorch.Error as error:
        return f"Error: {error}"
    return USABLE


def nothing(process: int, processes: int) -> Any:
    return survivor("", process, processes)


def raises(process: int, processes: int) -> Any:
    return survivor("raise:LINK_RESET", process, processes)


def unusable(process: int, processes: int) -> Any:
    return survivor("unusable", process, processes)


def unrecoverable(process: int, processes: int) -> Any:
    return survivor("unrecoverable", process, processes)


def hangs(process: int, processes: int) -> Any:
    return survivor("hang", process, processes)


def unusable_by_a_file(process: int, processes: int) -> Any:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("unusable\n")
        file.flush()
        return survivor(f"@{file.name}", process, processes)


@pytest.mark.parametrize(
    ("case", "raised", "action", "is_usable"),
    [
        ("raises", "RecoverableError", "LINK_RESET", True),
        ("unusable", "RecoverableError", "IPU_RESET", False),
        ("unusable_by_a_file", "RecoverableError", "IPU_RESET", False),
        ("unrecoverable", "UnrecoverableError", "", False),
        ("hangs", "Error", "", True),
    ],
)
def test_the_loss_of_a_process_ends_the_call_of_the_other(
    case: str, raised: str, action: str, is_usable: bool, ranks: Callable[..., Any]
) -> None:
    found = ranks(__file__, [case], 2)[case][0]
    assert (found["raised"], found["action"]) == (raised, action)
    assert found["uses"] == [USABLE if is_usable else BROKEN] * 4


def test_without_a_fault_the_call_names_the_lost_process(ranks: Callable[..., Any]) -> None:
    assert ranks(__file__, ["nothing"], 2)["nothing"][0]["raised"] == "PeerFailed"


@pytest.mark.parametrize("text", ["raises", "hang:IPU_RESET", "raise:", "unusable:RESET"])
def test_an_unknown_fault_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(program.FAULT_VARIABLE, text)
    with pytest.raises(poptorch.Error, match=f"EMULATED_POD_DEVICE_FAULT={text}: must be raise, unusable, unrecov"):
        poptorch.inferenceModel(torch.nn.Linear(2, 2))(torch.ones(1, 2))
