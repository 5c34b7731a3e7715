"""Loads two epochs with PopTorch's data loaders for many kinds of values of every argument. A program of api_sweep.py.

The data set has 9 samples and a call takes 4, so that remainders show. Processes are started by fork, for the time that
they take, except where the argument says otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
import signal
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import poptorch
import torch

from conformance.api_probe import KINDS, Subject, run

_LIMIT_S = 120.0  # of a call
_MOST = 16  # batches of an epoch, if it does not end

Makers = Dict[str, Callable[[], Any]]


class _Words(torch.utils.data.Dataset):  # type: ignore[type-arg]  # not generic at run time in old torch
    """A data set of another container than a tensor."""

    def __init__(self, is_dictionary: bool) -> None:
        self._is_dictionary = is_dictionary

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        pair = torch.tensor(index), torch.tensor([float(index)])
        return dict(zip("xy", pair)) if self._is_dictionary else pair


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]  # as above
    """A data set without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index)]) for index in range(9))


def _samples(count: int = 9) -> Any:
    return torch.utils.data.TensorDataset(torch.arange(2.0 * count).reshape(count, 2))


def _stacked(samples: List[Any]) -> torch.Tensor:
    return torch.stack([sample[0] + 1 for sample in samples])


def _started(_worker: int) -> None:
    os.environ["STARTED"] = "1"


def _raises(_argument: Any) -> Any:
    raise KeyError("of the program")


def _options(**of_training: int) -> poptorch.Options:
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(of_training.get("accumulation", 1))
    return options


def _distributed(process: int) -> poptorch.Options:
    options = _options().randomSeed(3)
    options.Distributed.configureProcessId(process, 2)
    return options


