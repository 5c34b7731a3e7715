"""The arguments of a wrapped model and their split into micro-batches; its tensors that `anchorTensor` names.

The compilation fixes the arguments. PopTorch's names of tensors depend on its compiler; the emulation's are similar:

    x, batch/0               an argument of forward; if it holds several tensors, each with its position
    conv1/Conv2d:0           the output of a submodule: path, class, position; of the model itself: Net:0
    conv1.weight             a parameter, or a buffer as it is before the micro-batch
    Gradient___<name>        the gradient of a floating point tensor above (training only): the gradient of one
                             micro-batch's loss, multiplied by the loss scaling
    UpdatedVar___conv1.weight    a parameter after the weight update of a device iteration (training only)
    finalLossScale           the loss scaling (training with automatic loss scaling only)

If a name is unknown, a leading "model." is ignored: programs wrap their networks in a module `model`. If a module runs
several times in a forward, its last run counts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch.utils.hooks import RemovableHandle

from poptorch.device_mode import API_DTYPE
from poptorch.enums import CommGroupType, OutputMode
from poptorch.errors import Error
from poptorch.findings import reject
from poptorch.options import Options
from poptorch.parallel.tracing import tensors_in
from poptorch.pytree import TreeSpec, flatten


@dataclass(frozen=True)
class BatchLayout:
    """Dimension 0 of every input is [device iterations, accumulation steps, input groups, micro-batch].

    Without input groups there are as many micro-batches per step as replicas; the replica is the innermost index.
    """

    device_iterations: int
    accumulation_steps: int
    replicas: int
    group_size: int
    group_type: CommGroupType

    @classmethod
    def of(cls, options: Options) -> BatchLayout:
        """Return the layout for these options. Raises Error if the input groups do not fit."""
        layout = cls(
            device_iterations=options.device_iterations,
            accumulation_steps=options.Training.gradient_accumulation,
            replicas=options.replication_factor,
            group_size=options.input_group_size,
            group_type=options.input_cgt,
        )
        layout._check_groups()
        return layout

    @property
    def input_groups(self) -> int:
        """The number of groups of replicas that share an input."""
        return self.replicas // self.group_size

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in every input of a call."""
        return self.device_iterations * self.accumulation_steps * self.input_groups

    def index(self, iteration: int, step: int, replica: int) -> int:
        """Return the index of the micro-batch that a replica reads at an accumulation step of an iteration."""
        consecutive = self.group_type != CommGroupType.Orthogonal
        group = replica // self.group_size if consecutive else replica % self.input_groups
        return (iteration * self.accumulation_steps + step) * self.input_groups + group

    def select(self, tensors: Sequence[torch.Tensor], index: int) -> List[torch.Tensor]:
        """Return micro-batch number `index` of every tensor, as views; a 0-d tensor is returned as it is."""
        return [_select(tensor, index, self.micro_batches) for tensor in tensors]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check the kind and the shape of every tensor.

        Raises:
            Error: a tensor is sparse or complex, or has no elements.
            AssertionError: dimension 0 of a tensor is no multiple of the number of micro-batches.
        """
        _check_kinds(tensors)
        for index, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                raise Error(f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)})")
            size = tensor.shape[0] if tensor.dim() else 1
            assert size % self.micro_batches == 0, (
                f"Invalid batch dimension: tensor {index} of the arguments has {size} samples, no multiple of "
                f"{self.micro_batches} = {self.device_iterations} device iterations x {self.accumulation_steps} "
                f"gradient accumulation x {self.input_groups} replicas or input groups"
            )

    def _check_groups(self) -> None:
        if self.replicas % self.group_size:
            raise Error(f"The input group size {self.group_size} does not divide the {self.replicas} replicas")
        if self.group_size > 1 and self.device_iterations * self.accumulation_steps > 1:
            # The SDK tests input groups without these loops only, and would interleave the micro-batches wrongly.
            raise Error(
                f"Input groups of {self.group_size} replicas need 1 device iteration and gradient accumulation 1, not "
                f"{self.device_iterations} and {self.accumulation_steps}"
            )


def _select(tensor: torch.Tensor, index: int, micro_batches: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    size = tensor.shape[0] // micro_batches
    return tensor.narrow(0, index * size, size)


class ArgumentSpec(NamedTuple):
    """The arguments that a model is compiled for.

    Attributes:
        tree: how the arguments nest, and their constants.
        tensors: the dtype and the shape of each tensor.
        names: the name of each tensor: its parameter of `forward`, with the position if that holds several tensors.
    """

    tree: TreeSpec
    tensors: List[Tuple[torch.dtype, torch.Size]]
    names: List[str]


class CompiledInputs(NamedTuple):
    """The arguments of the call that compiled a model, in the order of `forward`; tensors are without their values."""

    args: List[Any]
    kwargs: Dict[str, Any]


class Arguments:
    """Binds calls to the signature of `forward` and checks them against the compiled ones.

    Positional, keyword and default arguments are equivalent. Values that are not tensors are compile-time constants.

    Args:
        forward: the model's `forward`.
        spec: the arguments to compile for.
        example_inputs: the tensors of one micro-batch, on which the model is traced.
    """

    def __init__(self, forward: Callable[..., Any], spec: ArgumentSpec, example_inputs: List[torch.Tensor]) -> None:
        self.spec = spec
        self.example_inputs = example_inputs
        self._signature = inspect.signature(forward)
        self._has_warned = False

    @classmethod
    def of_call(
        cls, forward: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], layout: BatchLayout
    ) -> Arguments:
        """Return the arguments of the call to compile for.

        Raises:
            AssertionError: the batch does not divide, or `forward` does not have an argument.
            Error: an argument is missing.
        """
        bound = _bind(inspect.signature(forward), args, kwargs)
        tensors, tree = flatten((bound.args, bound.kwargs))
        layout.check(tensors)
        spec = ArgumentSpec(tree, [_describe(tensor) for tensor in tensors], _names(bound))
        return cls(forward, spec, [tensor.detach().clone() for tensor in layout.select(tensors, 0)])

    def tensors(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[torch.Tensor]:
        """Return the tensors of one call, in order.

        Raises Error if structure, constants, dtypes or shapes differ, or one is sparse.
        """
        bound = _bind(self._signature, args, kwargs)
        tensors, tree = flatten((bound.args, bound.kwargs), self.spec.tree)
        pairs = zip(self.spec.tensors, map(_describe, tensors))
        check_arguments(self.spec.tree, tree, _positional_names(bound), pairs)
        _check_kinds(tensors)
        if not self._has_warned and any(tensor.requires_grad for tensor in tensors):
            self._has_warned = True
            message = "inputs that require a gradient are detached: outputs of the device cannot be differentiated"
            warnings.warn(f"poptorch: {message}", stacklevel=4)
        return tensors

    def compiled_inputs(self) -> CompiledInputs:
        """Return the arguments to compile for, with tensors on the meta device in place of those of the call."""
        shapes = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self.spec.tensors]
        args, kwargs = self.unflatten(shapes)
        return CompiledInputs(list(args), kwargs)

    def unflatten(self, tensors: List[torch.Tensor]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Return the arguments of `forward` with these tensors and the compile-time constants."""
        args, kwargs = self.spec.tree.unflatten(tensors)
        return args, kwargs


