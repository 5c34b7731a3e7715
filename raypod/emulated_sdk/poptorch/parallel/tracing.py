"""Record the stages of a forward during compilation: the operations, modules, weights and activations of each.

`StageRecorder` is active during the one forward of a compilation. It intercepts operations below autograd, so a stage
starts with its first operation, and a block without operations needs no IPU. Later forwards run without it.

Operations are counted from shapes: two per multiply-add of matrix products and convolutions, one per element of the
result of all other operators. The counts compare the work of stages; they do not predict the time on an IPU.

The activations that a stage keeps for its backward pass are those that torch's autograd saves, which is inferred to be
what the SDK's compiler stores.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch.errors import Error
from poptorch.options.strategies import BlockId, _IExecutionStrategy

_active = threading.local()
_Rule = Callable[[Tuple[Any, ...], torch.Tensor], int]
_BOOKKEEPING = frozenset(("aten::detach", "aten::alias"))  # by autograd and this emulation; they compute nothing


def active_recorder() -> Optional[StageRecorder]:
    """Return the recorder of this thread's compilation; None outside a compilation."""
    return getattr(_active, "recorder", None)


class StageUse(NamedTuple):
    """One forward stage: consecutive operations on the same IPU, in the same phase.

    Attributes:
        ipu: IPU within the replica.
        phase: index of the phase; 0 without phases.
        blocks: ids of its blocks, in the order of execution; none for operations before the first block.
        modules: names of the modules whose own forward has operations here.
        tensors: names of the parameters and buffers first used here.
        operations: scalar operations of the forward of one micro-batch.
    """

    ipu: int
    phase: int
    blocks: Tuple[BlockId, ...]
    modules: Tuple[str, ...]
    tensors: Tuple[str, ...]
    operations: int


class Parts(NamedTuple):
    """In how many parts a device computes an operator, and the operand that each part needs; see `in_parts`."""

    factor: int = 1
    whole: Optional[torch.Tensor] = None


class _Place(NamedTuple):
    """Block, phase and IPU of the next operation."""

    block: Optional[BlockId]
    phase: int
    ipu: int


