"""The file of a saved model: our own format, as PopTorch's is closed (contract 2.6: `save`).

    16 bytes  magic
     4 bytes  length of the header, little-endian
    32 bytes  SHA-256 of the header
              header: JSON {"poptorch": version, "sections": [{"name", "length", "sha256"}, ...]}
              the sections, one after another, to the end of the file

Nothing of a file is interpreted before its checksum is right. A file is written beside its place and then renamed, so
that a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Union

from poptorch._errors import ModelFileError
from poptorch._log import logger
from poptorch._version import VERSION

_MAGIC = b"emulated popef\x01\n"
_PREFIX = struct.Struct("<16sI32s")
_LONGEST_HEADER = 1 << 20
_DEFAULT_NAME = "model.poptorch"


def write(filename: Union[str, os.PathLike[str]], sections: Dict[str, bytes]) -> Path:
    """Write the sections and return the path of the file.

    An existing directory gets a file of the default name, with a warning; missing parents are made.
    """
    path = Path(filename)
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logger.warning("save: %s is a directory; the model goes to %s", filename, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = [
        {"name": name, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sections.items()
    ]
    header = json.dumps({"poptorch": VERSION, "sections": described}).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    _replace(path, [prefix, header, *sections.values()])
    return path


def read(filename: Union[str, os.PathLike[str]]) -> Dict[str, bytes]:
    """The sections of a file.

    ModelFileError for a file that is missing, of another kind, of another version of poptorch, truncated or damaged.
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
            f"{path} was saved by poptorch {header['poptorch']}, and this is {VERSION}: compile and save anew"
        )
    return _sections(path, content[_PREFIX.size + header["length"] :], header["sections"])


def _replace(path: Path, parts: List[bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        # As for a file that is opened for writing; mkstemp's are for this user alone.
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
    if not content.startswith(_MAGIC):
        raise ModelFileError(f"{path} is not a valid PopTorch file: PoplarExecutor.save here did not write it")
    if len(content) < _PREFIX.size:
        raise ModelFileError(f"{path} is truncated: {len(content)} bytes")
    _, length, digest = _PREFIX.unpack_from(content)
    header = content[_PREFIX.size : _PREFIX.size + min(length, _LONGEST_HEADER)]
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