def _check_kinds(tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise Error(f"Tensor {index} of the arguments is sparse, which the device does not have: make it dense")
        if tensor.is_complex():
            words = "which the device does not have: pass torch.view_as_real of it"
            raise Error(
                f"Unsupported tensor input type from pytorch: tensor {index} of the arguments is complex, {words}"
            )


def _bind(signature: inspect.Signature, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> inspect.BoundArguments:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        _raise_missing(signature, args, kwargs)
        raise AssertionError(f"Invalid arguments of forward{signature}: {error}") from None
    bound.apply_defaults()
    return bound


def _raise_missing(signature: inspect.Signature, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    """Raise Error if the arguments fit the signature, but some are missing."""
    with contextlib.suppress(TypeError):
        given = signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if name not in given and parameter.default is parameter.empty and not is_variadic:
                raise Error(f"Mandatory parameter {name} missing: forward{signature}")


def _positional_names(bound: inspect.BoundArguments) -> List[str]:
    """Return the name of each value in `bound.args`."""
    names: List[str] = []
    for name, value in bound.arguments.items():
        is_variadic = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"*{name}[{index}]" for index in range(len(value))] if is_variadic else [name]
    return names


def _names(bound: inspect.BoundArguments) -> List[str]:
    names: List[str] = []
    for name, value in bound.arguments.items():
        tensors = len(flatten(value)[0])
        names += [name] if tensors == 1 else [f"{name}/{index}" for index in range(tensors)]
    return names


def _describe(tensor: torch.Tensor) -> Tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def synthetic_inputs(spec: ArgumentSpec, layout: BatchLayout) -> List[torch.Tensor]:
    """Return the micro-batch that `options.enableSyntheticData` uses for all inputs; the same values in every run.

    Floating point tensors are normally distributed, others are zero: valid labels and indices.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for dtype, shape in spec.tensors:
        micro_batch = (shape[0] // layout.micro_batches, *shape[1:]) if shape else ()
        if dtype.is_floating_point:
            inputs.append(torch.randn(micro_batch, generator=generator).to(API_DTYPE.get(dtype, dtype)))
        else:
            inputs.append(torch.zeros(micro_batch, dtype=API_DTYPE.get(dtype, dtype)))
    return inputs


_HINT = (
    "The arguments are fixed when the model is compiled, by its first call: drop the last short batch of an epoch, or, "
    "for other arguments, wrap the model again or call destroy()"
)


Description = Tuple[torch.dtype, torch.Size]  # of a tensor; the SDK tells int64 from int32, which are one on the device


def check_arguments(
    compiled: TreeSpec, given: TreeSpec, names: Sequence[str], tensors: Iterator[Tuple[Description, Description]]
) -> None:
    """Raise Error at the first difference.

    Args:
        compiled: the spec of (positional arguments, named arguments) that the model was compiled for.
        given: the spec of the call; its dictionaries are in the order of `compiled` where they have the same keys.
        names: the names of the positional arguments of the call.
        tensors: for each tensor, what the model was compiled for, and what is given.
    """
    expected, found = compiled.children[0].children, given.children[0].children
    if len(expected) != len(found):
        raise _mismatch("Number of positional arguments", "", f"{len(expected)} arguments", len(found))
    for name, one, other in zip(names, expected, found):
        _check(name, one, other, tensors)
    named, given_named = compiled.children[1], given.children[1]
    _check_keys("named arguments", named, given_named)
    for name, one, other in zip(named.keys, named.children, given_named.children):
        _check(name, one, other, tensors)


def _check(name: str, compiled: TreeSpec, given: TreeSpec, tensors: Iterator[Tuple[Description, Description]]) -> None:
    if compiled.value_type is not given.value_type:
        raise _mismatch("Type", name, compiled.value_type, given.value_type)
    if compiled.value_type is torch.Tensor:
        one, other = next(tensors)
        if one != other:
            what, index = ("Data type", 0) if one[0] != other[0] else ("Shape", 1)
            raise _mismatch(what, name, one[index], other[index])
        return
    if compiled.is_constant:
        if not _is_same(compiled.constant, given.constant):
            raise _mismatch("Value", name, repr(compiled.constant), repr(given.constant))
        return
    if issubclass(compiled.value_type, dict):
        _check_keys(name, compiled, given)
    if len(compiled.children) != len(given.children):
        raise _mismatch("Length", name, f"{len(compiled.children)} elements", len(given.children))
    labels = compiled.keys or range(len(compiled.children))
    for label, one_child, other_child in zip(labels, compiled.children, given.children):
        _check(f"{name}[{label}]", one_child, other_child, tensors)


def _check_keys(name: str, compiled: TreeSpec, given: TreeSpec) -> None:
    expected, found = set(compiled.keys), set(given.keys)
    details = [
        f"{what}: {', '.join(sorted(map(str, keys)))}"
        for what, keys in (("Unexpected arguments", found - expected), ("Missing arguments", expected - found))
        if keys
    ]
    if details:
        raise Error(f"Keys mismatch for {name}: {'. '.join(details)}. {_HINT}")


def _is_same(compiled: Any, value: Any) -> bool:
    """Return whether two constants are equal; different objects that cannot be compared are not."""
    if compiled is value:
        return True
    if getattr(compiled, "shape", None) != getattr(value, "shape", None):  # arrays are compared with broadcasting
        return False
    try:
        equal = compiled == value
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare item by item
    except (TypeError, ValueError, RuntimeError):
        return False


def _mismatch(what: str, name: str, expected: Any, found: Any) -> Error:
    of = f" for {name}" if name else ""
    return Error(f"{what} mismatch{of}: expected {expected} but got {found}. {_HINT}")


GRADIENT = "Gradient___"
UPDATED = "UpdatedVar___"
FINAL_LOSS_SCALE = "finalLossScale"


def check_output_period(mode: OutputMode, period: int, device_iterations: int) -> None:
    """Raise Error if this mode would return nothing of a call, and reject a period that does not divide the call."""
    if mode == OutputMode.EveryN and period > device_iterations:
        raise Error(
            f"OutputMode.EveryN returns every {period} device iterations, but a call runs only {device_iterations}"
        )
    if mode == OutputMode.EveryN and device_iterations % period:  # inferred: PopART's check of its data flow
        reject(
            f"The period {period} of OutputMode.EveryN is no factor of the {device_iterations} device iterations.",
            "options",
        )


class Anchor(NamedTuple):
    """One anchored tensor: its short name, its name in the model, and its output mode."""

    short_name: str
    name: str
    mode: OutputMode
    period: int


def anchors_of(options: Options, names: Sequence[str]) -> List[Anchor]:
    """Return the anchors of the options for a model with these tensor names. Raises Error for an unknown name."""
    known = frozenset(names)
    found = []
    for short_name, (long_name, is_default, mode, period) in options.anchored_tensors.items():
        name = next((name for name in _candidates(long_name) if name in known), None)
        if name is None:
            raise Error(
                f"There is no tensor {long_name!r} to anchor as {short_name!r}: PoplarExecutor.getTensorNames() lists "
                "the names once the model is compiled"
            )
        if is_default or mode == OutputMode.Default:
            mode, period = options.output_mode, options.output_return_period
        check_output_period(mode, period, options.device_iterations)
        found.append(Anchor(short_name, name, OutputMode(mode), period))
    return found


def _candidates(long_name: str) -> Tuple[str, ...]:
    prefix = next((prefix for prefix in (GRADIENT, UPDATED) if long_name.startswith(prefix)), "")
    bare = long_name[len(prefix) :]
    without = bare[len("model.") :] if bare.startswith("model.") else bare
    return long_name, prefix + without


class AnchorRecorder:
    """Records the names of all tensors in a module's forwards, and the values of the anchored ones."""

    def __init__(self, module: torch.nn.Module, anchored: Iterable[str] = ()) -> None:
        self._module = module
        self._anchored = frozenset(anchored)
        for path, submodule in module.named_modules():
            submodule.register_forward_hook(self._output_hook(path))
        self._gradient_hooks: List[RemovableHandle] = []
        self._names: Dict[str, None] = {}
        self._values: Dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Tuple[str, ...]:
        """The names of all tensors of the last forward."""
        return tuple(self._names)

    def begin(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Begin a forward on these inputs, which are copies of the host's."""
        self.end()
        for name, tensor in zip(names, tensors):
            if GRADIENT + name in self._anchored and tensor.is_floating_point():
                tensor.requires_grad_()
            self._record(name, tensor)
        for name, parameter in self._module.named_parameters():
            self._record(name, parameter)
            if parameter.requires_grad and torch.is_grad_enabled():
                self._names[UPDATED + name] = None
        for name, buffer in self._module.named_buffers():
            self._record(name, buffer)

    def value(self, name: str) -> torch.Tensor:
        """Return this tensor of the last forward and backward pass. Raises Error if they did not compute it."""
        if name not in self._values:
            raise Error(f"The anchored tensor {name!r} was not computed in this call, though it was when compiled")
        return self._values[name]

    def end(self) -> None:
        """Release the tensors."""
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks, self._names, self._values = [], {}, {}

    def _output_hook(self, path: str) -> Any:
        prefix = f"{path.replace('.', '/')}/" if path else ""

        def record_outputs(module: torch.nn.Module, args: Any, output: Any) -> None:
            for index, tensor in enumerate(tensors_in(output)):
                self._record(f"{prefix}{type(module).__name__}:{index}", tensor)

        return record_outputs

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        gradient = GRADIENT + name
        is_differentiable = tensor.is_floating_point() and torch.is_grad_enabled()
        self._names.update(dict.fromkeys((name, gradient) if is_differentiable else (name,)))
        if name in self._anchored:
            self._values[name] = tensor.detach().clone()  # the tensor may change before the call ends
        if gradient in self._anchored:
            # The gradient is zero if the loss does not depend on the tensor.
            self._values[gradient] = torch.zeros_like(tensor, requires_grad=False)
            if tensor.requires_grad:
                record_gradient = functools.partial(self._record_gradient, gradient)
                handle: RemovableHandle = tensor.register_hook(record_gradient)  # type: ignore[no-untyped-call, unused-ignore]
                self._gradient_hooks.append(handle)

    def _record_gradient(self, name: str, value: torch.Tensor) -> None:
        self._values[name] = value.detach().clone()
