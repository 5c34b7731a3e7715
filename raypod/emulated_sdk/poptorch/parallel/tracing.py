"""What compiling sees of blocks: which operations, modules and weights each stage of the forward has (contract 3).

`StageRecorder` is active during the one forward of a compilation. Operations are seen below autograd, so that a stage
begins with its first operation: a block without any takes no IPU. Later forwards run without it, and blocks then do
nothing.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch.parallel import operation_count as cost
from poptorch.options.strategies import _IExecutionStrategy

_active = threading.local()
_BOOKKEEPING = frozenset(("aten::detach", "aten::alias"))  # autograd's and this emulation's own: nothing is computed


def active_stages() -> Optional[StageRecorder]:
    """The recorder of the compilation that this thread is in; None outside one."""
    return getattr(_active, "recorder", None)


class StageUse(NamedTuple):
    """One forward stage: operations in a row on the same IPU, in the same phase.

    Attributes:
        ipu: IPU within the replica.
        phase: number of the phase; 0 where there are none.
        blocks: ids of its blocks, in the order of execution; none for operations before the first block.
        modules: names of the modules whose own forward has operations here.
        tensors: names of the parameters and buffers that are used here first.
        operations: cost of the forward of one micro-batch (`cost.operations`).
    """

    ipu: int
    phase: int
    blocks: Tuple[str, ...]
    modules: Tuple[str, ...]
    tensors: Tuple[str, ...]
    operations: int


class _Place(NamedTuple):
    """Where the next operation goes."""

    block: Optional[str]
    phase: int
    ipu: int


class _Run:
    """A stage that may still grow. The dictionaries are ordered sets."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.blocks: Dict[str, None] = {}
        self.modules: Dict[str, None] = {}
        self.tensors: Dict[str, None] = {}
        self.operations = 0

    def frozen(self) -> StageUse:
        names = (tuple(self.blocks), tuple(self.modules), tuple(self.tensors))
        return StageUse(self.place.ipu, self.place.phase, *names, self.operations)


class StageRecorder(TorchDispatchMode):
    """Follows blocks and operations of one forward of `module`, by the rules of `strategy`.

    `block_of` tells id and IPU of the block that a layer begins. AssertionError, out of the forward, for a block
    that the strategy does not know.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: _IExecutionStrategy,
        block_of: Callable[[torch.nn.Module], Optional[Tuple[Optional[str], Optional[int]]]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._strategy = strategy
        self._block_of = block_of
        self._modules = {part: name for name, part in module.named_modules()}
        # By the tensors themselves, not by their memory: they are what the first operation on them gets. Buffers of
        # other types are constants and lie nowhere (contract 2.6).
        named = [*module.named_parameters(), *module.named_buffers()]
        self._unused = {id(tensor): name for name, tensor in named if tensor.is_floating_point()}
        self._place = _Place(None, 0, 0)
        self._enclosing: List[_Place] = []
        self._inside: List[str] = []
        self._runs: List[_Run] = []
        self._next_auto_id = 0
        self._auto_ids: Dict[int, Tuple[object, str]] = {}  # with the owners, lest their ids are given out again
        self._numbers: Dict[str, int] = {}
        self._hooks: List[Any] = []

    def stages(self) -> Tuple[StageUse, ...]:
        """The forward stages in the order of execution; a single empty one when nothing was computed."""
        return tuple(run.frozen() for run in self._runs or [_Run(self._place)])

    def unused(self) -> Tuple[str, ...]:
        """Names of the parameters and buffers that no operation has used."""
        return tuple(self._unused.values())

    # -- for blocks --------------------------------------------------------------------------------------------------

    def begin(self, user_id: Optional[str], ipu_id: Optional[int], owner: object = None) -> None:
        """Operations from here on are of this block. An `owner` without an id keeps the number it was given first."""
        block = self._auto_id(owner) if user_id is None else user_id
        number = self._numbers.setdefault(block, len(self._numbers))
        phase, ipu = self._strategy._locate(block, ipu_id, number, self._place.ipu)
        self._place = _Place(block, phase, ipu)

    def open(self, user_id: Optional[str], ipu_id: Optional[int], owner: object) -> None:
        """Begin a block that ends with `close`."""
        self._enclosing.append(self._place)
        self.begin(user_id, ipu_id, owner)

    def close(self) -> None:
        """Go back to the enclosing block that is still open; an outermost one lasts on."""
        before = self._enclosing.pop()
        if self._enclosing:
            self._place = before

    def restart_auto_ids(self) -> None:
        """Number blocks without an id from 0 again."""
        self._next_auto_id = 0

    def _auto_id(self, owner: object) -> str:
        if id(owner) in self._auto_ids:
            return self._auto_ids[id(owner)][1]
        number = str(self._next_auto_id)
        self._next_auto_id += 1
        if owner is not None:
            self._auto_ids[id(owner)] = owner, number
        return number

    # -- for the forward ---------------------------------------------------------------------------------------------

    def __enter__(self) -> StageRecorder:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._enter_module, prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave_module))
        _active.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        _active.recorder = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Newer torch asks; to skip the compiler, it would import it, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = _arguments(args, kwargs or {})
        if tensors and func._schema.name not in _BOOKKEEPING:  # without arguments it is a constant
            self._note(cost.operations(func, args, result), tensors)
        return result

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        block = self._block_of(module)
        if block is not None:
            self.begin(*block, owner=module)
        self._inside.append(self._modules[module])

    def _leave_module(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._inside.pop()

    def _note(self, operations: int, tensors: List[torch.Tensor]) -> None:
        run = self._run()
        run.operations += operations
        if self._place.block is not None:
            run.blocks[self._place.block] = None
        if self._inside and self._inside[-1]:
            run.modules[self._inside[-1]] = None
        for tensor in tensors:
            if id(tensor) in self._unused:
                run.tensors[self._unused.pop(id(tensor))] = None

    def _run(self) -> _Run:
        """The stage of the next operation: a new one when the IPU or the phase has changed."""
        where = self._place[1:]
        if not self._runs or self._runs[-1].place[1:] != where:
            self._runs.append(_Run(self._place))
        return self._runs[-1]


def _arguments(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[torch.Tensor]:
    """The tensors of an operation, also those in lists."""
    spread: List[Any] = []
    for value in (*args, *kwargs.values()):
        spread.extend(value) if isinstance(value, (list, tuple)) else spread.append(value)
    return [value for value in spread if isinstance(value, torch.Tensor)]
