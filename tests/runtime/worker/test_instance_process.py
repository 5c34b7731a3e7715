"""What the process of an instance reports: exceptions, warnings, results of functions, errors of peers and devices."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import traceback
import warnings
from typing import Any, Callable, Iterator, Optional

import cloudpickle  # type: ignore[import-untyped]
import horovod.torch as hvd
import poptorch
import poptorch.errors
import pytest
from _pod.store_protocol import PeerFailed

from raypod.errors import ClusterError, CollectiveBroken, ConfigError, DeviceFailed
from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.runtime.worker import collectives, process
from raypod.runtime.worker.collectives import ProcessGroup
from raypod.runtime.worker.function_process import FunctionProcess, Outcome, pack, unpack
from raypod.runtime.worker.process import InstanceProcess, WarningRecord

RESET = "[Errno 104] Connection reset by peer"


def lose_the_connection(what: str = "rank 0 of 2: a peer has ended") -> None:
    try:
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except OSError as error:
            raise RuntimeError(what) from error
    except RuntimeError as error:
        raise CollectiveBroken(0, str(error)) from error


def abort_an_evaluation() -> None:
    raise CollectiveBroken(0, "the evaluation was aborted")


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (lose_the_connection, f"rank 0 of 2: a peer has ended (ConnectionResetError: {RESET})"),
        (lambda: lose_the_connection(f"lost the connection [{RESET}]"), f"lost the connection [{RESET}]"),
        (abort_an_evaluation, "the evaluation was aborted"),
    ],
)
def test_a_survivor_of_a_failure_writes_one_line(work: Any, cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CollectiveBroken):
        process._log_errors(work)
    expected = f"the collective with the other instances is broken: {cause}\n"
    assert capfd.readouterr().err == expected


def test_every_other_exception_has_its_traceback_and_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer") as caught:
        process._log_errors(fail)
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("ValueError: no such layer\n")
    caught.value.__traceback__ = None
    assert user_code.place_of(caught.value).endswith(", in fail)")


@pytest.mark.parametrize("kind", [ConfigError, OSError, ValueError])
def test_an_exception_that_ray_could_not_send_has_readable_bytes(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        try:
            raise FileNotFoundError("caf\udce9")
        except FileNotFoundError as error:
            raise kind("cannot read the image") from error

    with pytest.raises((ConfigError, RuntimeError)) as caught:
        process._log_errors(fail)
    text = "".join(traceback.format_exception(type(caught.value), caught.value, caught.value.__traceback__))
    assert "cannot read the image" in text.encode().decode()
    assert isinstance(caught.value, ConfigError) == (kind is ConfigError)
    assert "caf\\udce9" in capfd.readouterr().err


SDK = logging.getLogger("poptorch::python")


@pytest.fixture
def record() -> Iterator[WarningRecord]:
    """An installed record, of which nothing remains afterwards."""
    filters = list(SDK.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: None
        found = WarningRecord()
        found.install()
        yield found
    SDK.filters[:] = filters


def warn(text: str, category: Any = UserWarning) -> None:
    warnings.warn(text, category, stacklevel=1)


def test_each_warning_is_taken_once_with_its_place_and_limits(record: WarningRecord) -> None:
    for category in (DeprecationWarning, FutureWarning, ResourceWarning):  # about future versions
        warn("old", category)
    for text in ("two\n  lines", "two lines", "other"):
        warn(text)
    first, other = record.take()
    assert first.startswith("UserWarning: two lines (test_instance_process.py:")
    assert first.endswith(", in warn)")
    assert other.startswith("UserWarning: other (")
    warn("other")
    assert record.take() == ()
    for number in range(20):
        warn(f"{number} {'x' * 1000}")
    taken = record.take()
    assert len(taken) == 8  # with the two before
    assert all(len(text) < 600 for text in taken)


def test_warnings_of_python_and_the_sdk_are_shown(record: WarningRecord, caplog: pytest.LogCaptureFixture) -> None:
    shown = []
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        WarningRecord().install()
        warn("shown")
    with caplog.at_level(logging.INFO, SDK.name):
        SDK.warning("Unsupported ops: %s", "[aten::huber_loss]")
        SDK.info("compiled")
    assert (shown, caplog.messages) == (["shown"], ["Unsupported ops: [aten::huber_loss]", "compiled"])
    assert record.take() == ("Unsupported ops: [aten::huber_loss]",)


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def outcome_of(function: Any, *arguments: Any) -> Outcome:
    process = object.__new__(FunctionProcess)
    process._collect_output = lambda: None  # type: ignore[method-assign]
    return process._call(pack(function, arguments, {}))


def fails(how: str) -> Any:
    if how == "unpicklable":
        raise Unpicklable(1, 2)
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ZeroDivisionError("here")
    return (each for each in "a generator")


@pytest.mark.parametrize(
    ("how", "cause", "kind"),
    [
        ("unpicklable", "Unpicklable: 1 and 2", None),
        ("exit", "SystemExit: 3", SystemExit),
        ("raise", "ZeroDivisionError: here", ZeroDivisionError),
        ("return", "the result, of type generator, cannot be pickled", TypeError),
    ],
)
def test_a_result_is_pickled_and_an_exception_has_its_cause_and_traceback(how: str, cause: str, kind: Any) -> None:
    found = outcome_of(fails, how)
    assert cause in found.cause
    assert not found.is_of_peer
    assert (found.value == b"") is (kind is None)
    assert kind is None or isinstance(cloudpickle.loads(found.value), kind)
    assert ("in fails" in found.trace) is (how != "return")
    good = outcome_of(lambda value: {"value": value + 1}, 3)
    assert (unpack(good.value), good.cause, good.trace) == ({"value": 4}, "", "")


def test_an_instance_is_bound_to_the_data_network_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        monkeypatch.setenv(name, "other")
    assert ProcessGroup("127.0.0.0/8").data_address() == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["HOROVOD_GLOO_IFACE"] == "lo"
    assert ProcessGroup(None).data_address() is None
    outside = r"has no address in metadata\.raypod\.data_network 10\.213\.0\.0/30; it has lo "
    with pytest.raises(ClusterError, match=outside):
        ProcessGroup("10.213.0.0/30").data_address()


APPLICATION = "poplar_application_runtime_error"


@pytest.mark.parametrize(
    ("error", "is_of_peer", "action"),
    [
        (hvd.HorovodInternalError("rank 1 has ended"), True, None),
        (PeerFailed("rank 1 has ended"), True, None),
        (poptorch.RecoverableError("the device run has ended"), True, "IPU_RESET"),
        (poptorch.RecoverableError("a link is down", recovery_action="PARTITION_RESET"), True, "PARTITION_RESET"),
        (poptorch.UnrecoverableError("the device run has ended"), True, "UNRECOVERABLE"),
        (poptorch.Error("Application runtime error: the device run has ended"), True, ""),
        (poptorch.Error("the device run has ended", APPLICATION), True, ""),
        (poptorch.Error("Host-sync with GCD 1 timed out after 300 s"), True, ""),
        (poptorch.Error("HostSync timeout"), True, ""),
        (poptorch.Error("Floating point exception in tile 3", APPLICATION), False, None),
        (poptorch.Error("The arguments differ from the compiled ones"), False, None),
        (RuntimeError("host sync timeout"), False, None),
        (poptorch.errors.DataFetcherError("the data set raised ValueError"), False, None),
    ],
)
def test_errors_of_peers_and_of_the_device(error: Exception, is_of_peer: bool, action: Optional[str]) -> None:
    assert (collectives.caused_by_peer(error), collectives.device_failure(error)) == (is_of_peer, action)


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
def test_the_process_reports_an_error_of_its_device_and_of_a_peer(
    make: Callable[..., Plan], error: Exception, instances: int, kind: type, action: Optional[str]
) -> None:
    process = object.__new__(InstanceProcess)  # without the output and the thread of a real one
    process._plan, process._index = make(pod={"num_instances": instances}), 0
    with pytest.raises(Exception, match=str(error)) as raised, process._convert_peer_errors():
        raise error
    assert (type(raised.value), getattr(raised.value, "recovery_action", None)) == (kind, action)


def test_the_output_of_a_call_is_complete_when_it_returns() -> None:
    process: Any = object.__new__(FunctionProcess)
    reader, writer = os.pipe()
    process._pipes, process._output_lock = [reader], threading.Lock()
    os.write(writer, b"late")
    thread = threading.Timer(0.1, os.read, (reader, 100))
    thread.start()
    process._collect_output()
    assert not select.select([reader], [], [], 0)[0]
    thread.join()
    os.close(reader)
    os.close(writer)
