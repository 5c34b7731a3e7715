"""`custom_op`, and the Python implementations of custom operators; loads of libraries that have none.

A custom operator is one that a program brings as C++ and vertex code for the IPU, or one of PopART's own. Its
implementation is found by name, domain and version.

`EMULATED_POD_CUSTOM_OPS=module[,module]` and the entry points `emulated_pod.custom_ops` name modules that register
theirs when they are imported. They have precedence over those of this package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import inspect
import math
import os
from pathlib import PurePath
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from poptorch import findings
from poptorch.device_mode import API_DTYPE, is_on_device, off_device
from poptorch.environment import logger
from poptorch.errors import Error

_Tensors = Tuple[torch.Tensor, ...]


class OperatorId(NamedTuple):
    """The identification of an operator in PopART."""

    name: str
    domain: str
    version: int

    def __str__(self) -> str:
        return f"{self.domain}.{self.name}:{self.version}"


class Kind(NamedTuple):
    """Shape and dtype of an output, of the API or of the emulated device."""

    shape: Tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kind:
        """Return those of a tensor, with the dtype of the API."""
        return cls(tuple(tensor.shape), API_DTYPE.get(tensor.dtype, tensor.dtype))

    def __str__(self) -> str:
        return f"{str(self.dtype).replace('torch.', '')}{list(self.shape)}"


class Emulation:
    """A Python function that computes what a custom operator computes; call it as `poptorch.custom_op` does.

    Attributes:
        operator: the operator.
        is_flat: the outputs have one dimension in PopART, and in PopTorch the shapes of the examples.
    """

    def __init__(self, operator: OperatorId, function: Callable[..., Any], is_flat: bool = False) -> None:
        self.operator, self.is_flat = operator, is_flat
        self._function = function
        self._gradients: Optional[Callable[..., Any]] = None
        self.__doc__ = function.__doc__

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate `function(inputs, outputs, gradients, **attributes)`, which returns the gradients of the inputs."""
        self._gradients = function
        return function

    def __call__(self, *inputs: torch.Tensor, **attributes: Any) -> _Tensors:
        """Return the outputs. Raises Error if the function does not take the inputs and attributes."""
        try:
            inspect.signature(self._function).bind(*inputs, **attributes)
        except TypeError as error:
            given = ", ".join(sorted(attributes)) or "none"
            raise Error(
                f"{self._described}: {error}. The program passes {len(inputs)} inputs and the attributes: {given}"
            ) from None
        if self._gradients is None:
            return self.compute(inputs, attributes)
        outputs: _Tensors = _WithBackward.apply(self, attributes, *inputs)  # type: ignore[no-untyped-call]
        return outputs

    def compute(self, inputs: Sequence[torch.Tensor], attributes: Dict[str, Any]) -> _Tensors:
        """Return the outputs of the function itself; an output that is an input is copied."""
        outputs = self._tensors(self._function(*inputs, **attributes), "outputs")
        return tuple(output.clone() if any(output is each for each in inputs) else output for output in outputs)

    def gradients(
        self, inputs: _Tensors, outputs: _Tensors, gradients: _Tensors, attributes: Dict[str, Any]
    ) -> Tuple[Optional[torch.Tensor], ...]:
        """Return the gradients of the inputs by the function that `backward` decorates."""
        assert self._gradients is not None
        found = self._tensors(self._gradients(inputs, outputs, gradients, **attributes), "gradients", may_lack=True)
        if len(found) != len(inputs):
            raise Error(f"{self._described}: backward returned {len(found)} gradients for {len(inputs)} inputs")
        return found

    @property
    def _described(self) -> str:
        return f"{self._function.__module__}.{self._function.__qualname__}, which emulates {self.operator}"

    def _tensors(self, value: Any, what: str, may_lack: bool = False) -> Tuple[Any, ...]:
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        for each in values:
            if not isinstance(each, torch.Tensor) and not (may_lack and each is None):
                raise Error(f"{self._described}: the {what} must be tensors, not {type(each).__name__}")
        return values


class _WithBackward(torch.autograd.Function):
    """Computes gradients by the function that `Emulation.backward` decorates."""

    @staticmethod
    def forward(ctx: Any, emulation: Emulation, attributes: Dict[str, Any], *inputs: torch.Tensor) -> Any:
        outputs = emulation.compute(inputs, attributes)
        ctx.emulation, ctx.attributes, ctx.inputs = emulation, attributes, len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        inputs, outputs = saved[: ctx.inputs], saved[ctx.inputs :]
        return (None, None, *ctx.emulation.gradients(inputs, outputs, gradients, ctx.attributes))


