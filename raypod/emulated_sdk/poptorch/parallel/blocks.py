"""Blocks: parts of a forward that a program assigns to IPUs, and modules as text with their blocks.

Blocks only take effect during the compilation of a wrapped model; everywhere else they do nothing.
"""

from __future__ import annotations

import builtins
import functools
from typing import Any, Callable, Optional, Tuple, TypeVar

import torch

from poptorch.errors import Error
from poptorch.options.strategies import BlockId, ipu_number
from poptorch.parallel.tracing import active_recorder

_ATTRIBUTE = "_poptorch_block"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Block(torch.nn.Module):
    """Context manager that puts its operations on an IPU: `with poptorch.Block("encoder", ipu_id=1):`.

    After its end, the next operation must be in another block (poptorch.Error "No active Block"); this also holds for
    the operations of an enclosing block. `Block.start` and `BeginBlock` start blocks without an end.

    Args:
        user_id: id of the block in stages; None for a number. AssertionError unless a string or an integer.
        ipu_id: IPU within the replica, from 0; None leaves it to the strategy. AssertionError for other values.
    """

    @staticmethod
    def useAutoId() -> None:
        """Number the blocks without an id "0", "1", ... from here; call it at the start of `forward`."""
        recorder = active_recorder()
        if recorder is not None:
            recorder.restart_auto_ids()

    @staticmethod
    def start(user_id: Optional[BlockId] = None, ipu_id: Optional[int] = None) -> None:
        """Start a block that lasts until the next one starts."""
        _begin(_checked(user_id, ipu_id))

    def __init__(self, user_id: Optional[BlockId] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = _checked(user_id, ipu_id)

    def __enter__(self) -> None:
        _begin((self._user_id, self._ipu_id))

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        recorder = active_recorder()
        if recorder is not None:
            recorder.end()


class LegacyBeginBlockFn(torch.nn.Module):
    """A function whose call starts a block; `BeginBlock` returns it for a function."""

    def __init__(
        self, layer_to_call: Callable[..., Any], user_id: Optional[BlockId] = None, ipu_id: Optional[int] = None
    ) -> None:
        super().__init__()
        if not callable(layer_to_call):
            raise Error(f"BeginBlock takes a module or a function, not {type(layer_to_call).__name__}")
        self._user_id, self._ipu_id = _checked(user_id, ipu_id)
        self._layer_to_call = layer_to_call

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        _begin((self._user_id, self._ipu_id))
        return self._layer_to_call(*input, **kwargs)


def BeginBlock(layer_to_call: Any, user_id: Optional[BlockId] = None, ipu_id: Optional[int] = None) -> Any:
    """Start a block, which lasts until the next one starts, in every call of a layer.

    Returns:
        The layer itself; for a function a `LegacyBeginBlockFn`. The layer keeps its class, and copying, saving and
        loading it keeps the block.

    Raises:
        poptorch.Error: the layer already starts a block, or is neither a module nor a function.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
    if block_of(layer_to_call) is not None:
        raise Error(
            f"BeginBlock has already been called on this {type(layer_to_call).__name__}: a layer starts one block. "
            "Call poptorch.removeBlocks(layer) first"
        )
    # Plain data, so that a pickle of the layer can be loaded without poptorch.
    vars(layer_to_call)[_ATTRIBUTE] = _checked(user_id, ipu_id)
    return layer_to_call


def BlockFunction(user_id: Optional[BlockId] = None, ipu_id: Optional[int] = None) -> Callable[[_Function], _Function]:
    """Return a decorator that runs a function in a block."""
    block = _checked(user_id, ipu_id)

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def in_block(*args: Any, **kwargs: Any) -> Any:
            with Block(*block):
                return function(*args, **kwargs)

        return in_block  # type: ignore[return-value]

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Remove the blocks that `BeginBlock` added to a module and its submodules; AssertionError unless a module."""
    assert isinstance(module, torch.nn.Module), f"removeBlocks takes a torch.nn.Module, not {type(module).__name__}"
    for submodule in module.modules():
        vars(submodule).pop(_ATTRIBUTE, None)


def block_of(module: torch.nn.Module) -> Optional[Tuple[Optional[BlockId], Optional[int]]]:
    """Return id and IPU of the block that `BeginBlock` added to a module; None if there is none."""
    return vars(module).get(_ATTRIBUTE)


def _begin(block: Tuple[Optional[BlockId], Optional[int]]) -> None:
    recorder = active_recorder()
    if recorder is not None:
        recorder.begin(*block)


def _checked(user_id: Any, ipu_id: Any) -> Tuple[Optional[BlockId], Optional[int]]:
    is_id = user_id is None or isinstance(user_id, (str, int))
    assert is_id, f"A block id must be a string or an integer, got {user_id!r}"
    return user_id, None if ipu_id is None else ipu_number(ipu_id)


def module_repr(m: torch.nn.Module) -> str:
    """Return `repr(m)`, with `BeginBlock(...)` before each module that starts a block, and its other pre-hooks."""
    extra = m.extra_repr().split("\n") if m.extra_repr() else []
    children = [f"({name}): " + module_repr(child).replace("\n", "\n  ") for name, child in m.named_children()]
    block = block_of(m)
    prefix = "" if block is None else f"BeginBlock(user_id={block[0]}, ipu_id={block[1]}) "
    prefix += "".join(f"{hook!r} " for hook in m._forward_pre_hooks.values())
    lines = [*extra, *children]
    is_short = not lines or len(lines) == len(extra) == 1
    body = "".join(lines) if is_short else "\n  " + "\n  ".join(lines) + "\n"
    return f"{prefix}{m._get_name()}({body})"  # type: ignore[no-untyped-call]


def print(m: Any) -> None:
    """Print a module with its blocks; anything else as the built-in `print`."""
    builtins.print(module_repr(m) if isinstance(m, torch.nn.Module) else m)  # noqa: T201
