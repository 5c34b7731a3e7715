"""`hvd.init` of the emulated Horovod in one process: environment variables, and an `init` that fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import _basics

from tests.support.ranks import error_of


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    ("variables", "position"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (0, 1, 0, 1, 0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "HOROVOD_CROSS_SIZE": "3"}, (0, 1, 0, 1, 0, 3)),
        ({"POPDIST_NUM_TOTAL_REPLICAS": "2", "POPDIST_NUM_LOCAL_REPLICAS": "2"}, (0, 1, 0, 1, 0, 1)),
    ],
)
def test_rank_and_size_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: Dict[str, str], position: Any
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert tuple(_basics.determine_position()) == position


def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "many")
    with pytest.raises(RuntimeError, match="HOROVOD_SIZE='many'"):
        hvd.init()


def test_an_init_that_raises_is_undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    with pytest.raises(UserWarning, match="HOROVOD_LOG_LEVEL"):  # warnings are errors
        hvd.init()
    assert not hvd.is_initialized()
    monkeypatch.delenv("HOROVOD_LOG_LEVEL")
    hvd.init()
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def test_a_timeline_that_cannot_be_opened_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "timeline.json")
    monkeypatch.setenv("HOROVOD_TIMELINE", path)
    with pytest.warns(UserWarning, match="the Horovod timeline is not written: .*No such file"):
        hvd.init()
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    with pytest.warns(UserWarning, match="timeline is not written"):
        hvd.start_timeline(path)


@pytest.mark.parametrize(
    ("text", "marks_cycles", "is_dynamic", "counts_as"),
    [
        ("1", True, True, None),
        (" 2", True, True, None),
        ("1st", True, True, 1),
        ("true", False, False, 0),
        ("", False, False, None),
        ("0", False, False, None),
        ("-1", False, True, None),  # `> 0` and `!= 0`, as in Horovod
    ],
)
def test_boolean_variables_are_read_as_horovod_does(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    marks_cycles: bool,
    is_dynamic: bool,
    counts_as: Optional[int],
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", text)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", text)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hvd.init()
    hvd.allreduce(torch.ones(1))
    refusal = error_of(lambda: hvd.add_process_set([0]))  # the ranks of the global process set
    hvd.shutdown()
    assert ("CYCLE_START" in (tmp_path / "timeline.json").read_text()) == marks_cycles
    assert ("duplicate" in refusal) == is_dynamic
    assert len(found) == (counts_as is not None)
    for each in found:
        assert f"HOROVOD_TIMELINE_MARK_CYCLES={text!r} (not a number: it counts as {counts_as})" in str(each.message)
        assert f"HOROVOD_DYNAMIC_PROCESS_SETS={text!r}" in str(each.message)


def test_variables_set_by_the_launcher_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["GLOO_IFACE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "HOSTNAME", "CONTROLLER", "CPU_OPERATIONS"]
    for name in names:
        monkeypatch.setenv(f"HOROVOD_{name}", "gloo")
    for name in ("EMULATED_POD_RENDEZVOUS", "POPDIST_NUM_TOTAL_REPLICAS"):
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            hvd.init()  # warnings are errors
            hvd.shutdown()
