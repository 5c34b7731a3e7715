"""Calls every function of `horovod.torch` on two ranks with many kinds of values. A program of api_sweep.py.

Both ranks make the same calls with tensors of their own, and none that only one of them rejects, as the other one would
wait; rank 0 reports. Asynchronous functions are waited for.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Iterator, List, Tuple

import horovod.torch as hvd
import torch

from conformance.api_probe import KINDS, Subject, run

Makers = Dict[str, Callable[[], Any]]


def _own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that differs between the ranks."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count).reshape(shape) + 2 * hvd.rank() + 1).to(dtype)


_present: List[Any] = []  # the model, its optimizer, a process set of rank 0 and one that is not registered


def _model() -> torch.nn.Module:
    return _present[0]  # type: ignore[no-any-return]


_PLAIN = ("None", "True", "False", "0", "1", "2", "3", "-1", "0.5", "2.0", "nan", "'x'", "''", "[]", "()", "{}")
_PLAIN += ("'2'", "{'x': 1}", "tensor()", "function", "object", "module")
_OF_MODELS = ("pairs", "state_dict", "[param", "param", "[first", "SGD", "Adam", "LBFGS")
_OF_TENSORS: Makers = {
    "4": lambda: 4,
    "5": lambda: 5,
    "6": lambda: 6,
    "tensor[4]": lambda: _own(4),
    "[tensor]": lambda: [_own(4)],
    **{
        f"{str(dtype)[6:]} tensor": lambda dtype=dtype: _own(4, dtype=dtype)  # type: ignore[misc]
        for dtype in (
            *(torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32),
            *(torch.int64, torch.bool, torch.complex64),
        )
    },
    "tensor[0]": lambda: torch.ones(0),
    "tensor[5, 2]": lambda: _own(5, 2),
    "transposed tensor": lambda: _own(2, 4).t(),
    "sparse tensor": lambda: _own(4).to_sparse(),
    "tensor with gradient": lambda: _own(4).requires_grad_(),
    "tuple of tensors": lambda: (_own(4), _own(2, 2)),
    "tensors of two dtypes": lambda: [_own(4), _own(4, dtype=torch.int64)],
    "generator of tensors": lambda: (_own(4) for _ in range(2)),
    "[1, 3]": lambda: [1, 3],
    "[2, 1]": lambda: [2, 1],
    "[3, 3]": lambda: [3, 3],
    "[-1, 5]": lambda: [-1, 5],
    "int32 [1, 3]": lambda: torch.tensor([1, 3], dtype=torch.int32),
    "int64 [1, 3]": lambda: torch.tensor([1, 3]),
    "float [1, 3]": lambda: torch.tensor([1.0, 3.0]),
}
_OF_HOROVOD: Makers = {
    "4": lambda: 4,
    "6": lambda: 6,
    "Compression.none": lambda: hvd.Compression.none,
    "Compression.fp16": lambda: hvd.Compression.fp16,
    "ProcessSet, not registered": lambda: _present[3],
    "pairs": lambda: list(_model().named_parameters()),
    "pairs, generator": lambda: _model().named_parameters(),
    "pairs, incomplete": lambda: list(_model().named_parameters())[:1],
    "pairs, duplicates": lambda: [("x", each) for each in _model().parameters()],
    "state_dict": lambda: _model().state_dict(),
    "parameters": lambda: list(_model().parameters()),
    "parameters, generator": lambda: _model().parameters(),
    "[parameters]": lambda: [list(_model().parameters())],
    "[first, first]": lambda: [list(_model().parameters())[:1]] * 2,
    "SGD": lambda: _present[1],
    "Adam": lambda: torch.optim.Adam(_model().parameters(), lr=0.1),
    "LBFGS": lambda: torch.optim.LBFGS(_model().parameters(), lr=0.1),
}
_ALL: Makers = {**{kind: KINDS[kind] for kind in _PLAIN}, **_OF_HOROVOD}
_WITH_TENSORS: Makers = {kind: make for kind, make in _ALL.items() if not kind.startswith(_OF_MODELS)}
_WITH_TENSORS.update(_OF_TENSORS)
_BASE: Makers = {
    "tensor": lambda: _own(4),
    "tensors": lambda: [_own(4), _own(2, 2)],
    "root_rank": lambda: 1,
    "params": _OF_HOROVOD["state_dict"],
    "optimizer": _OF_HOROVOD["SGD"],
    "obj": lambda: {"x": hvd.rank()},
    "handle": lambda: hvd.allreduce_async(_own(4)),
    "ranks_or_comm": lambda: [0],
    "process_set": lambda: [1],
    "num_features": lambda: 2,
    "file_path": lambda: "timeline.json",
    "passes": lambda: 2,
    "ctx": lambda: None,
}


def subjects() -> Iterator[Subject]:
    """Yield the functions and classes of the package."""
    hvd.init(process_sets="dynamic")
    _present.extend([None, None, hvd.add_process_set([0]), hvd.ProcessSet([1])])
    for name in _functions():
        yield _subject(name, getattr(hvd, name))
    yield _subject("DistributedOptimizer", _trained)
    yield _subject("ProcessSet", lambda ranks_or_comm: str(hvd.ProcessSet(ranks_or_comm)))
    yield from _of_process_sets()
    for name in ("none", "fp16"):
        kind = getattr(hvd.Compression, name)
        yield _subject(f"Compression.{name}.compress", lambda tensor, kind=kind: kind.compress(tensor))
        yield _subject(f"Compression.{name}.decompress", lambda tensor, ctx, kind=kind: kind.decompress(tensor, ctx))
    for name in ("set_backward_passes_per_step", "synchronize", "zero_grad", "skip_synchronize"):
        yield _subject(f"DistributedOptimizer.{name}", _method(name))


_APART = ("DistributedOptimizer", "ProcessSet", "SyncBatchNorm", "Compression", "HorovodInternalError")
_APART += (
    "add_process_set",
    "remove_process_set",
    "init",
    "shutdown",
    "is_initialized",
    "check_extension",
)
# What they return depends on time or on the place where the library was built.
_ONLY_TYPE = ("join", "poll")


def _functions() -> List[str]:
    names = [name for name in dir(hvd) if not name.startswith("_") and name not in _APART]
    return [name for name in names if inspect.isroutine(getattr(hvd, name))]


def _subject(name: str, function: Callable[..., Any]) -> Subject:
    def called(*args: Any, **named: Any) -> Any:
        returned = function(*args, **named)
        if "_async" in name:
            returned = returned() if callable(returned) else hvd.synchronize(returned)
        return type(returned).__name__ if name in _ONLY_TYPE else returned

    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "kind"]
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=each.POSITIONAL_OR_KEYWORD, annotation=each.empty) for each in parameters if _is_own(each)]
    )
    kinds = _WITH_TENSORS if parameters and parameters[0].name.startswith("tensor") else _ALL
    base = {**_BASE, "process_set": lambda: hvd.global_process_set} if "process_set" not in name else _BASE
    without: Dict[str, List[str]] = {}
    if name.startswith("sparse_"):  # its name is the text of the value, which has to be the same on both ranks
        without = {"name": [kind for kind in kinds if kind not in _PLAIN or kind in ("function", "object")]}
        base = {**base, "tensor": _OF_TENSORS["sparse tensor"], "name": lambda: None, "op": lambda: hvd.Average}
    if name in ("poll", "synchronize"):  # a number may be the handle of another call
        kinds = {kind: make for kind, make in kinds.items() if kind not in _OF_ONE_NUMBER}
    if name.startswith("alltoall"):  # a 0-d tensor, and a number for `splits`, ends the process with the real Horovod
        kinds = {kind: make for kind, make in kinds.items() if kind not in _OF_ONE_NUMBER}
    if name.endswith("_object"):  # one rank alone would fail where an object cannot be pickled
        kinds = {kind: make for kind, make in kinds.items() if "generator" not in kind}
    return Subject(f"horovod.torch.{name}()", _prepared(called), kinds=kinds, base=base, without=without)


_OF_ONE_NUMBER = ("True", "False", "0", "1", "2", "3", "-1", "0.5", "2.0", "nan", "4", "5", "6", "tensor()")


def _is_own(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _prepared(called: Callable[..., Any]) -> Callable[[], Tuple[Callable[..., Any], Any]]:
    def make() -> Tuple[Callable[..., Any], Any]:
        torch.manual_seed(hvd.rank())
        _present[0] = torch.nn.Linear(2, 2)
        _present[1] = torch.optim.SGD(_present[0].parameters(), lr=0.1, momentum=0.5)
        return called, None

    return make


def _step(optimizer: Any) -> Any:
    for _ in range(2):
        optimizer.zero_grad()
        _model()(_own(3, 2)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in _model().parameters()]


def _wrapped(*args: Any, **named: Any) -> Any:
    hvd.broadcast_parameters(_model().state_dict(), 0)
    return hvd.DistributedOptimizer(*args, **named)


def _trained(*args: Any, **named: Any) -> Any:
    return _step(_wrapped(*args, **named))


_trained.__signature__ = inspect.signature(hvd.DistributedOptimizer)  # type: ignore[attr-defined]


def _method(name: str) -> Callable[..., Any]:
    def use() -> Any:
        optimizer = _wrapped(_present[1])
        _model()(_own(3, 2)).sum().backward()
        if name == "skip_synchronize":
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            getattr(optimizer, name)()
        optimizer.synchronize()
        return [parameter.grad for parameter in _model().parameters()]

    def accumulate(passes: Any) -> Any:
        optimizer = _wrapped(_present[1], backward_passes_per_step=1)
        optimizer.set_backward_passes_per_step(passes)
        for _ in range(2):
            _model()(_own(3, 2)).sum().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in _model().parameters()]

    return accumulate if name == "set_backward_passes_per_step" else use


def _of_process_sets() -> Iterator[Subject]:
    """What process sets do; an invalid rank ends the process with the real Horovod."""
    kinds = {kind: make for kind, make in _ALL.items() if kind in ("[]", "[1]", "['x']", "None", "'x'", "1", "()")}

    def add(process_set: Any) -> Any:
        added = hvd.add_process_set(process_set)
        try:
            return [added.ranks, added.size(), added.included()]
        finally:
            hvd.remove_process_set(added)

    yield _subject("add_process_set", add)._replace(kinds=kinds)
    for part in ("size", "rank", "included", "__str__"):
        for title, index in (("of rank 0", 2), ("not registered", 3)):
            use = lambda part=part, index=index: getattr(_present[index], part)()  # noqa: E731
            yield _subject(f"ProcessSet.{part}, {title}", _without_parameters(use))
    remove = lambda: hvd.remove_process_set(_present[3])  # noqa: E731
    yield _subject("remove_process_set, not registered", remove)


def _without_parameters(use: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: use()


if __name__ == "__main__":
    run(subjects())