_PLAIN = (
    "None",
    "True",
    "False",
    "0",
    "1",
    "2",
    "3",
    "-1",
    "0.5",
    "2.0",
    "'x'",
    "[]",
    "{'x': 1}",
    "tensor()",
    "object",
)
_PLAIN += ("DataLoaderMode.Async", "DataLoaderMode.AsyncRebatched", "SharingStrategy.ForkServer")
_FORK: Dict[str, Any] = {"sharing_strategy": poptorch.SharingStrategy.Fork}
_DATASETS: Makers = {
    "pairs": lambda: _Words(False),
    "dictionaries": lambda: _Words(True),
    "stream": _Stream,
    "no samples": lambda: _samples(0),
    "8 samples": lambda: _samples(8),
    "range": lambda: range(9),
}
_OPTIONS: Makers = {
    "Options": _options,
    "Options, accumulation": lambda: _options(accumulation=2),
    "Options, process 0 of 2": lambda: _distributed(0),
    "Options, process 1 of 2": lambda: _distributed(1),
}
_SAMPLERS: Makers = {
    "BatchSampler": lambda: torch.utils.data.BatchSampler(range(9), 2, drop_last=False),
    "list of batches": lambda: [[0, 1], [2, 3], [4, 5], [6, 7], [8]],
    "SequentialSampler": lambda: torch.utils.data.SequentialSampler(range(5)),
}
_FUNCTIONS: Makers = {
    "function of samples": lambda: _stacked,
    "function of a worker": lambda: _started,
    "function that raises": lambda: _raises,
}
_ASYNC_OPTIONS: Makers = {
    "{'buffer_size': 2}": lambda: {**_FORK, "buffer_size": 2},
    "{'buffer_size': 0}": lambda: {**_FORK, "buffer_size": 0},
    "{'rebatched_size': 3}": lambda: {**_FORK, "rebatched_size": 3},
    "{'rebatched_size': None}": lambda: {**_FORK, "rebatched_size": None},
    "{'early_preload': True}": lambda: {**_FORK, "early_preload": True},
    "{'load_indefinitely': False}": lambda: {**_FORK, "load_indefinitely": False},
    "{'dataset': 1}": lambda: {**_FORK, "dataset": 1},
}
_SIZES: Makers = {"4": lambda: 4, "5": lambda: 5}
_ALL: Makers = {kind: KINDS[kind] for kind in _PLAIN}
_OWN_KINDS: Dict[str, Makers] = {
    "dataset": _DATASETS,
    "options": _OPTIONS,
    "batch_sampler": _SAMPLERS,
    "sampler": _SAMPLERS,
    "collate_fn": _FUNCTIONS,
    "worker_init_fn": _FUNCTIONS,
    "async_options": _ASYNC_OPTIONS,
    "batch_size": _SIZES,
    "rebatched_worker_size": _SIZES,
    "rebatched_size": _SIZES,
    "mode": {str(mode): lambda mode=mode: mode for mode in poptorch.DataLoaderMode},  # type: ignore[misc]
    "generator": {"Generator": lambda: torch.Generator().manual_seed(5)},
    "multiprocessing_context": {"'fork'": lambda: "fork"},
}
_BASE: Makers = {
    "options": _options,
    "dataset": _samples,
    "batch_size": lambda: 2,
    "async_options": lambda: dict(_FORK),
}
_ACCESSED: Makers = {
    "DataLoader": lambda: poptorch.DataLoader(_options(), _samples(), 2),
    "DataLoader, drop_last=False": lambda: poptorch.DataLoader(_options(), _samples(), 2, drop_last=False),
    "DataLoader, process 1 of 2": lambda: poptorch.DataLoader(_distributed(1), _samples(), 2, shuffle=True),
    "DataLoader, 2 workers": lambda: poptorch.DataLoader(_options(), _samples(), 2, num_workers=2),
    "DataLoader, asynchronous": lambda: poptorch.DataLoader(
        _options(), _samples(), 2, mode=poptorch.DataLoaderMode.Async, async_options=dict(_FORK)
    ),
    "DataLoader of torch": lambda: torch.utils.data.DataLoader(_samples(), 2),
    "map-style": lambda: _samples(3),
    "map-style without IndexError": lambda: _Words(False),
    "dictionaries": lambda: [{"x": torch.ones(2), "y": torch.tensor(number)} for number in range(3)],
    "other keys": lambda: [{"x": torch.ones(2)}, {"y": torch.ones(2)}],
    "more keys": lambda: [{"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}],
    "tensors": lambda: [torch.full((2,), float(number)) for number in range(5)],
    "generator": lambda: (torch.full((2,), float(number)) for number in range(3)),
    "tensors, of other sizes": lambda: [torch.ones(4, 2), torch.ones(3, 2)],
    "tensors, of other dtypes": lambda: [torch.ones(2), torch.full((2,), 3)],
    "nested tuples": lambda: [(torch.ones(2), (torch.ones(2), torch.ones(2)))],
    "numbers": lambda: [1.0, 2.0],
    "stream": _Stream,
    "no samples": list,
}
_STRATEGIES: Makers = {
    **{str(strategy): lambda strategy=strategy: strategy for strategy in poptorch.SharingStrategy},  # type: ignore[misc]
    **{kind: KINDS[kind] for kind in ("None", "2", "'x'", "object")},
}
_OF_ACCESSOR: Makers = {
    "dataset": _ACCESSED["DataLoader"],
    "sharing_strategy": lambda: poptorch.SharingStrategy.Fork,
}
_MODES: Dict[str, Makers] = {
    "DataLoader": {},
    "DataLoader, drop_last=False": {"drop_last": lambda: False},
    "DataLoader, shuffle": {"shuffle": lambda: True},
    "DataLoader, 2 workers": {"num_workers": lambda: 2},
    "DataLoader, batch_sampler": {"batch_size": lambda: 1, "batch_sampler": _SAMPLERS["BatchSampler"]},
    "DataLoader, process 1 of 2": {"options": _OPTIONS["Options, process 1 of 2"]},
    "DataLoader, process 1 of 2, shuffle": {
        "options": _OPTIONS["Options, process 1 of 2"],
        "shuffle": lambda: True,
        "num_workers": lambda: 2,
    },
    "DataLoader, Async": {"mode": lambda: poptorch.DataLoaderMode.Async},
    "DataLoader, AsyncRebatched": {"mode": lambda: poptorch.DataLoaderMode.AsyncRebatched},
    "DataLoader, Async, process 1 of 2, shuffle": {
        "mode": lambda: poptorch.DataLoaderMode.Async,
        "options": _OPTIONS["Options, process 1 of 2"],
        "shuffle": lambda: True,
        "num_workers": lambda: 2,
    },
}
# The arguments that have values of all kinds where it is not all of them, as each call starts processes.
_OF_BATCHES = ("options", "dataset", "batch_size", "shuffle", "drop_last", "batch_sampler", "num_workers")
_VARIED: Dict[str, Tuple[str, ...]] = {
    "2, shuffle": ("options", "shuffle", "drop_last", "num_workers", "persistent_workers", "mode"),
    "Async": (*_OF_BATCHES, "rebatched_worker_size", "async_options"),
    "2 workers": (
        *("num_workers", "persistent_workers", "timeout", "prefetch_factor", "worker_init_fn"),
        *("multiprocessing_context", "collate_fn", "dataset", "rebatched_worker_size"),
    ),
    "process 1": (*_OF_BATCHES, "auto_distributed_partitioning", "sampler"),
    "batch_sampler": (*_OF_BATCHES, "auto_distributed_partitioning", "sampler", "collate_fn"),
    ", ": _OF_BATCHES,
}


def subjects() -> Iterator[Subject]:
    """Yield the loaders, and what they have besides."""
    for name, arguments in _MODES.items():
        base = {**_BASE, **arguments}
        names = next((names for word, names in _VARIED.items() if word in name), ())
        make = _maker(poptorch.DataLoader, _of_torch(), names)
        yield Subject(f"{name}()", make, base=base, kinds=_ALL, own_kinds=_OWN_KINDS)
        yield from _parts(name, lambda base=base: poptorch.DataLoader(**_made(base)))  # type: ignore[misc]
    kind, name = poptorch.AsynchronousDataAccessor, "AsynchronousDataAccessor"
    own_kinds = {**_OWN_KINDS, "dataset": _ACCESSED}
    names = ("dataset", "buffer_size", "miss_sleep_time_in_ms", "load_indefinitely", "early_preload", "rebatched_size")
    yield Subject(f"{name}()", _maker(kind, names=names), base=_OF_ACCESSOR, kinds=_ALL, own_kinds=own_kinds)
    started = _maker(kind, names=("sharing_strategy",))  # PopTorch starts an interpreter for most values
    yield Subject(f"{name}()", started, base=_OF_ACCESSOR, kinds=_STRATEGIES)
    yield from _parts(name, lambda: kind(**_made(_OF_ACCESSOR)))


def _made(base: Makers, *without: str) -> Dict[str, Any]:
    return {name: make() for name, make in base.items() if name not in without}


def _of_torch() -> List[inspect.Parameter]:
    """The parameters of torch's data loader that PopTorch's passes on."""
    known = inspect.signature(poptorch.DataLoader.__init__).parameters
    of_torch = inspect.signature(torch.utils.data.DataLoader.__init__).parameters.values()
    names = [each.name for each in of_torch if each.name not in known]
    return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]


def _maker(
    kind: Any, more: Sequence[inspect.Parameter] = (), names: Sequence[str] = ()
) -> Callable[[], Tuple[Callable[..., Any], Any]]:
    """What makes a loader, uses and ends it. `names`: the arguments that have values of all kinds; by default all."""

    def load(*args: Any, **named: Any) -> Any:
        with _limited():
            loader = kind(*args, **named)
            try:
                return _loaded(loader)
            finally:
                _end(loader)

    own = list(inspect.signature(kind.__init__).parameters.values())[1:]
    parameters = [each for each in own if each.kind != each.VAR_KEYWORD] + list(more)
    load.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    load.varied = names or [each.name for each in parameters]  # type: ignore[attr-defined]
    return lambda: (load, None)


def _end(loader: Any) -> None:
    """End its processes: what a process forked later inherits of them would be waited for."""
    loader.terminate()
    workers = getattr(loader, "_iterator", None)
    if hasattr(workers, "_shutdown_workers"):
        workers._shutdown_workers()


def _loaded(loader: Any) -> List[Any]:
    """What two epochs contain, and the length, if there is one."""
    length: Any = "none"
    with contextlib.suppress(TypeError):
        length = len(loader)
    epochs = [[copy.deepcopy(batch) for batch in itertools.islice(loader, _MOST)] for _ in range(2)]
    return [length, epochs]


def _parts(name: str, make: Callable[[], Any]) -> Iterator[Subject]:
    """What a loader has besides the loading: for one that runs, and for one that was terminated."""
    parts: Dict[str, Callable[[Any], Any]] = {
        "len": len,
        "combinedBatchSize": lambda loader: loader.combinedBatchSize,
        "options": lambda loader: loader.options.device_iterations,
        "terminate": lambda loader: loader.terminate(),
        "iter": lambda loader: list(map(copy.deepcopy, iter(loader))),
        "next": next,
        "break": lambda loader: [copy.deepcopy(next(iter(loader))) for _ in range(3)],
    }
    if "Async" in name and "shuffle" in name:
        del parts["break"]  # how many orders PopTorch has drawn then depends on how far it has loaded ahead
    for is_terminated in (False, True):
        for part, use in parts.items():

            def used(use: Callable[[Any], Any] = use, is_terminated: bool = is_terminated) -> Any:
                with _limited():
                    loader = make()
                    try:
                        if is_terminated:
                            loader.terminate()
                        return copy.deepcopy(use(loader))
                    finally:
                        _end(loader)

            used.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
            title = f"{name}: {part}{', terminated' if is_terminated else ''}()"
            yield Subject(title, lambda used=used: (used, None))  # type: ignore[misc]


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """A call that does not end is an error."""

    def end(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"a call has not ended within {_LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    run(subjects())
