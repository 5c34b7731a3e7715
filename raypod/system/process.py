"""This process and its host: CPU binding and time, memory, environment, durations, and versions of packages."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import io
import os
import platform
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, Optional, Sequence, TextIO, Tuple, Union

_NUMA_NODES = Path("/sys/devices/system/node")
_PACKAGES = ("raypod", "torch", "numpy", "ray", "poptorch", "pillow", "simplejpeg")
# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_NEVER = 2**31 - 1
_ADVISED_BYTES = (1 << 30) - (1 << 21)  # of the heap; below the threshold of mmap
_LARGE_PAGE, _MADV_HUGEPAGE = 1 << 21, 14
_NOT_OF_HEAP = 2 | 4  # bits of the size of a block of glibc: mapped, or of the arena of other threads
_MOST_ARENAS = 64
_SMALL_BYTES = 1 << 16

# A forked child, such as a worker of a DataLoader, has copies of its parent's objects and shares its sockets. If its
# garbage collector deletes an actor or object of Ray that the parent left in a reference cycle, Ray writes to the
# parent's connections: the parent then waits for an answer for ever, or the raylet of the host ends.
os.register_at_fork(after_in_child=gc.freeze)


def cpus_of_node(index: int, nodes: Path = _NUMA_NODES) -> Optional[List[int]]:
    """Return the cores of NUMA node `index` modulo the number of nodes with usable cores; None if there is only one."""
    found = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[len("node") :]))
    allowed = os.sched_getaffinity(0)
    lists = [[cpu for cpu in parse_cpu_list(path.read_text()) if cpu in allowed] for path in found]
    lists = [cpus for cpus in lists if cpus]
    return lists[index % len(lists)] if len(lists) > 1 else None


def parse_cpu_list(text: str) -> List[int]:
    """Parse a list of cores as Linux writes it: `0-3,8` -> [0, 1, 2, 3, 8]."""
    cpus: List[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def bind_process(cpus: Sequence[int]) -> None:
    """Bind all threads of this process, and all threads that they start later, to cores."""
    import psutil  # 35 ms, which the commands that bind nothing save

    for thread in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread.id, cpus)


def script_command(script: str) -> List[str]:
    """Return the command of a script that imports psutil and no other package: without `site` it starts sooner.

    The argument of the script is the folder of psutil, which it adds to `sys.path`.
    """
    import psutil  # as in `bind_process`

    return [sys.executable, "-I", "-S", script, str(Path(psutil.__file__).parent.parent)]


def keep_freed_memory() -> bool:
    """Let the C allocator keep freed memory, and use large pages; call it in the main thread, before threads start.

    A training step allocates and frees the same large blocks again and again. By default glibc returns them to the
    kernel, and every page faults again: 5 to 8 % of a step of ResNet-18; pages of 2 MiB in place of 4 KiB save 1 to 9 %
    of a step of a decoder (measured). Returns whether the C library supports it.
    """
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 << 20))
    is_kept = all(mallopt(parameter, value) == 1 for parameter, value in settings)
    if is_kept:
        # The heap grows by address space that it keeps: the pages are allocated when they are first written.
        address = _allocated(library, _ADVISED_BYTES)
        begin, end = -(-address // _LARGE_PAGE) * _LARGE_PAGE, address + _ADVISED_BYTES
        if address:
            library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(address))
    return is_kept


def release_freed_memory() -> None:
    """Return the freed memory of glibc's allocator to the kernel, also what `keep_freed_memory` keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def single_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread that allocates from the heap that `keep_freed_memory` has set up.

    Where other threads run already, as those of Ray, glibc assigns a thread one of their arenas or the heap in turn.
    """
    others: List[ThreadPoolExecutor] = []
    while True:
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        if executor.submit(_allocates_from_heap).result() or len(others) == _MOST_ARENAS:
            break
        others.append(executor)  # it holds its arena until the loop ends
    for other in others:
        other.shutdown()
    return executor


def _allocates_from_heap() -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return True  # not glibc: there is no choice
    address = _allocated(library, 2 * _SMALL_BYTES)
    if not address:
        return True  # out of memory
    size = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
    library.free(ctypes.c_void_p(address))
    return not size & _NOT_OF_HEAP


def _allocated(library: ctypes.CDLL, size: int) -> int:
    malloc = library.malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    return int(malloc(size) or 0)


class _Lossy(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def log_stream(number: int) -> TextIO:
    """Return a text stream to the file of descriptor `number`, a log: what a full disk does not take is lost."""
    return io.TextIOWrapper(io.BufferedWriter(_Lossy(number, "w", closefd=False)), line_buffering=True)


def process_start_ticks(pid: int) -> Optional[int]:
    """Return the start time of a process in clock ticks since boot; None if it does not exist or is a zombie.

    With the pid it identifies a process, also for other processes and later on: leases and `state.json` contain it.
    psutil has only a time of the wall clock, which it computes from the time of the boot: that changes with the clock.
    """
    try:
        fields = _stat_fields(pid)
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open, which is no symbolic link; False for another user's, except to root."""
    try:
        file = path.lstat()
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for each in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(file, each.stat()):
                return True
    return False


