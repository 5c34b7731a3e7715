"""Call the functions that a user names as `module:function`, for custom data sets and models."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence

from raypod.errors import ConfigError, RaypodError, summarize_exception

_SDKS = ("poptorch", "popdist", "popart", "horovod")
_PLACE = "_raypod_place"  # attribute of an exception: the `place_of` in the process that raised it
_PICKLED = "<dynamic-code>"  # cloudpickle's file name of the functions of a script or a notebook
_FRAME_OF_WORKER = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def call(name: str, key: str, *arguments: Any) -> Any:
    """Import `module:function`, also from the current folder, and return its result for `arguments`.

    Args:
        name: `module:function`.
        key: the config key whose value is `name`, for messages.

    Raises:
        ConfigError: the function does not exist, does not accept the arguments, or calls `sys.exit`.
    """
    function = import_name(name, key)
    check_signature(function, name, key, [repr(each) for each in arguments])
    return invoke(function, name, key, *arguments)


def invoke(function: Callable[..., Any], name: str, key: str, *arguments: Any) -> Any:
    """Return the result of a function that `import_name` has returned. ConfigError if it calls `sys.exit`."""
    try:
        return function(*arguments)
    except SystemExit as end:
        raise ConfigError(f"{key} = {name!r} raised SystemExit({end.code!r}); raise another exception") from end


def check(name: str, key: str, parameters: Sequence[str]) -> None:
    """Import `module:function`, and check that it can be called, without calling it.

    A module that imports an SDK which this host does not have is not checked: the hosts of the pod import it.

    Args:
        name: `module:function`.
        key: the config key whose value is `name`, for messages.
        parameters: the names of the arguments with which it is called.

    Raises:
        ConfigError: the function does not exist or does not accept the arguments.
    """
    try:
        function = import_name(name, key)
    except _SdkMissing:
        return
    check_signature(function, name, key, parameters)


@contextlib.contextmanager
def reported(name: str, remark: str = "") -> Iterator[None]:
    """Convert any exception of the code `name` within the context to a ConfigError in one line, except raypod's own.

    `remark` is the end of that line.
    """
    try:
        yield
    except RaypodError:
        raise
    except Exception as error:  # a user's code can raise any exception
        raise ConfigError(f"{name}: {summarize_exception(error)}{place_of(error)}{remark}") from error


def place_of(error: BaseException) -> str:
    """Return where the user's code raised an exception: " (FILE:LINE, in FUNCTION)", or "" if other code raised it.

    If that is in another file than the function that raypod has called, as in a package outside of the installed ones,
    the line of that function is named, too: " (FILE:LINE, in FUNCTION; FILE:LINE, in FUNCTION)".
    """
    recorded: Optional[str] = getattr(error, _PLACE, None)
    if recorded is not None:
        return recorded
    frames = _frames_of(error)
    own = tuple(_folders_of("raypod"))
    first = next((index for index, frame in enumerate(frames) if own and frame.filename.startswith(own)), len(frames))
    called = next((frame for frame in frames[first:] if _is_of_user(frame)), None)
    inner = _innermost(frames)
    if called is None or inner is None or called.filename == inner.filename:
        return place_in(frames)
    return f" ({_shown(called)}; {_shown(inner)})"


def place_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost of the frames that is one of the user's code, as `place_of`; the last is the innermost."""
    inner = _innermost(frames)
    return "" if inner is None else f" ({_shown(inner)})"


def _innermost(frames: Sequence[traceback.FrameSummary]) -> Optional[traceback.FrameSummary]:
    return next((frame for frame in reversed(frames) if _is_of_user(frame)), None)


def _is_of_user(frame: traceback.FrameSummary) -> bool:
    others = ("<", *_folders_of("raypod", *_SDKS))
    installed = ("site-packages", "dist-packages", f"{sys.base_prefix}/lib")
    is_other = frame.filename.startswith(others) or any(each in frame.filename for each in installed)
    return frame.filename == _PICKLED or not is_other


def _shown(frame: traceback.FrameSummary) -> str:
    where = f"line {frame.lineno}" if frame.filename == _PICKLED else f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{where}, in {frame.name}"


def place_of_function(function: Callable[..., Any]) -> str:
    """Return where a function is defined, as " (FILE:LINE)"; "" if that is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    is_file = not code.co_filename.startswith("<")
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if is_file else f" (line {code.co_firstlineno})"


def record_place(error: BaseException) -> None:
    """Record `place_of` in an exception that another process will get, where it has no traceback."""
    with contextlib.suppress(AttributeError, TypeError):  # a class can forbid new attributes
        setattr(error, _PLACE, place_of(error))


def _frames_of(error: BaseException) -> List[traceback.FrameSummary]:
    """Return the frames of an exception. The message of a data loader worker's is the traceback in the worker."""
    in_worker = _FRAME_OF_WORKER.findall(str(error).partition("Original Traceback (most recent call last)")[2])
    of_worker = [traceback.FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in in_worker]
    return [*traceback.extract_tb(error.__traceback__), *of_worker]


def _folders_of(*packages: str) -> List[str]:
    """Return the folders of imported packages; those of the SDK need not be among the installed packages."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return [f"{Path(file).parent}/" for file in files if file]


def import_name(name: str, key: str) -> Any:
    """Return what `module:name` is, a function or class. ConfigError if it cannot be imported."""
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{key} = {name!r}: write module:function, as in my_package.my_module:make")
    if _is_of_python(module_name.partition(".")[0]):
        raise ConfigError(f"{key} = {name!r}: {module_name} is a module of Python itself; name a function of your own")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, SyntaxError) as error:
        is_sdk = isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _SDKS
        cause = " ".join(str(error).split()) + _hint(error, module_name, attribute, here)
        raise (_SdkMissing if is_sdk else ConfigError)(f"{key} = {name!r}: {cause}") from None
    except AttributeError:
        raise ConfigError(f"{key} = {name!r}: the module {module_name} has no {attribute!r}") from None
    except (Exception, SystemExit) as error:  # importing the user's code can raise any exception
        cause = summarize_exception(error)
        raise ConfigError(f"{key} = {name!r}: importing {module_name} raised {cause}") from error
    if not callable(function):
        raise ConfigError(f"{key} = {name!r}: {type(function).__name__} is not callable")
    return function


def _is_of_python(top: str) -> bool:
    """Return whether a module is a builtin one or of the standard library."""
    if top in sys.builtin_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top) if top != "__main__" else None
    except (ImportError, ValueError):
        return False
    origin = (spec.origin if spec else None) or ""
    libraries = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")}
    inside = any(origin.startswith(f"{folder}{os.sep}") for folder in libraries)
    return origin == "frozen" or (inside and "-packages" not in origin)


def _hint(error: Exception, module_name: str, attribute: str, here: str) -> str:
    """Return what to do about a module that was not found, as the end of a message; "" for another error."""
    if not isinstance(error, ModuleNotFoundError) or not f"{module_name}.".startswith(f"{error.name}."):
        return ""
    if module_name.endswith(".py"):
        return f"; omit .py: {module_name[: -len('.py')]}:{attribute}"
    return f" in the current folder ({here}), in PYTHONPATH or among the installed packages"


def check_signature(function: Any, name: str, key: str, shown: Sequence[str]) -> None:
    """Raise ConfigError if a function does not accept as many arguments as `shown`, the texts for the message."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(*shown)
    except TypeError as error:
        raise ConfigError(
            f"{key} = {name!r} is called with ({', '.join(shown)}), and takes {signature}: {error}"
        ) from None


class _SdkMissing(ConfigError):
    """Raised if a module imports an SDK that is not installed."""
