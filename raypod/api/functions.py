"""`raypod.run`: a Python function in every instance of a pod."""

from __future__ import annotations

import codecs
import inspect
import os
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from raypod.api.fit import PathLike, process_kept
from raypod.errors import ConfigError, summarize_exception
from raypod.plan.cluster import LOCAL, read_cluster
from raypod.plan.placement import Placement, Sizes, place
from raypod.runtime.worker.function_process import STDOUT, Setup, pack
from raypod.runtime.workers.ray_functions import RayFunctions
from raypod.system import sdk
from raypod.system.command_line import current_folder, nearest, say
from raypod.system.sdk import activation

_COLLECTIVES = ("auto", "horovod", "gloo")
_OPTIONS = (
    *("num_instances", "replicas", "ipus_per_replica", "cluster", "device", "collectives", "threads_per_replica"),
    *("strict", "environment", "wait_hosts", "start_timeout_s", "timeout_s"),
)


def run(  # noqa: PLR0913 - the arguments are keywords
    function: Callable[..., Any],
    *args: Any,
    num_instances: Optional[int] = None,
    replicas: Optional[int] = None,
    ipus_per_replica: int = 1,
    cluster: Optional[PathLike] = None,
    device: str = "auto",
    collectives: str = "auto",
    threads_per_replica: Optional[int] = None,
    strict: Optional[bool] = None,
    environment: Optional[Mapping[str, str]] = None,
    wait_hosts: float = 0.0,
    start_timeout_s: float = 120.0,
    timeout_s: Optional[float] = None,
    **kwargs: Any,
) -> List[Any]:
    """Call `function(*args, **kwargs)` in every instance, and return the results in instance order.

    Each instance is a process. In it, `poptorch`, `popdist` and `horovod.torch` are importable, popdist and Horovod are
    initialized (calling `popdist.init()` or `hvd.init()` again has no effect), and the environment is that of poprun.
    The function, its arguments and its results are pickled with cloudpickle: lambdas, closures and functions of a
    script or a notebook work. The output of the instances is printed, each line with its instance as poprun does.

    Args:
        num_instances: number of instances; default: that of the cluster file, else 1.
        replicas: total number of replicas, a multiple of the instances; default: one per instance.
        ipus_per_replica: IPUs of a replica.
        cluster: the cluster file of `ray up`; default: this host.
        device: "auto", "ipu" or "emulated".
        collectives: "auto", "horovod" or "gloo", as `--collectives` of `raypod train`.
        threads_per_replica: intra-op threads; 0: the cores of the host divided by its replicas. Default: 1 on the
            emulated SDK, 0 on IPUs.
        strict: as `--strict` of `raypod train`.
        environment: further environment variables of the instances.
        wait_hosts: seconds to wait for hosts that have not joined the cluster yet.
        start_timeout_s: timeout in seconds for each step of starting the instances.
        timeout_s: timeout in seconds for the function; None: no limit, as long as the instances live.
        args, kwargs: arguments of the function. For a keyword with the name of an option, use `functools.partial`.

    Raises:
        UserError: the request is wrong, or the pod lacks something.
        FunctionFailed: the function raised an exception in an instance, or a process died. The message names instance
            and host and has the traceback; `__cause__` is the exception itself, where it can be pickled. The other
            instances are ended.
        WaitTimedOut: a timeout has expired.
    """
    pickled = _packed(function, args, kwargs)
    if collectives not in _COLLECTIVES:
        raise ConfigError(f"collectives = {collectives!r}: must be one of {', '.join(_COLLECTIVES)}")
    placement, path = _placement(
        cluster, device, threads_per_replica, num_instances=num_instances, replicas=replicas, ipus=ipus_per_replica
    )
    for name, seconds in (("start_timeout_s", start_timeout_s), ("timeout_s", timeout_s)):
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"{name} = {seconds!r}: must be greater than 0")
    own = activation.settings(strict=strict)
    variables = {**own, **(environment or {}), **activation.settings(emulated_horovod=collectives == "gloo")}
    setup = Setup(placement, device, collectives, current_folder(), tuple(sys.path), variables)
    lines = _Lines()
    functions = RayFunctions(setup, path, start_timeout_s, lines.add)
    with process_kept():
        try:
            functions.start(wait_hosts, say)
            return functions.call(pickled, timeout_s)
        finally:
            lines.close()
            functions.close()


def _packed(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bytes:
    if not callable(function):
        raise ConfigError(f"raypod.run: {type(function).__name__} is not callable")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # some built-in functions have no signature
        pass
    except TypeError as error:
        near = [f"{name} (did you mean {found[0]}?)" for name in kwargs for found in [nearest(name, _OPTIONS)] if found]
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ConfigError(f"raypod.run calls {name}: {error}{': ' if near else ''}{', '.join(near)}") from None
    try:
        return pack(function, args, kwargs)
    except Exception as error:  # pickling calls methods of the caller's classes
        raise ConfigError(
            f"raypod.run: the function or its arguments cannot be pickled: {summarize_exception(error)}"
        ) from error


def _placement(
    cluster: Optional[PathLike], device: str, threads: Optional[int], **sizes: Optional[int]
) -> Tuple[Placement, Optional[str]]:
    """Return the placement of the instances, and the path of the cluster file."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"{name} = {size!r}: must be a positive whole number")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 0):
        raise ConfigError(f"threads_per_replica = {threads!r}: must be a whole number, 0 or more")
    path = None if cluster is None else os.fspath(cluster)
    hosts = LOCAL if path is None else read_cluster(path)
    instances = sizes["num_instances"] or (1 if path is None else hosts.num_instances)
    found, _ = sdk.sdk_for_programs(device)
    default = 0 if found.has_ipus else 1  # emulated results depend on the number of threads
    counts = Sizes(sizes["replicas"] or instances, instances, sizes["ipus"] or 1)
    return place(hosts, counts, default if threads is None else threads), path


class _Lines:
    """Prints the output of the instances line by line, to `sys.stdout` and `sys.stderr`: a notebook shows them."""

    def __init__(self) -> None:
        self._decoders: Dict[Tuple[int, int], codecs.IncrementalDecoder] = {}
        self._partial: Dict[Tuple[int, int], str] = {}

    def add(self, instance: int, number: int, data: bytes) -> None:
        source = (instance, number)
        decoder = self._decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")("replace"))
        *lines, self._partial[source] = (self._partial.get(source, "") + decoder.decode(data)).split("\n")
        for line in lines:
            self._print(source, line)

    def close(self) -> None:
        for source, line in self._partial.items():
            if line:
                self._print(source, line)
        self._partial.clear()

    def _print(self, source: Tuple[int, int], line: str) -> None:
        stream = sys.stdout if source[1] == STDOUT else sys.stderr
        name = "stdout" if source[1] == STDOUT else "stderr"
        stream.write(f"[1,{source[0]}]<{name}>:{line}\n")
        stream.flush()