class _OpenStage:
    """A stage that may get more operations. The dictionaries are ordered sets."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.blocks: Dict[BlockId, None] = {}
        self.modules: Dict[str, None] = {}
        self.tensors: Dict[str, None] = {}
        self.operations = 0

    def use(self) -> StageUse:
        """Return the present content."""
        names = (tuple(self.blocks), tuple(self.modules), tuple(self.tensors))
        return StageUse(self.place.ipu, self.place.phase, *names, self.operations)


class StageRecorder(TorchDispatchMode):
    """Records the stages of one forward of `module`, according to its blocks and the strategy.

    Args:
        host_module: the module of which `module` is a copy: a forward may reach its submodules through a closure.
        block_of: returns id and IPU of the block that a layer starts.
        is_training: whether the model is compiled for training.

    Attributes:
        observers: called with each operator, its arguments and its result.
        parts: of the next operators.
        checkpoint_observers: called with each tensor that the program marks by `recomputationCheckpoint`.

    Raises:
        AssertionError: in the forward, a block that the strategy does not contain.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        host_module: torch.nn.Module,
        strategy: _IExecutionStrategy,
        block_of: Callable[[torch.nn.Module], Optional[Tuple[Optional[BlockId], Optional[int]]]],
        is_training: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_training = is_training
        self.observers: List[Callable[[Any, Tuple[Any, ...], Dict[str, Any], Any], None]] = []
        self.checkpoint_observers: List[Callable[[torch.Tensor], None]] = []
        self.parts = Parts()
        self._strategy = strategy
        self._block_of = block_of
        both = (host_module.named_modules(), module.named_modules())
        self._modules = {submodule: name for named in both for name, submodule in named}
        # By id of the tensor, not by memory: the first operation on a parameter takes the tensor itself. Buffers of
        # other dtypes are constants on the device.
        named = [*module.named_parameters(), *module.named_buffers()]
        self._unused = {id(tensor): name for name, tensor in named if tensor.is_floating_point()}
        self._place: Optional[_Place] = _Place(None, 0, 0)  # None after the end of a block
        self._located: Dict[BlockId, int] = {}  # the IPU of each block so far
        self._module_stack: List[torch.nn.Module] = []
        self._stages: List[_OpenStage] = []
        self._next_auto_id = 0
        self._auto_ids: Dict[object, str] = {}  # by the name of a module of the model, or another module
        self._numbers: Dict[BlockId, int] = {}
        self._hooks: List[Any] = []

    def stages(self) -> Tuple[StageUse, ...]:
        """Return the forward stages in the order of execution; a single empty one if nothing was computed."""
        return tuple(stage.use() for stage in self._stages or [_OpenStage(self._place or _Place(None, 0, 0))])

    @property
    def stage_index(self) -> int:
        """The index of the stage of the next operation."""
        opens = not self._stages or (self._place is not None and self._stages[-1].place[1:] != self._place[1:])
        return len(self._stages) - (0 if opens else 1)

    @contextlib.contextmanager
    def in_parts(self, factor: int, whole: Optional[torch.Tensor]) -> Iterator[None]:
        """Context for an operator that a device computes in parts.

        Args:
            factor: number of parts.
            whole: the operand that every part needs; None if the parts are added to one result.
        """
        self.parts = Parts(factor, whole)
        try:
            yield
        finally:
            self.parts = Parts()

    def describe_module(self) -> str:
        """Return the class of the running module, and its path in the model if it is a submodule."""
        if not self._module_stack:
            return "the model"
        module = self._module_stack[-1]
        name, kind = self._modules.get(module), type(module).__name__
        return f"{name} ({kind})" if name else kind

    def unused(self) -> Tuple[str, ...]:
        """Return the names of the parameters and buffers that no operation has used."""
        return tuple(self._unused.values())

    # -- called by blocks --------------------------------------------------------------------------------------------

    def begin(self, user_id: Optional[BlockId], ipu_id: Optional[int], owner: object = None) -> None:
        """Start a block. An `owner` without an id keeps the number of its first call."""
        block = self._auto_id(owner) if user_id is None else user_id
        number = self._numbers.setdefault(block, len(self._numbers))
        phase, ipu = self._strategy._locate(block, self._located.get(block) if ipu_id is None else ipu_id, number)
        self._located.setdefault(block, ipu)
        self._place = _Place(block, phase, ipu)

    def end(self) -> None:
        """End the block: the next operation needs another one."""
        self._place = None

    def restart_auto_ids(self) -> None:
        """Number blocks without an id from 0 again."""
        self._next_auto_id = 0

    def _auto_id(self, owner: object) -> str:
        if owner in self._auto_ids:
            return self._auto_ids[owner]
        number = str(self._next_auto_id)
        self._next_auto_id += 1
        if owner is not None:
            self._auto_ids[owner] = number
        return number

    # -- called by the forward ---------------------------------------------------------------------------------------

    def __enter__(self) -> StageRecorder:
        # Hooks of all modules: a forward may call one that is not part of the model.
        self._hooks.append(register_module_forward_pre_hook(self._enter_module))
        self._hooks.append(register_module_forward_hook(self._leave_module))
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
        # Newer torch calls this. With True it would import its compiler to skip it, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if tensors and func._schema.name not in _BOOKKEEPING:  # without tensors the result is a constant
            self._record(_count_operations(func, args, result), tensors)
        for observer in self.observers:
            observer(func, args, kwargs, result)
        return result

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if active_recorder() is not self:  # another thread runs it
            return
        block = self._block_of(module)
        if block is not None:
            self.begin(*block, owner=self._modules.get(module, module))
        self._module_stack.append(module)

    def _leave_module(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if active_recorder() is self:
            self._module_stack.pop()

    def _record(self, operations: int, tensors: List[torch.Tensor]) -> None:
        if self._place is None:
            raise Error("No active Block, all the ops must belong to a Block: the last `with poptorch.Block` has ended")
        stage = self._stage(self._place)
        stage.operations += operations
        if self._place.block is not None:
            stage.blocks[self._place.block] = None
        name = self._modules.get(self._module_stack[-1]) if self._module_stack else None
        if name:
            stage.modules[name] = None
        for tensor in tensors:
            if id(tensor) in self._unused:
                stage.tensors[self._unused.pop(id(tensor))] = None

    def _stage(self, place: _Place) -> _OpenStage:
        """Return the stage of the next operation, a new one if the IPU or the phase has changed."""
        if not self._stages or self._stages[-1].place[1:] != place[1:]:
            self._stages.append(_OpenStage(place))
        return self._stages[-1]


def tensors_in(value: Any) -> List[torch.Tensor]:
    """Return the tensors in arguments or a result, including those nested in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [each for item in value for each in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _count_operations(operator: Any, args: Tuple[Any, ...], result: Any) -> int:
    """Return the scalar operations of one call of an operator, an overload of `torch.ops`."""
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    first = next((item for item in results if isinstance(item, torch.Tensor)), None)
    if first is None or is_view(operator):
        return 0
    name = operator._schema.name
    rule = _RULES.get(name)
    if rule is not None:
        return rule(args, first)
    if name.startswith("aten::_scaled_dot_product"):
        return _attention(args, first)
    return first.numel()


def is_view(operator: Any) -> bool:
    """Return whether the result is a view of an argument."""
    aliases = [argument.alias_info for argument in operator._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _product(left: int) -> _Rule:
    """Return the rule of a matrix product whose left operand is argument number `left`."""
    return lambda args, result: 2 * result.numel() * int(args[left].shape[-1])


def _convolution(args: Tuple[Any, ...], result: torch.Tensor) -> int:
    source, weight = args[0], args[1]
    is_transposed = len(args) > 6 and args[6] is True
    positions = source.numel() if is_transposed else result.numel()
    return 2 * int(positions * weight.numel()) // int(weight.shape[0])


def _attention(args: Tuple[Any, ...], result: torch.Tensor) -> int:
    query, key, value = args[:3]
    rows, keys = int(query.numel()) // int(query.shape[-1]), int(key.shape[-2])
    return 2 * rows * keys * (int(query.shape[-1]) + int(value.shape[-1]))


def _recurrent(args: Tuple[Any, ...], result: torch.Tensor) -> int:
    # mkldnn_rnn_layer(input, weight of inputs, weight of states, ...)
    positions = int(args[0].numel()) // int(args[0].shape[-1])
    return 2 * positions * int(args[1].numel() + args[2].numel())


_RULES: Dict[str, _Rule] = {
    "aten::addbmm": lambda args, result: 2 * args[1].numel() * int(args[2].shape[-1]),
    "aten::addmm": _product(1),
    "aten::addmv": _product(1),
    "aten::baddbmm": _product(1),
    "aten::bmm": _product(0),
    "aten::convolution": _convolution,
    "aten::dot": _product(0),
    "aten::linear": _product(0),
    "aten::matmul": _product(0),
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mm": _product(0),
    "aten::mv": _product(0),
}


_INPUT = -1  # the stage that makes the inputs of the model


class StageActivations(NamedTuple):
    """The activations of one stage for one micro-batch, in bytes.

    Attributes:
        segments: what the backward pass needs, in parts that end at the program's recomputation checkpoints.
        entering: tensors from earlier stages, and inputs of the model.
        checkpoints: tensors marked by `recomputationCheckpoint`, of which the stage itself computes something.
        passed: the other ones, which only later stages use: they are stored there.
        tensors: number of tensors in the segments.
        operands: operands and results of the largest operator.
        casts: what the backward pass needs of the results of weights only, as their copies in half precision. The
            micro-batches share them (inferred).
    """

    segments: Tuple[int, ...] = (0,)
    entering: int = 0
    checkpoints: int = 0
    tensors: int = 0
    operands: int = 0
    passed: int = 0
    casts: int = 0

    @property
    def saved(self) -> int:
        """What the backward pass needs without recomputation."""
        return sum(self.segments)

    @property
    def automatic_checkpoints(self) -> int:
        """The least memory with evenly spaced checkpoints, and recomputation from one to the next."""
        mean = self.saved / max(1, self.tensors)
        return min(self.saved, round(2 * math.sqrt(self.saved * mean)))

    def scaled(self, factor: float) -> StageActivations:
        """Return the activations of a micro-batch that is `factor` times as large."""
        segments = tuple(round(factor * segment) for segment in self.segments)
        names = ("entering", "checkpoints", "operands", "passed")
        return self._replace(segments=segments, **{name: round(factor * getattr(self, name)) for name in names})


class _OpenActivations:
    def __init__(self) -> None:
        self.segments = [0]
        self.entering: Dict[int, int] = {}
        self.unused: Dict[int, int] = {}  # the checkpoints of which nothing has been computed
        self.checkpoints = self.tensors = self.operands = self.casts = 0

    def activations(self) -> StageActivations:
        sizes = (sum(self.entering.values()), self.checkpoints, self.tensors, self.operands)
        return StageActivations(tuple(self.segments), *sizes, sum(self.unused.values()), self.casts)


class ActivationRecorder:
    """Observes the operators of one forward; enter `saving()` for it.

    Args:
        recorder: determines the stage of each operator.
        weights: parameters and buffers, which are not activations.
        inputs: the inputs of the model.
    """

    def __init__(
        self,
        recorder: StageRecorder,
        weights: Iterable[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._recorder = recorder
        # Weights, what is computed from weights only, and random numbers.
        self._not_stored: Set[int] = set(map(_address, weights))
        self._weights, self._of_weights = set(self._not_stored), set(self._not_stored)
        self._made = {_address(tensor): _INPUT for tensor in inputs}  # the stage that made each tensor
        self._stages: Dict[int, _OpenActivations] = {}
        self._saved: Set[int] = set()
        recorder.observers.append(self._observe)
        recorder.checkpoint_observers.append(self._end_segment)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context that records what autograd saves.

        Autograd's graph holds the hooks, so these neither refer to this recorder afterwards, which refers to the model,
        nor return tensors with a graph: the garbage collector does not see such cycles.
        """
        saved: List[Callable[[torch.Tensor], None]] = [self._save]

        def save(tensor: torch.Tensor) -> torch.Tensor:
            saved[0](tensor)
            return tensor.detach()

        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            saved.clear()

    def stages(self, count: int) -> Tuple[StageActivations, ...]:
        """Return the activations of all stages, in the order of execution."""
        return tuple(self._stages.get(index, _OpenActivations()).activations() for index in range(count))

    def _stage(self) -> _OpenActivations:
        return self._stages.setdefault(self._recorder.stage_index, _OpenActivations())

    def _observe(self, operator: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], result: Any) -> None:
        index, stage = self._recorder.stage_index, self._stage()
        operands = {_address(tensor): tensor for tensor in tensors_in((args, kwargs))}
        results = {_address(tensor): tensor for tensor in tensors_in(result)}
        if operands and self._not_stored.issuperset(operands):
            self._not_stored.update(results)
            if self._of_weights.issuperset(operands):
                self._of_weights.update(results)
            return
        for address, tensor in operands.items():
            if self._made.get(address, index) < index:
                stage.entering[address] = self._size(tensor)
        made = results.keys() - operands.keys()
        self._not_stored.difference_update(made)  # memory that was used before
        self._of_weights.difference_update(made)
        if torch.Tag.nondeterministic_seeded in operator.tags:
            # The SDK draws the numbers of a dropout again; the last result is the mask.
            self._not_stored.update(list(results)[-1:])
        self._made.update(dict.fromkeys(results, index))
        if not is_view(operator):
            stage.checkpoints += sum(stage.unused.pop(address, 0) for address in operands)
            together = {**operands, **results}
            sizes = (
                self._part_size(address, tensor, address in results)
                for address, tensor in together.items()
                if address not in self._not_stored
            )
            stage.operands = max(stage.operands, sum(sizes))

    def _part_size(self, address: int, tensor: torch.Tensor, is_result: bool) -> int:
        """Return the bytes of an operand or a result that one part of the operator needs."""
        factor, whole = self._recorder.parts
        is_whole = is_result if whole is None else address == _address(whole)
        return self._size(tensor) if is_whole else self._size(tensor) // factor

    def _save(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self._saved or address in self._weights:
            return
        if address in self._of_weights:
            self._saved.add(address)
            self._stage().casts += self._size(tensor)
        elif address not in self._not_stored:
            self._saved.add(address)
            stage = self._stage()
            stage.segments[-1] += self._size(tensor)
            stage.tensors += 1

    def _end_segment(self, tensor: torch.Tensor) -> None:
        stage, address = self._stage(), _address(tensor)
        stage.segments.append(0)
        if address in self._saved:
            stage.checkpoints += self._size(tensor)
        else:
            stage.unused[address] = self._size(tensor)

    def _size(self, tensor: torch.Tensor) -> int:
        if tensor.layout != torch.strided:
            return 0  # the device has no sparse tensors
        elements = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
        return elements * min(4, tensor.element_size())  # the device has no integers of 64 bits


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:  # a sparse tensor of the host: it has no storage of its own
        return id(tensor)
    return int(tensor.untyped_storage().data_ptr())
