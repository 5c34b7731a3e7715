"""Which errors mean that another instance failed."""

from __future__ import annotations

from typing import Optional

import horovod.torch as hvd
import poptorch
import poptorch.errors
import pytest
from _pod.store_protocol import PeerFailed

from raypod.instance import collectives

APPLICATION = "poplar_application_runtime_error"


@pytest.mark.parametrize(
    ("error", "is_of_peer"),
    [
        (hvd.HorovodInternalError("rank 1 has ended"), True),
        (poptorch.RecoverableError("the device run has ended"), True),
        (poptorch.UnrecoverableError("the device run has ended"), True),
        (poptorch.Error("Application runtime error: the device run has ended"), True),
        (poptorch.Error("the device run has ended", APPLICATION), True),
        (poptorch.Error("Host-sync with GCD 1 timed out after 300 s"), True),
        (poptorch.Error("HostSync timeout"), True),
        (poptorch.Error("Floating point exception in tile 3", APPLICATION), False),
        (poptorch.Error("The arguments differ from the compiled ones"), False),
        (RuntimeError("host sync timeout"), False),
        (poptorch.errors.DataFetcherError("the data set raised ValueError"), False),
    ],
)
def test_a_plain_error_of_poptorch_can_be_that_of_a_peer(error: Exception, is_of_peer: bool) -> None:
    assert collectives.caused_by_peer(error) is is_of_peer


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (poptorch.RecoverableError("a link is down", recovery_action="PARTITION_RESET"), "PARTITION_RESET"),
        (poptorch.UnrecoverableError("a parity error"), "UNRECOVERABLE"),
        (poptorch.Error("the device run has ended", APPLICATION), ""),
        (poptorch.Error("Floating point exception in tile 3", APPLICATION), None),
        (hvd.HorovodInternalError("rank 1 has ended"), None),
        (PeerFailed("rank 1 has ended"), None),
    ],
)
def test_an_error_of_the_core_means_that_the_state_of_the_device_is_unknown(
    error: Exception, action: Optional[str]
) -> None:
    assert collectives.device_failure(error) == action
