"""The files that a launch writes besides its logs: the run folder, and its options as YAML."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from raypod.errors import ConfigError
from raypod.host.files import create_folder, create_numbered_folder
from raypod.launcher import options
from raypod.launcher.options import Request


def check_files(request: Request) -> None:
    """Check --run-dir and --export-config before anything is started or written.

    Raises:
        ConfigError: The run folder is not empty, or the options would overwrite a file or cannot be written.
    """
    if request.run_dir:
        _check_empty(Path(request.run_dir))
    if request.export_config:
        path = os.path.abspath(request.export_config)  # noqa: PTH100 - these functions raise no OSError
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):  # noqa: PTH112, PTH120
            raise ConfigError(f"--export-config {path}: not a file in a folder that can be written")
        if os.path.exists(path) and not request.overwrite_config:  # noqa: PTH110
            raise ConfigError(f"--export-config {path}: the file exists; --overwrite-config replaces it")


def write_options(request: Request, path: Path, option: str) -> None:
    """Write the options as YAML for --import-config; `option` names the file in the message of a ConfigError.

    A new file is private to the user: the values of variables can be secrets.
    """
    try:
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
            file.write(options.export(request))
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None


def claim_run_folder(request: Request) -> str:
    """Create the run folder with a new folder `logs` in it, atomically, and return its absolute path.

    It is --run-dir, or `runs/<time>-launch-<program>`, with a number appended if that exists.

    Raises:
        ConfigError: --run-dir is not empty, or a folder cannot be created.
    """
    folder = Path(os.path.abspath(request.run_dir or _default_folder(request)))  # noqa: PTH100 - keeps symlinks
    try:
        if request.run_dir:
            _check_empty(folder)
        else:
            folder = create_numbered_folder(folder)[-1]
        create_folder(folder / "logs")
    except FileExistsError:
        raise ConfigError(_used(folder, "it contains the logs of another launch")) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run folder {folder}: {error.strerror}; choose another --run-dir"
        ) from None
    return str(folder)


def _check_empty(folder: Path) -> None:
    try:
        if any(folder.iterdir()):
            raise ConfigError(_used(folder, "the folder is not empty"))
    except FileNotFoundError:
        pass  # it is created later
    except OSError as error:
        raise ConfigError(_used(folder, str(error.strerror))) from None


def _used(folder: Path, why: str) -> str:
    return f"--run-dir {folder}: {why}; choose another folder, or remove this one"


def _default_folder(request: Request) -> str:
    scripts = [word for word in request.program[:4] if word.endswith((".py", ".sh"))]
    name = re.sub(r"[^\w.-]+", "-", Path((scripts or request.program)[0]).stem) or "program"
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-launch-{name}"
