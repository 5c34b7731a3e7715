"""The template of a host's workers: has torch imported, and forks itself for each worker that the raylet starts.

Run as a script. The argument is the descriptor of the socket at which `worker_request.py` asks for workers; the input
is two lines: the pid of the raylet, with which this process ends, and the folder of its logs. It imports packages of
others only, so that an edit of raypod counts for the next worker, and not Ray, which reads the job of a worker from its
environment at import.

A fork copies one thread and no device. The template therefore starts no thread and uses nothing that it imports; if a
package starts threads at import, it forks nothing and ends, and workers start as without it. The environment of a
worker must be that of the template, because packages read variables when they are imported.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

LOG = "raypod-template.log"  # in the folder of Ray's logs
# torch, the real SDK, and what Ray, raypod and the emulated SDK import of others.
_MODULES = (
    *("numpy", "torch", "poptorch", "google.protobuf.descriptor_pb2", "google.protobuf.json_format", "jsonschema"),
    *("requests", "yaml", "msgpack", "psutil", "filelock", "tqdm", "pydantic", "annotated_types", "xxhash", "fsspec"),
    *("PIL.Image", "pdb", "decimal", "asyncio", "ssl", "http.server", "multiprocessing.forkserver", "zoneinfo"),
)
_REQUEST_S = 5.0  # for a request to be read, and for its sender to answer
_LOOK_S = 1.0
_MOST_DESCRIPTORS = 64
_SET_BY_SHELLS = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL"}
_OF_RAY = ("RAY_", "RAYPOD_TEMPLATE", "SPT_NOENV")
_MADV_DONTNEED = 4
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def serve(descriptor: int) -> Optional[Tuple[Dict[str, Any], List[int]]]:
    """Fork workers until the raylet has ended; then return None. Returns in each worker what was asked for."""
    with socket.socket(fileno=descriptor) as listener:
        listener.settimeout(_LOOK_S)
        environment = dict(os.environ)
        import_modules()
        threads = count_threads()
        gc.collect()
        gc.freeze()  # a garbage collection in a worker would write to all shared pages
        release_files()
        raylet, logs = sys.stdin.readline().strip(), sys.stdin.readline().strip()
        if not raylet:  # Ray did not start
            return None
        log = (Path(logs) / LOG).open("a", buffering=1)
        if threads > 1:
            log.write(f"packages have started threads as they were imported ({threads - 1}): no worker is forked\n")
            return None
        psutil = importlib.import_module("psutil")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets workers that end
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(raylet))
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                with contextlib.suppress(OSError, ValueError):  # no request, or one that was given up
                    connection, _ = listener.accept()
                    with connection:
                        request, descriptors = receive(connection)
                        other = differences(environment, request["environment"])
                        if other:
                            log.write(f"not forked, because its environment differs: {', '.join(other)}\n")
                        elif os.fork() == 0:
                            log.close()
                            accept(connection)
                            return request, descriptors
                        for each in descriptors:
                            os.close(each)
    return None


def import_modules() -> None:
    """Import what workers import, as far as this host has it."""
    excepthook = sys.excepthook
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.excepthook = excepthook  # PopTorch replaces it, and lets SIGTERM print all stacks
    faulthandler.unregister(signal.SIGTERM)


def count_threads() -> int:
    """Return the number of threads of this process, after a fork: OpenBLAS ends its own before one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(list(Path("/proc/self/task").iterdir()))


def release_files() -> None:
    """Release the resident pages of mapped files, as the code of torch, which this process does not run.

    A fork maps such a page when it first uses it. Mappings that can be written, or have pages that were, are kept: the
    linker writes to some, which are read-only afterwards. Without `/proc/self/smaps` (an option of the kernel) nothing
    is released.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    span: Optional[Tuple[int, int]] = None
    for line in lines:
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            is_candidate = "w" not in values[0] and len(values) > 4 and values[4].startswith("/")
            span = (begin, end - begin) if is_candidate else None
        elif name in ("Anonymous:", "Swap:") and values[0] != "0":
            span = None
        elif name == "VmFlags:" and span is not None:  # the last line of a mapping
            advise(*span, _MADV_DONTNEED)


def receive(connection: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    """Return a request of a process of this user, and the descriptors that came with it."""
    connection.settimeout(_REQUEST_S)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise PermissionError("a process of another user")
    descriptors = array.array("i")
    size, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize))
    for _, _, data in rights:
        descriptors.frombytes(data)
    text = b""
    try:
        while len(text) < int.from_bytes(size, "little"):
            part = connection.recv(int.from_bytes(size, "little") - len(text))
            if not part:
                raise ConnectionError("the request ended early")
            text += part
        return json.loads(text), list(descriptors)
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise


def differences(mine: Dict[str, str], other: Dict[str, str]) -> List[str]:
    """Return the names of the variables that packages may read at import, and that differ in two environments."""
    names = {name for name in {*mine, *other} if name not in _SET_BY_SHELLS and not name.startswith(_OF_RAY)}
    return sorted(name for name in names if mine.get(name) != other.get(name))


def accept(connection: socket.socket) -> None:
    """Tell the sender of a request that this worker exists. Ends this process if the sender has given up."""
    try:
        connection.sendall(b"y")
        is_wanted = connection.recv(1) == b"y"
    except OSError:
        is_wanted = False
    if not is_wanted:
        os._exit(1)


def become(request: Dict[str, Any], descriptors: List[int]) -> None:
    """Give this process what it would have if the raylet had executed the interpreter."""
    os.setpgid(0, 0)  # if a worker dies, the raylet kills the others of its group
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = request["descriptors"]
    above = max([*wanted, *descriptors]) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for source, target in zip(moved, wanted):
        os.dup2(source, target)
        os.close(source)
    os.nice(request["niceness"] - os.nice(0))
    with contextlib.suppress(PermissionError):  # lower than that of the template
        Path("/proc/self/oom_score_adj").write_text(request["oom_score"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "numpy.random" in sys.modules:  # torch's generator begins with the same seed in every process
        sys.modules["numpy"].random.seed()
    sys.path_importer_cache.clear()  # a folder of PYTHONPATH that did not exist would never be looked at again
    sys.argv = request["arguments"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    del sys.path[0]  # this folder, which has a ray.py
    asked = serve(int(sys.argv[1]))
    if asked is not None:
        become(*asked)
        runpy.run_path(sys.argv[0], run_name="__main__")
