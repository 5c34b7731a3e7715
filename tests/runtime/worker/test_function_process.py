"""What a function of `raypod.run` returns or raises in an instance."""

from __future__ import annotations

import os
import select
import sys
import threading
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from raypod.errors import ClusterError
from raypod.runtime.worker.collectives import ProcessGroup
from raypod.runtime.worker.function_process import FunctionProcess, Outcome, pack, unpack


class Unpicklable(Exception):
    """Cannot be made from its pickled arguments."""

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


def test_a_result_is_pickled() -> None:
    found = outcome_of(lambda value: {"value": value + 1}, 3)
    assert (unpack(found.value), found.cause, found.trace) == ({"value": 4}, "", "")


@pytest.mark.parametrize(
    ("how", "cause", "kind"),
    [
        ("unpicklable", "Unpicklable: 1 and 2", None),
        ("exit", "SystemExit: 3", SystemExit),
        ("raise", "ZeroDivisionError: here", ZeroDivisionError),
        ("return", "the result, of type generator, cannot be pickled", TypeError),
    ],
)
def test_an_exception_has_its_cause_its_traceback_and_itself(how: str, cause: str, kind: Any) -> None:
    found = outcome_of(fails, how)
    assert cause in found.cause
    assert not found.is_of_peer
    assert (found.value == b"") is (kind is None)
    assert kind is None or isinstance(cloudpickle.loads(found.value), kind)
    assert ("in fails" in found.trace) is (how != "return")


def test_an_instance_is_bound_to_the_data_network_and_a_host_outside_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        monkeypatch.setenv(name, "other")
    assert ProcessGroup("127.0.0.0/8").data_address() == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["HOROVOD_GLOO_IFACE"] == "lo"
    assert ProcessGroup(None).data_address() is None
    outside = r"has no address in metadata\.raypod\.data_network 10\.213\.0\.0/30; it has lo "
    with pytest.raises(ClusterError, match=outside):
        ProcessGroup("10.213.0.0/30").data_address()


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
