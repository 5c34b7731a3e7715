"""Which errors mean that another instance failed."""

from __future__ import annotations

from typing import Callable, Optional

import horovod.torch as hvd
import poptorch
import poptorch.errors
import pytest
from _pod.store_protocol import PeerFailed

from raypod.errors import CollectiveBroken, DeviceFailed
from raypod.plan.plan import Plan
from raypod.runtime.worker import collectives
from raypod.runtime.worker.process import InstanceProcess

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


@pytest.mark.parametrize(
    ("error", "instances", "kind", "action"),
    [
        (poptorch.RecoverableError("a link is down", recovery_action="LINK_RESET"), 1, DeviceFailed, "LINK_RESET"),
        (poptorch.Error("the device run has ended", APPLICATION), 2, DeviceFailed, ""),
        (poptorch.Error("the device run has ended", APPLICATION), 1, poptorch.Error, None),
        (PeerFailed("rank 1 has ended"), 2, CollectiveBroken, None),
        (PeerFailed("rank 1 has ended"), 1, PeerFailed, None),
    ],
)
def test_the_process_of_an_instance_reports_an_error_of_its_device_and_of_a_peer(
    make: Callable[..., Plan], error: Exception, instances: int, kind: type, action: Optional[str]
) -> None:
    process = object.__new__(InstanceProcess)  # without the output and the thread of a real one
    process._plan, process._index = make(pod={"num_instances": instances}), 0
    with pytest.raises(Exception, match=str(error)) as raised, process._convert_peer_errors():
        raise error
    assert (type(raised.value), getattr(raised.value, "recovery_action", None)) == (kind, action)
