"""The file of a saved model, in a format of the emulation, as PopTorch's format is not public.

    16 bytes  magic, with the version of the format
     4 bytes  length of the header, little-endian
    32 bytes  SHA-256 of the header
              header: JSON {"poptorch": version, "sections": [{"name", "length", "sha256"}, ...]}
              the sections, one after another, to the end of the file

Checksums are verified before the content is parsed. A file is written under a temporary name and then renamed, so that
readers never see an incomplete file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Union

from poptorch.errors import ModelFileError
from poptorch.log import logger
from poptorch.version import VERSION

Filename = Union[str, "os.PathLike[str]"]

_KIND = b"emulated popef"
_MAGIC = _KIND + b"\x02\n"
_PREFIX = struct.Struct("<16sI32s")
_MAX_HEADER = 1 << 20
_DEFAULT_NAME = "model.poptorch"


def write(filename: Filename, sections: Dict[str, bytes]) -> None:
    """Write the sections to a file, and create missing parents.

    An existing directory gets a file `model.poptorch`, with a warning.
    """
    path = Path(filename)
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logger.warning("save: %s is a directory; the model is saved to %s", filename, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = [
        {"name": name, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sections.items()
    ]
    header = json.dumps({"poptorch": VERSION, "sections": described}).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    _replace(path, [prefix, header, *sections.values()])


def read(filename: Filename) -> Dict[str, bytes]:
    """Return the sections of a file.

    Raises:
        ModelFileError: the file is missing, truncated, damaged, of another kind, or of another version of poptorch or
            of the format.
    """
    path = Path(filename)
    if path.is_dir():
        path = path / _DEFAULT_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    header = _header(path, content)
    if header["poptorch"] != VERSION:
        raise ModelFileError(
            f"{path} was saved by poptorch {header['poptorch']}, and this is {VERSION}: compile and save it again"
        )
    return _sections(path, content[_PREFIX.size + header["length"] :], header["sections"])


def _replace(path: Path, parts: List[bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's permissions are for this user alone; these are the usual ones of a new file.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _header(path: Path, content: bytes) -> Dict[str, Any]:
    if not content.startswith(_KIND):
        raise ModelFileError(f"{path} is not a valid PopTorch file: PoplarExecutor.save of this SDK did not write it")
    if not content.startswith(_MAGIC[: len(content)]):
        raise ModelFileError(f"{path} was saved by another version of the emulated SDK: compile and save it again")
    if len(content) < _PREFIX.size:
        raise ModelFileError(f"{path} is truncated: {len(content)} bytes")
    _, length, digest = _PREFIX.unpack_from(content)
    header = content[_PREFIX.size : _PREFIX.size + min(length, _MAX_HEADER)]
    if hashlib.sha256(header).digest() != digest:
        raise ModelFileError(f"{path} is damaged or truncated: the checksum of its header is wrong")
    parsed: Dict[str, Any] = json.loads(header)
    return {**parsed, "length": length}


def _sections(path: Path, content: bytes, described: List[Dict[str, Any]]) -> Dict[str, bytes]:
    expected = sum(section["length"] for section in described)
    if len(content) != expected:
        raise ModelFileError(f"{path} is damaged or truncated: {len(content)} bytes of sections instead of {expected}")
    found, start = {}, 0
    for section in described:
        data = content[start : start + section["length"]]
        start += section["length"]
        if hashlib.sha256(data).hexdigest() != section["sha256"]:
            raise ModelFileError(f"{path} is damaged: the checksum of its section {section['name']!r} is wrong")
        found[section["name"]] = data
    return found
