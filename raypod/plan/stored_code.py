"""Names of code in the configuration of a stored run, and which of them may be imported.

A run folder can come from an archive, a storage or another user, and its `config.yaml` can name any function as
`module:function`, and a cluster file, whose `ssh_proxy_command` is executed. Such a name counts only if the command
line names it, too, or if the run is this user's own: then the folder contains the seal that `seal_of` computes from the
configuration with a key of the user on this host.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import shlex
import stat
from pathlib import Path
from typing import Any, Collection, Dict, List, Mapping, Optional, Tuple

from raypod.errors import ConfigError
from raypod.plan.config import LIBRARIES
from raypod.plan.layout import CONFIG, SEAL

FLAGS = {
    "task.name": "--task",
    "data.dataset": "--dataset",
    "training.model": "--model",
    "training.lr_schedule": "--lr-schedule",
    "run.trackers": "--tracker",
}
_FILES = {  # with commands, with executables, and one that names a folder of executables
    "pod.cluster": "--cluster",
    "pod.executable_cache_path": "--executable-cache-path",
    "ipu.ipu_config": "--ipu-config",
}
# Options of PopART: source files that it compiles, and executables that it loads.
_CODELETS = ("customCodelets", "customCodeletCompileFlags", "cachePath")
_KEY_BYTES = 32


def names_of(values: Mapping[str, Mapping[str, Any]]) -> List[Tuple[str, str]]:
    """Return key and name of what executes code: each `module:function`, `_FILES`, and PopART's code for tiles."""
    files = ((full, values.get(full.partition(".")[0], {}).get(full.partition(".")[2])) for full in _FILES)
    found = [(full, str(name)) for full, name in files if name is not None]
    for full in FLAGS:
        section, _, key = full.partition(".")
        value = values.get(section, {}).get(key)
        texts = value if isinstance(value, (list, tuple)) else str(value or "").split(",")
        is_library = full == "training.model" and str(value).startswith(LIBRARIES)
        found += [(full, text) for text in map(str, texts) if ":" in text and not is_library]
    popart = str(values.get("ipu", {}).get("popart"))  # a mapping, or KEY=VALUE
    return [*found, *(("ipu.popart", name) for name in _CODELETS if name in popart)]


def check(
    values: Mapping[str, Mapping[str, Any]], path: Path, named: Collection[str] = (), flag: Optional[str] = None
) -> None:
    """Check the names of code in a run's configuration.

    Args:
        values: section -> key -> value of the file.
        path: the `config.yaml` of the run folder.
        named: the names that the command line has, too.
        flag: the flag that names code; default: that of each key, as in `FLAGS`.

    Raises:
        ConfigError: the file names code that is not among `named`, and `is_own` is false.
    """
    foreign = [(key, name) for key, name in names_of(values) if name not in named]
    if not foreign or is_own(path.parent):
        return
    what = ", ".join(f"{key} = {name!r}" for key, name in foreign)
    flags = " ".join(f"{flag or {**FLAGS, **_FILES}.get(key, '--popart')} {name}" for key, name in foreign)
    raise ConfigError(
        f"{path} names code, {what}, and was not written by you on this host; if you trust this code, add {flags}"
    )


def check_storage(values: Mapping[str, Mapping[str, Any]], path: Path, resume: str) -> None:
    """Raise ConfigError if a run that is not this user's own decides to which URL the resumed one is mirrored.

    A run that is resumed from that URL continues there: the user has named it.
    """
    url = values.get("run", {}).get("storage_path")
    if url is None or resume.startswith(f"{str(url).rstrip('/')}/") or is_own(path.parent):
        return
    raise ConfigError(
        f"{path} asks to mirror the run to {url}, and was not written by you on this host; add --storage-path {url} "
        "to do so, or run.storage_path=null"
    )


def check_commands(values: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Raise ConfigError if a run that is not this user's own decides which shell command a repair executes."""
    command = values.get("run", {}).get("reset_command")
    if command is not None and not is_own(path.parent):
        raise ConfigError(
            f"{path} has the command run.reset_command = {command!r}, and was not written by you on this host; add "
            f"--reset-command {shlex.quote(str(command))} to use it, or run.reset_command=null"
        )


def seal_of(content: bytes) -> Optional[str]:
    """Return the seal of a configuration; None if this user has no folder for the key."""
    key = _key()
    return None if key is None else hmac.new(key, content, hashlib.sha256).hexdigest()


def is_own(folder: Path) -> bool:
    """Return whether this user wrote the configuration of a run folder on this host."""
    try:
        content, seal = (folder / CONFIG).read_bytes(), (folder / SEAL).read_text()
    except (OSError, UnicodeDecodeError):
        return False
    expected = seal_of(content)
    return expected is not None and hmac.compare_digest(expected.encode(), seal.strip().encode())


_keys: Dict[Path, bytes] = {}


def _key() -> Optional[bytes]:
    """Return the key of this user, which the first call creates, mode 0600; None without a folder for it."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    path = Path(state) / "raypod" / "seal.key"
    if path not in _keys:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            _write(partial, secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)  # the first process creates it whole; all others read it
            partial.unlink()
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                return None
            _keys[path] = path.read_bytes()
        except OSError:
            return None
    return _keys[path]


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