def run(
    emulation: Emulation, kinds: Sequence[Kind], attributes: Dict[str, Any], inputs: Sequence[torch.Tensor]
) -> List[torch.Tensor]:
    """Return the outputs of an operator in the forward of a model, for outputs of these kinds.

    The implementation runs as code of the host: it may use all of torch, and read values of tensors.

    Raises:
        poptorch.Error: the implementation does not take these arguments, or returns other outputs.
    """
    # The modes of the forward see one function of the inputs, not the implementation's operators.
    if has_torch_function(tuple(inputs)):
        outputs: List[torch.Tensor] = handle_torch_function(run, tuple(inputs), emulation, kinds, attributes, inputs)
        return outputs
    with off_device():
        computed = emulation(*inputs, **attributes)
        if emulation.is_flat:
            computed = tuple(map(_shaped, computed, kinds))
    found = [Kind.of(output) for output in computed]
    if found != list(kinds):
        raise Error(
            f"{emulation.operator}: its emulation returned {_listed(found)}, but example_outputs of "
            f"poptorch.custom_op are {_listed(kinds)}"
        )
    return list(computed)


def _shaped(output: torch.Tensor, kind: Kind) -> torch.Tensor:
    return output.view(kind.shape) if output.numel() == math.prod(kind.shape) else output


def _listed(kinds: Sequence[Kind]) -> str:
    return ", ".join(map(str, kinds)) or "nothing"


MODULES = "EMULATED_POD_CUSTOM_OPS"
ENTRY_POINTS = "emulated_pod.custom_ops"

# Imported when the first custom operator runs; each imports `built_in_emulation` from here.
_BUILT_IN = tuple(f"poptorch.custom_operators.{name}" for name in ("collectives", "examples", "research"))

_Function = Callable[..., Any]
_registered: Dict[OperatorId, Emulation] = {}
_built_in: Dict[OperatorId, Emulation] = {}
_patterns: Set[str] = set()


def custom_op_emulation(name: str, *, domain: str, version: int = 1) -> Callable[[_Function], Emulation]:
    """Register the decorated function as the implementation of a custom operator; a later one replaces it.

    The function gets the tensors of `poptorch.custom_op`'s `inputs` as positional arguments and its `attributes` by
    name, and returns the output, or a tuple of the outputs. Gradients are those of autograd, unless
    `@function.backward` decorates a function that computes them: it gets the tuples of inputs, outputs and gradients of
    the outputs, and the attributes by name, and returns the gradient of each input or None.

    Args:
        name, domain, version: as passed to `poptorch.custom_op`.
    """
    return _registrar(_registered, OperatorId(name, domain, version))


def built_in_emulation(
    name: str, domain: str = "ai.graphcore", is_flat: bool = False
) -> Callable[[_Function], Emulation]:
    """Register an implementation that is part of the emulated SDK; for `is_flat` see `Emulation`."""
    return _registrar(_built_in, OperatorId(name, domain, 1), is_flat)


def _registrar(
    table: Dict[OperatorId, Emulation], operator: OperatorId, is_flat: bool = False
) -> Callable[[_Function], Emulation]:
    def register(function: _Function) -> Emulation:
        table[operator] = Emulation(operator, function, is_flat)
        return table[operator]

    return register


def custom_pattern(name: str) -> None:
    """Accept the name of a pattern of a program's library in `_Popart.setPatterns`; it has no effect here."""
    _patterns.add(name)


def is_pattern(name: str) -> bool:
    """Return whether a module has registered the pattern. Raises Error if a named module cannot be imported."""
    load()
    return name in _patterns


def lookup(operator: OperatorId) -> Optional[Emulation]:
    """Return the implementation of an operator, or None. Raises Error if a named module cannot be imported."""
    load()
    return _registered.get(operator) or _built_in.get(operator)


def is_named() -> bool:
    """Return whether EMULATED_POD_CUSTOM_OPS or an entry point names a module."""
    return bool(_names() or _entry_points())


def load() -> None:
    """Import the modules with implementations, once. Raises Error if one that the user names cannot be imported."""
    for module in _BUILT_IN:
        importlib.import_module(module)
    for entry in _entry_points():
        _import(f"the entry point {entry.name!r} of {ENTRY_POINTS}", entry.load)
    for name in _names():
        _import(f"{MODULES}={os.environ[MODULES]}", functools.partial(importlib.import_module, name))


def _names() -> List[str]:
    return [name.strip() for name in os.environ.get(MODULES, "").split(",") if name.strip()]


@functools.lru_cache(maxsize=None)
def _entry_points() -> Tuple[Any, ...]:
    found: Any = importlib.metadata.entry_points()
    # A dictionary before Python 3.10.
    return tuple(found.select(group=ENTRY_POINTS) if hasattr(found, "select") else found.get(ENTRY_POINTS, ()))


def _import(what: str, load_module: Callable[[], Any]) -> None:
    try:
        load_module()
    except ImportError as error:
        raise Error(f"{what} cannot be imported: {error}. Its folder must be in PYTHONPATH") from error


_SYSTEM = ("/lib", "/usr/")  # folders whose libraries are not a program's own operators