def process_age_s() -> float:
    """Return the seconds since this process started, which include interpreter start and imports; 0.0 without /proc.

    Linux keeps the start time over exec: in `sh -c 'pip install ... && exec raypod train'` it is that of the shell,
    whose commands count as children of this process. Then the CPU time of this process is the measure of its start.
    """
    try:
        started_ticks = int(_stat_fields(os.getpid())[19])
    except OSError:
        return 0.0
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    has_had_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > 0
    return min(age_s, time.process_time()) if has_had_children else age_s


class StepTimer:
    """Measures consecutive steps. `steps` holds (step, seconds) in order."""

    def __init__(self) -> None:
        self.steps: List[Tuple[str, float]] = []
        self.begin()

    def begin(self) -> None:
        """Begin the first step, or one that does not follow the previous step directly."""
        self._began_s = time.monotonic()

    def end(self, step: str) -> None:
        """Append a step that ends now, and begin the next one."""
        began_s = self._began_s
        self.begin()
        self.steps.append((step, self._began_s - began_s))


def cpu_seconds(threads: Iterable[int]) -> float:
    """Return the CPU time of running threads of this process (by native id) and of the child processes they started.

    The resolution is a clock tick, 10 ms in general. 0.0 without /proc. Heartbeats call it: psutil would read the times
    of all threads of this process, and of all processes of the host to find the children.
    """
    ticks = 0
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended
            ticks += _cpu_ticks(f"self/task/{thread}")
            for child in _read(f"/proc/self/task/{thread}/children").split():  # not in every kernel
                with contextlib.suppress(OSError):
                    ticks += _cpu_ticks(child)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_thread(pid: int, thread: int) -> float:
    """Return the CPU time of a thread of any process of this user, by native id; 0.0 if there is none."""
    with contextlib.suppress(OSError):
        return _cpu_ticks(f"{pid}/task/{thread}") / os.sysconf("SC_CLK_TCK")
    return 0.0


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger; False if it does not exist."""
    with contextlib.suppress(OSError):
        return _stat_fields(pid)[0] in "Tt"
    return False


def versions() -> Tuple[Tuple[str, str], ...]:
    """Return (name, version) of Python and of the installed packages that determine results."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Return a digest of the modules of raypod, as they were at the first call: equal ones on two hosts are the same.

    `pod/probe.py` computes the same.
    """
    return digest_of_modules(Path(__file__).parents[1])


def digest_of_modules(folder: Path) -> str:
    """Return a digest of the Python files in a folder: of their paths in it and their contents."""
    files = b""
    for path in sorted(folder.rglob("*.py")):
        if path.is_file() and not path.name.startswith("."):  # editors leave hidden links, which lead nowhere
            files += str(path.relative_to(folder)).encode() + hashlib.sha256(path.read_bytes()).digest()
    return hashlib.sha256(files).hexdigest()


def _cpu_ticks(task: str) -> int:
    """Return the clock ticks that a process or thread, as a path below /proc, has spent in user and kernel mode."""
    fields = _stat_fields(task)
    return int(fields[11]) + int(fields[12])


def _stat_fields(pid: Union[int, str]) -> List[str]:
    """Fields of /proc/PID/stat from the third on: the second, the name, may contain spaces and parentheses."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    """Return the content of a small file, in 40 % of the time of `Path.read_text`: heartbeats read several."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _SMALL_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def environment_variables(changed: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process within the context."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
