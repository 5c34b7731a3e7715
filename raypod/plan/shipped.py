"""The recipes and cluster files that raypod contains: `configs/` and `cluster/`, found by name from any folder.

In a checkout these are its top-level folders; the wheel has a copy of them inside the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

from raypod.system.command_line import nearest

RECIPES, CLUSTERS = "configs", "cluster"
_PACKAGE = Path(__file__).resolve().parent.parent


def folder(kind: str) -> Path:
    """Return the folder of the files of a kind: `configs` or `cluster`."""
    inside = _PACKAGE / "shipped" / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def project_file(name: str) -> Optional[Path]:
    """Return a file at the top of raypod's checkout; None for an installed package."""
    path = _PACKAGE.parent / name
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file() and not (_PACKAGE / "shipped").is_dir()
    return path if is_checkout and path.is_file() else None


def names(kind: str) -> List[str]:
    """Return the names of the files of a kind. Files in folders below it, and those that are not YAML, have none."""
    return sorted(path.name for path in folder(kind).glob("*.yaml"))


def find(name: str, kind: str) -> Path:
    """Return the path of a file: `name` itself if it exists, else the file of that name that raypod contains.

    `name` may be without `.yaml`, or with the folder, as in `configs/digits.yaml`. A path that is neither is returned
    as it is.
    """
    path = Path(name)
    if path.exists() or path.parent not in (Path(), Path(kind)):
        return path
    file = path.name if path.suffix == ".yaml" else f"{path.name}.yaml"
    return folder(kind) / file if file in names(kind) else path


def hint(name: str, kind: str) -> str:
    """Return the end of an error message about a file that does not exist: the nearest that raypod contains, or all."""
    near = nearest(Path(name).name, names(kind))
    if near:
        return f"; did you mean {near[0]}, which raypod contains?"
    return f"; raypod contains {', '.join(names(kind))}" if names(kind) else ""
