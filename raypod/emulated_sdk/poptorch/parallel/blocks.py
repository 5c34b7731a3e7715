"""Blocks: parts of a forward that a program puts on an IPU (contract 3).

They say something only while a wrapped model is compiled; everywhere else, and so on a CPU, they do nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple, TypeVar

import torch

from poptorch.options.strategies import ipu_number
from poptorch.parallel.tracing import active_stages
from poptorch.errors import Error

_MARK = "_poptorch_block"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Block(torch.nn.Module):
    """`with poptorch.Block("encoder", ipu_id=1):` puts the operations inside on an IPU.

    At the end of a nested block the enclosing one goes on. After an outermost block its IPU goes on until the next
    block begins [I]: so a loss behind the last block adds no stage.

    user_id: by which stages name the block; None for a number. AssertionError unless a string.
    ipu_id: IPU within the replica, from 0; None leaves it to the strategy. AssertionError for another value.
    """

    @staticmethod
    def useAutoId() -> None:
        """At the start of `forward`: number the blocks without an id "0", "1", ... from here."""
        stages = active_stages()
        if stages is not None:
            stages.restart_auto_ids()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Begin a block that lasts until the next one begins."""
        _begin(_checked(user_id, ipu_id))

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = _checked(user_id, ipu_id)

    def __enter__(self) -> None:
        stages = active_stages()
        if stages is not None:
            stages.open(self._user_id, self._ipu_id, self)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        stages = active_stages()
        if stages is not None:
            stages.close()


class LegacyBeginBlockFn(torch.nn.Module):
    """A function whose call begins a block; what `BeginBlock` makes of a function."""

    def __init__(
        self, layer_to_call: Callable[..., Any], user_id: Optional[str] = None, ipu_id: Optional[int] = None
    ) -> None:
        super().__init__()
        if not callable(layer_to_call):
            raise Error(f"BeginBlock takes a module or a function, not {type(layer_to_call).__name__}")
        self._user_id, self._ipu_id = _checked(user_id, ipu_id)
        self._layer_to_call = layer_to_call

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        _begin((self._user_id, self._ipu_id))
        return self._layer_to_call(*input, **kwargs)


def BeginBlock(layer_to_call: Any, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> Any:
    """Let the calls of a layer begin a block, which lasts until the next one begins. Returns the layer itself.

    The layer keeps its class; it is saved, copied and loaded as before, and its block goes with it. A function comes
    back in a `LegacyBeginBlockFn`. Error when the layer has a block already, or is neither module nor function.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
    if block_of(layer_to_call) is not None:
        raise Error(
            f"BeginBlock has already been called on this {type(layer_to_call).__name__}: a layer begins one block. "
            "poptorch.removeBlocks(layer) takes it away"
        )
    # Plain data in the instance: a pickle of the layer loads where there is no poptorch.
    vars(layer_to_call)[_MARK] = _checked(user_id, ipu_id)
    return layer_to_call


def BlockFunction(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> Callable[[_Function], _Function]:
    """Decorator: the function's body is a block."""
    block = _checked(user_id, ipu_id)

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def in_block(*args: Any, **kwargs: Any) -> Any:
            with Block(*block):
                return function(*args, **kwargs)

        return in_block  # type: ignore[return-value]

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Take away what `BeginBlock` said of a module and all its submodules. AssertionError unless it is a module."""
    assert isinstance(module, torch.nn.Module), f"removeBlocks takes a torch.nn.Module, not {type(module).__name__}"
    for part in module.modules():
        vars(part).pop(_MARK, None)


def block_of(module: torch.nn.Module) -> Optional[Tuple[Optional[str], Optional[int]]]:
    """Id and IPU that `BeginBlock` gave to a module; None without."""
    return vars(module).get(_MARK)


def _begin(block: Tuple[Optional[str], Optional[int]]) -> None:
    stages = active_stages()
    if stages is not None:
        stages.begin(*block)


def _checked(user_id: Any, ipu_id: Any) -> Tuple[Optional[str], Optional[int]]:
    assert user_id is None or isinstance(user_id, str), f"A block's id is a string, got {user_id!r}"
    return user_id, None if ipu_id is None else ipu_number(ipu_id)