class AbsentLibrary:
    """Takes the place of a library that was not loaded. It has no functions."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._name} has no {name!r} here, as it was not loaded: {self._reason}")


def tolerate_absent() -> None:
    """Let `ctypes.cdll.LoadLibrary` and `torch.ops.load_library` accept operators that cannot be loaded."""
    ctypes.cdll.LoadLibrary = _tolerant(ctypes.cdll.LoadLibrary)  # type: ignore[method-assign]
    torch.ops.load_library = _tolerant(torch.ops.load_library)  # type: ignore[method-assign]


def _tolerant(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that only warns of a library of operators that cannot be loaded, if implementations are named."""

    @functools.wraps(loader)
    def load_library(name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return loader(name, *args, **kwargs)
        except OSError as error:
            if not (_may_hold_operators(name) and (is_named() or findings.is_active())):
                raise
            load()
            _warn(os.fspath(name), str(error))
            return AbsentLibrary(os.fspath(name), str(error))

    return load_library


def _may_hold_operators(name: Any) -> bool:
    """Return whether a name is that of a program's own library: a path to a .so file, or the name of one."""
    if not isinstance(name, (str, os.PathLike)):
        return False
    text = os.fspath(name)
    if not isinstance(text, str) or not text.endswith(".so") or text.startswith(_SYSTEM):
        return False
    # dlopen looks for a bare name in the folders of the system, and programs try several names of a library there.
    return os.sep in text or not PurePath(text).name.startswith("lib")


@functools.lru_cache(maxsize=None)
def _warn(name: str, reason: str) -> None:
    logger.warning(
        "%s was not loaded: %s. Its operators are those in Python that %s names, or of the emulated SDK",
        name,
        reason,
        MODULES,
    )


_ATTRIBUTE_TYPES = (float, int, str)


def custom_op(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[torch.Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> List[torch.Tensor]:
    """Return what the Python implementation of the operator computes (`poptorch.emulation`).

    On the host, as in the SDK, return zeros of the shapes and dtypes of `example_outputs`.

    Args:
        attributes: floats, ints, strings, or lists of one of these, by ASCII names.

    Raises:
        ValueError: other attributes.
        poptorch.Error: on the device: there is no implementation, or it returns other outputs.
    """
    attributes = {} if attributes is None else attributes
    for key, value in attributes.items():
        _check_attribute(key, value)
    examples = list(example_outputs)
    if not is_on_device():
        return [torch.zeros_like(output, requires_grad=output.requires_grad) for output in examples]
    return _on_device(inputs, OperatorId(name, domain, domain_version), examples, attributes)


def custom_operation(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    num_outputs: int,
    outputs: List[torch.Tensor],
    attributes: str,
) -> List[torch.Tensor]:
    """Return `outputs` on the host, and those of the implementation on the device.

    Raises:
        poptorch.Error: on the device: as `custom_op`, or `attributes`, which PopTorch numbers internally, is not empty.
    """
    if not is_on_device():
        return outputs
    if attributes:
        raise Error(f"torch.ops.poptorch.custom_operation: pass the attributes of {name} by poptorch.custom_op")
    return _on_device(inputs, OperatorId(name, domain, domain_version), outputs, {})


def _on_device(
    inputs: Iterable[torch.Tensor], operator: OperatorId, examples: List[torch.Tensor], attributes: Dict[str, Any]
) -> List[torch.Tensor]:
    kinds = [Kind.of(example) for example in examples]
    emulation = lookup(operator)
    if emulation is None and findings.is_active():
        text = f"{operator} has no implementation here, so what it computes is unknown: the check went on with zeros"
        findings.add_here(findings.WARN, "custom operator", text)
        emulation = _zeros(operator, kinds)
    if emulation is None:
        raise Error(
            f"poptorch.custom_op: the custom operator {operator} is C++ for the IPU, and the emulated SDK has no "
            f"implementation of it. Register one in Python by @custom_op_emulation({operator.name!r}, "
            f"domain={operator.domain!r}, version={operator.version}) of poptorch.emulation, in a module that "
            f"{MODULES} names"
        )
    return run(emulation, kinds, attributes, list(inputs))


def _zeros(operator: OperatorId, kinds: List[Kind]) -> Emulation:
    """Return an implementation whose outputs are zeros that depend on all inputs."""

    def zeros(*inputs: torch.Tensor, **attributes: Any) -> Any:
        values = [each.flatten()[:1].sum().float() * 0 for each in inputs if each.is_floating_point()]
        zero = torch.stack(values).sum() if values else torch.zeros(())
        return tuple(zero.to(kind.dtype).expand(kind.shape).clone() for kind in kinds)

    return Emulation(operator, zeros)


def _check_attribute(key: Any, value: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"All attribute keys must be strings, not {key!r}")
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(each, _ATTRIBUTE_TYPES) and isinstance(each, type(values[0])) for each in values):
        raise ValueError(
            f"Attribute values must be floats, ints, strings or a list of one of these, but {key} is {value!r}"
        )
    for text in (key, *values):
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"{text} contains non-ASCII characters.")
