"""The emulated Horovod alone: unsupported features, variables, and an error instead of a deadlock of the ranks."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import horovod.torch as hvd
import pytest
import torch
from _pod import wires
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import _basics, functions
from horovod.torch._engine import Engine, Numbering, Timeline

from tests.support.ranks import error_of

X = torch.ones(4)


def _distributed(**arguments: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), **arguments)


def start(rank: int, size: int) -> Any:
    os.environ.update(POPDIST_NUM_TOTAL_REPLICAS=str(2 * size), POPDIST_NUM_LOCAL_REPLICAS="2")
    os.environ.update(POPDIST_REPLICA_INDEX_OFFSET=str(2 * rank), POPDIST_LOCAL_INSTANCE_INDEX=str(rank % 2))
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def out_of_step(rank: int, size: int) -> Dict[str, str]:
    found = {
        "call": error_of(hvd.barrier if rank else lambda: hvd.broadcast(torch.zeros(1), 0)),
        "name": error_of(lambda: hvd.allreduce(torch.zeros(1), name=f"x{rank}")),
        "parameters": error_of(lambda: hvd.broadcast_parameters({f"p{rank // 3}": torch.zeros(2)}, 0)),
        "long": error_of(lambda: hvd.grouped_allreduce([torch.zeros(2)] * 500 + [torch.zeros(2 + rank // 2)])),
    }
    hvd.barrier()
    return found


def two_threads(rank: int, size: int) -> List[float]:
    sums: Dict[str, float] = {}

    def reduce(name: str, pause_s: float) -> None:
        for step in range(3):
            time.sleep(pause_s * rank)
            sums[f"{name}{step}"] = hvd.allreduce(torch.ones(1), name=f"{name}{step}", op=hvd.Sum).item()

    threads = [threading.Thread(target=reduce, args=arguments) for arguments in (("a", 0.0), ("b", 0.01))]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    return sorted(sums.values())


def same_name_twice(rank: int, size: int) -> str:
    if rank:
        time.sleep(0.1)
    handle = hvd.allreduce_async(torch.ones(1), name="twice")
    message = error_of(lambda: hvd.allreduce_async(torch.ones(1), name="twice")) if not rank else ""
    hvd.synchronize(handle)
    return message


def shutdown_of_rank_0(rank: int, size: int) -> str:
    handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {rank}")
    if rank == 0:
        time.sleep(0.2)
        hvd.shutdown()
        return error_of(lambda: hvd.allreduce(torch.ones(1)))
    return error_of(lambda: hvd.synchronize(handle))


def failed_init(rank: int, size: int) -> Any:
    hvd.shutdown()
    different = hvd.ProcessSet([0, 2 if rank else 1])
    message = error_of(lambda: hvd.init(process_sets=[different]))
    state = hvd.is_initialized(), different.process_set_id
    hvd.init()
    return message, state, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def timeline_of_two_sets(rank: int, size: int) -> List[Any]:
    """Operations of the same name in two process sets; return the rows and the events, by row."""
    hvd.shutdown()
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        hvd.start_timeline(str(path))
        handles = [hvd.allreduce_async(torch.ones(1), name="x", process_set=pair)] if rank < 2 else []
        handles.append(hvd.allreduce_async(torch.ones(1), name="x"))
        for handle in handles:
            hvd.synchronize(handle)
        hvd.stop_timeline()
        events = json.loads(path.read_text()) if rank == 0 else []
    names = {event["pid"]: event["args"]["name"] for event in events[1:] if event.get("name") == "process_name"}
    return [(names[each], [event["ph"] for event in events if event.get("pid") == each]) for each in sorted(names)]


def sets_that_wait_for_each_other(rank: int, size: int) -> str:
    hvd.shutdown()
    os.environ["EMULATED_POD_TIMEOUT_S"] = "2"
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    process_set = hvd.global_process_set if rank else pair
    return error_of(lambda: hvd.allreduce(torch.ones(1), name="x", process_set=process_set))


@pytest.fixture(scope="module")
def pod(ranks: Any) -> Dict[str, List[Any]]:
    functions = ["start", "out_of_step", "two_threads", "same_name_twice", "shutdown_of_rank_0", "failed_init"]
    functions += ["timeline_of_two_sets", "sets_that_wait_for_each_other"]
    return ranks(__file__, functions, 4)


def test_ranks_that_wait_for_each_other_fail_and_a_disagreement_is_reported_by_rank_and_shape(
    pod: Dict[str, List[Any]],
) -> None:
    for what, of_rank_3 in (("call", "barrier"), ("name", "allreduce.x3")):
        (message,) = {found[what] for found in pod["out_of_step"]}
        assert message.startswith("HorovodInternalError: the ranks are out of step")
        assert f"rank 3: {of_rank_3}" in message
    of_names = "rank 0: p0: float32[2]; rank 1: as rank 0; rank 2: as rank 0; rank 3: p1: float32[2]"
    of_shapes = "rank 0: tensor 500 of 501: float32[2]; rank 1: as rank 0; rank 2: tensor 500 of 501: float32[3]"
    assert of_names in pod["out_of_step"][2]["parameters"]
    assert of_shapes in pod["out_of_step"][1]["long"]


def test_rank_and_size_are_those_of_popdist_threads_are_independent_and_a_name_is_in_use_until_it_is_done(
    pod: Dict[str, List[Any]],
) -> None:
    assert pod["start"] == [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    assert pod["two_threads"] == [[4.0] * 6] * 4
    assert pod["same_name_twice"][0].startswith("ValueError: Requested to allreduce")


def test_shutdown_fails_pending_operations_and_a_failed_init_is_undone_on_all_ranks(pod: Dict[str, List[Any]]) -> None:
    assert "not been initialized" in pod["shutdown_of_rank_0"][0]
    assert all(message.startswith("HorovodInternalError: ") for message in pod["shutdown_of_rank_0"][1:])
    for message, *others in pod["failed_init"]:
        assert message.startswith("HorovodInternalError: the ranks are out of step")
        assert others == [(False, None), 4.0]


def test_process_sets_have_rows_in_the_timeline_and_fail_if_they_wait_for_each_other(pod: Dict[str, List[Any]]) -> None:
    phases = ["M", "M", "B", *"XXXX", "E", "B", "E"]  # the row, its place, negotiation with an event per rank, the run
    of_pair = [phase for index, phase in enumerate(phases) if index not in (3, 4)]
    assert pod["timeline_of_two_sets"][0] == [("allreduce.x (process set 1)", of_pair), ("allreduce.x", phases)]
    assert all(each.startswith("HorovodInternalError: ") for each in pod["sets_that_wait_for_each_other"])


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "OMPI_", "POPDIST_"))]:
        monkeypatch.delenv(name)
    hvd.init()


@pytest.mark.usefixtures("single_rank")
def test_a_single_rank_needs_no_rendezvous() -> None:
    hvd.init()  # again, without effect
    tensor = torch.randn(3, 2)
    assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
    assert hvd.mpi_ops.is_homogeneous()
    assert not hasattr(hvd, "is_homogeneous")  # as in Horovod
    for collective in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter):
        assert torch.equal(collective(tensor), tensor)
    hvd.broadcast_parameters({"x": tensor}, root_rank=0)
    assert (hvd.broadcast_object("x"), hvd.allgather_object("x"), hvd.join()) == ("x", ["x"], 0)
    hvd.barrier()


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hvd.allreduce(torch.zeros(1), op=hvd.Adasum), NotImplementedError, "no Adasum"),
        (lambda: hvd.init(comm=[0]), NotImplementedError, "joins all ranks"),
        (lambda: hvd.broadcast_parameters({"step": 3}, 0), ValueError, "not a int"),  # type: ignore[dict-item]
        (lambda: hvd.grouped_allreduce([]), ValueError, "at least one tensor"),
        (lambda: hvd.broadcast_parameters([("x", X), ("x", X)], 0), ValueError, "with the same name as another tensor"),
        (lambda: hvd.alltoall(torch.zeros(2), splits=[3]), ValueError, "do not fit"),
        (lambda: hvd.alltoall(torch.zeros(2), splits=[-1]), ValueError, "do not fit"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), ValueError, "0-d"),
        (lambda: hvd.poll(10**9), ValueError, "was not created"),
        (lambda: hvd.barrier(hvd.ProcessSet([0])), ValueError, "Barrier: Process set provided does not exist"),
        (lambda: hvd.add_process_set([0]), ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS=1"),
        (lambda: hvd.init(comm=5), ValueError, "MPI"),
        (lambda: hvd.ProcessSet(["a"]), ValueError, "list of process ranks"),  # type: ignore[list-item]
        # What Horovod's Python or its binding rejects.
        (lambda: hvd.allreduce(X, name=5), TypeError, "name is a string or None, got 5"),
        (lambda: hvd.broadcast_object(X, name=5), TypeError, "name is a string or None"),
        (lambda: hvd.allgather_object(X, name=5), TypeError, "name is a string or None"),
        (lambda: hvd.allreduce(X, compression=None), AttributeError, "compression is hvd.Compression.none"),
        (lambda: hvd.allreduce(X, op=1.0), TypeError, "op is an integer, got 1.0"),
        (lambda: hvd.allreduce(X, prescale_factor="2"), TypeError, "prescale_factor is a number, got '2'"),
        (lambda: hvd.reducescatter(X, postscale_factor="2"), TypeError, "postscale_factor is a number"),
        (lambda: hvd.allreduce(X, prescale_factor=float("nan")), HorovodInternalError, "prescale_factor is NaN"),
        (lambda: hvd.broadcast(X, 0.0), TypeError, "root_rank is an integer, got 0.0"),
        (lambda: hvd.grouped_allreduce_async_(iter([X])), TypeError, "takes a list or tuple of tensors"),
        (lambda: hvd.grouped_allreduce_async([]), ValueError, "needs at least one tensor"),
        (lambda: hvd.Compression.fp16.decompress(X, None), AttributeError, "is_floating_point"),
        (lambda: _distributed(groups=[X]), ValueError, "lists of torch.Tensor"),
        (lambda: _distributed(backward_passes_per_step=float("nan")), ValueError, "is NaN"),
        (lambda: hvd.join("x"), TypeError, "device is an integer, got 'x'"),
    ],
)
def test_unsupported_features_and_invalid_arguments_are_an_error(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("single_rank")
def test_sparse_tensors_are_added_only() -> None:
    matrix = torch.eye(2).to_sparse()
    assert torch.equal(hvd.sparse_allreduce_async(matrix, 1, hvd.Average)().to_dense(), torch.eye(2))
    with pytest.raises(hvd.mpi_ops.HorovodInternalError, match="Average or Sum only, not Max"):
        hvd.sparse_allreduce_async(matrix, "x", hvd.Max)


def test_invalid_process_sets_of_init_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, message in (([0], "entry number 0 is a duplicate"), ([0, 1], "invalid rank: 1"), ([0, 0], "rank: 0")):
        with pytest.raises(ValueError, match=message):
            hvd.init(process_sets=[hvd.ProcessSet(ranks)])
        assert not hvd.is_initialized()


def test_ineffective_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["FUSION_THRESHOLD", "LOG_LEVEL", "GLOO_TIMEOUT_SECONDS", "GLOO_IFACE", "GLOO_RENDEZVOUS_ADDR"]
    given += ["GLOO_RENDEZVOUS_PORT", "HOSTNAME"]
    for name in given:
        monkeypatch.setenv(f"HOROVOD_{name}", "0")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "Gloo")
    with pytest.warns(UserWarning, match="the emulated Horovod ignores") as found:
        hvd.init()
    hvd.shutdown()
    (text,) = [str(each.message) for each in found]
    assert all(f"HOROVOD_{name}" in text for name in given)
    assert "HOROVOD_CONTROLLER=mpi" in text
    assert "CPU_OPERATIONS" not in text


def test_the_timeline_of_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    hvd.init()
    hvd.allreduce(torch.ones(1), name="x")
    events = json.loads((tmp_path / "timeline.json").read_text())  # valid at any time
    hvd.shutdown()
    names = [(event["ph"], event.get("name")) for event in events]
    assert names == [
        *[("M", "process_name")] * 2,
        *[("M", "process_sort_index"), ("B", "NEGOTIATE_ALLREDUCE"), ("X", "0"), ("i", "CYCLE_START"), ("E", None)],
        *[("B", "ALLREDUCE"), ("E", None)],
    ]
    assert events[0]["args"]["start_time_since_epoch_in_micros"] > 0
    assert events[1]["args"]["name"] == "allreduce.x"


def test_elastic_mode_is_an_error_and_objects_are_pickled(single_rank: Any) -> None:
    with pytest.raises(AttributeError, match="no elastic mode"):
        hvd.elastic  # noqa: B018
    with pytest.raises(ImportError, match="no elastic mode"):
        from horovod.torch import elastic  # noqa: F401
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    with pytest.raises((pickle.PicklingError, AttributeError), match="[Cc]an't pickle|Can't get local"):
        hvd.broadcast_object(lambda: 0)


READ: List[bool] = []


def note_read() -> None:
    READ.append(True)


class Executes:
    """An object whose pickle calls a function when it is read."""

    def __reduce__(self) -> Any:
        return note_read, ()


@pytest.mark.parametrize("attack", ["no proof", "another secret", "changed", "sent again", "another sender"])
def test_an_object_is_read_only_if_its_sender_proves_the_secret_of_the_run(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_POD_SECRET", "ab" * 32)
    engine = Engine(wires.connect("objects", 0, 1), 0, [0], Numbering(), Timeline())
    context = engine.next_object("x from 0")
    received = functions._pickled(Executes(), context)
    functions._unpickled(received, context)
    assert READ.pop()
    if attack == "no proof":
        received = received[32:]
    elif attack == "another secret":
        monkeypatch.setenv("EMULATED_POD_SECRET", "cd" * 32)
    elif attack == "changed":
        received[-2] ^= 1
    else:
        context = engine.next_object("x from 0" if attack == "sent again" else "x from 1")
    with pytest.raises(HorovodInternalError, match="was not sent by a process of this pod, and is not read"):
        functions._unpickled(received, context)
    assert not READ


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
def test_rank_and_size_come_from_the_environment(monkeypatch: Any, variables: Dict[str, str], position: Any) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert tuple(_basics.determine_position()) == position
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
    monkeypatch: Any, tmp_path: Path, text: str, marks_cycles: bool, is_dynamic: bool, counts_as: Optional[int]
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
    assert ("duplicate" in refusal, len(found)) == (is_dynamic, counts_as is not None)
    for each in found:
        assert f"HOROVOD_TIMELINE_MARK_CYCLES={text!r} (not a number: it counts as {counts_as})" in str(each.message)
        assert f"HOROVOD_DYNAMIC_PROCESS_SETS={text!r}" in str(each.message)


def test_variables_set_by_the_launcher_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IFACE", "RENDEZVOUS_ADDR", "RENDEZVOUS_PORT"):
        monkeypatch.setenv(f"HOROVOD_GLOO_{name}", "gloo")
    for name in ("HOSTNAME", "CONTROLLER", "CPU_OPERATIONS"):
        monkeypatch.setenv(f"HOROVOD_{name}", "gloo")
    for name in ("EMULATED_POD_RENDEZVOUS", "POPDIST_NUM_TOTAL_REPLICAS"):
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            hvd.init()  # warnings are errors
            hvd.shutdown()
