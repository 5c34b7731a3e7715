"""Wheels as files: their names, their requirements for a version of Python, and the wheel of an installed package."""

from __future__ import annotations

import base64
import contextlib
import email.parser
import hashlib
import importlib.metadata
import re
import zipfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from raypod.errors import ConfigError

_OF_THIS_INSTALLATION = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def name_and_version(wheel: Path) -> Tuple[str, str]:
    """Return the normalized name and the version in the name of a wheel."""
    name, version = wheel.name.split("-")[:2]
    return canonicalize_name(name), version.replace("_", "+")


def versions_in(folder: Path) -> Dict[str, str]:
    """Return the versions of the wheels in a folder by name."""
    return dict(name_and_version(path) for path in folder.glob("*.whl"))


def check_requirements(texts: Sequence[str]) -> None:
    """Raise ConfigError for a text that is neither a requirement nor the path of a wheel."""
    for text in texts:
        if text.endswith(".whl"):
            if not Path(text).is_file():
                raise ConfigError(f"bundle: the wheel {text} does not exist")
            continue
        try:
            Requirement(text)
        except InvalidRequirement:
            raise ConfigError(f"bundle: {text!r} is neither a requirement, as numpy>=1.20, nor a wheel") from None


def constraints_for(file: Path, python: str) -> List[str]:
    """Return the lines of a constraints file that hold for a version of Python, without their markers."""
    lines = file.read_text().splitlines()
    found = [Requirement(text) for text in (line.partition("#")[0].strip() for line in lines) if text]
    return [f"{each.name}{each.specifier}" for each in found if _holds(each.marker, python)]


def installed(packages: Sequence[str]) -> List[str]:
    """Return constraints with the versions of the packages that are installed, without local ones as +cpu."""
    found = []
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name}=={importlib.metadata.version(name).partition('+')[0]}")
    return found


class Closure(NamedTuple):
    """What requirements need of a folder: the names of wheels, and requirements for which there is none."""

    needed: Set[str]
    missing: List[str]


def closure_in(folder: Path, requirements: Sequence[str], python: str) -> Closure:
    """Follow requirements through the wheels of a folder; a requirement can be the path of a wheel, too."""
    wheels = {name_and_version(path)[0]: path for path in folder.glob("*.whl")}
    missing: Dict[str, str] = {}
    seen: Set[Tuple[str, str]] = set()
    pending: List[Tuple[str, str]] = []
    for text in requirements:
        is_file = text.endswith(".whl")
        pending += [(name_and_version(Path(text))[0], "")] if is_file else _with_extras(Requirement(text))
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen or name not in wheels:
            continue
        seen.add((name, extra))
        for each in _requirements(wheels[name]):
            if _holds(each.marker, python, extra):
                if canonicalize_name(each.name) not in wheels:
                    missing[canonicalize_name(each.name)] = f"{each.name}{_extras(each)}{each.specifier}"
                pending += _with_extras(each)
    return Closure({name for name, _ in seen}, sorted(missing.values()))


def repack(package: str, folder: Path) -> None:
    """Write the wheel of an installed pure package. ConfigError if its files are not known."""
    found = importlib.metadata.distribution(package)
    files = [file for file in found.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    info = next((file.parts[0] for file in files if file.parts[0].endswith(".dist-info")), None)
    sources = [file for file in files if not (file.parts[0] == info and file.name in _OF_THIS_INSTALLATION)]
    if info is None or not any(file.parts[0] == package for file in sources):
        raise ConfigError(f"bundle: the files of the installed {package} are not known; run the command in a checkout")
    record = []
    with zipfile.ZipFile(folder / f"{info[: -len('.dist-info')]}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sources:
            content = Path(str(found.locate_file(file))).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{file.as_posix()},sha256={digest},{len(content)}\n")
            wheel.writestr(file.as_posix(), content)
        wheel.writestr(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]))


def _requirements(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as content:
        name = next(each for each in content.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        metadata = email.parser.BytesParser().parsebytes(content.read(name))
    for text in metadata.get_all("Requires-Dist", []):
        yield Requirement(text)


def _holds(marker: Optional[Marker], python: str, extra: str = "") -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    return marker is None or marker.evaluate(environment)


def _with_extras(requirement: Requirement) -> List[Tuple[str, str]]:
    return [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
