"""Callbacks of `raypod.fit`: functions and objects that get the events of a run, and may request its end."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, Tuple, Union, get_args

from raypod.errors import ConfigError
from raypod.events import Event
from raypod.runs.callback import Callback
from raypod.system.command_line import suggestion

Handler = Callable[[Any], Any]


class _Stop:
    """The type of `STOP`."""

    def __repr__(self) -> str:
        return "raypod.STOP"


STOP = _Stop()  # a callback returns it to end the run after the current call, with a checkpoint


def _method_of(event_type: type) -> str:
    """Return the method that gets the events of a type: `on_update_done` for `UpdateDone`."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", event_type.__name__).lower()


_METHODS: Dict[str, Tuple[type, ...]] = {_method_of(kind): (kind,) for kind in get_args(Event)}
_METHODS["on_event"] = get_args(Event)


class Callbacks(Callback):
    """Passes events to the callbacks of the user, in their order."""

    def __init__(self, callbacks: Union[Handler, Iterable[Any]], stop: Callable[[str], None]) -> None:
        """`callbacks`: one callback or several, see `raypod.fit`; `stop` ends the run.

        Raises:
            ConfigError: an object is no callback, or has a method `on_...` that is not the one of an event.
        """
        each = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        self._stop = stop
        self._handlers: List[Tuple[Tuple[type, ...], Handler, str]] = []
        for callback in each:
            self._handlers += _handlers_of(callback)

    def on_event(self, event: Event) -> None:
        """Pass an event to the callbacks."""
        for kinds, handler, name in self._handlers:
            if isinstance(event, kinds) and handler(event) is STOP:
                self._stop(f"the callback {name} requested it")


def _handlers_of(callback: Any) -> Iterable[Tuple[Tuple[type, ...], Handler, str]]:
    methods = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    name = getattr(callback, "__name__", type(callback).__name__)
    if isinstance(callback, type):
        raise ConfigError(f"the callback {name} is a class: pass an object, {name}()")
    for method in methods:
        if method not in _METHODS:
            raise ConfigError(f"the callback {name} has the method {method}, of no event{suggestion(method, _METHODS)}")
        yield _METHODS[method], getattr(callback, method), name
    if not methods:
        if not callable(callback):
            known = ", ".join(sorted(_METHODS))
            raise ConfigError(f"the callback {name} is neither callable nor has one of the methods {known}")
        yield get_args(Event), callback, name
