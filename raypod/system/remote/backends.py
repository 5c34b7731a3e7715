"""The libraries behind the schemes of URLs: which one is needed, whether it is installed, and how it connects."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from typing import Any, Dict, Iterator, Tuple

from raypod.errors import ConfigError
from raypod.system.urls import scheme_of

S3, GS, SFTP = ("s3", "s3a"), ("gs", "gcs"), ("sftp", "ssh")
OBJECT_STORES = (*S3, *GS, "abfs", "abfss", "az", "adl", "oss", "oci")  # a write replaces an object as a whole
_EXTRAS = {**dict.fromkeys(S3, ("s3fs", "s3")), **dict.fromkeys(GS, ("gcsfs", "gs"))}
_EXTRAS.update(dict.fromkeys(SFTP, ("paramiko", "sftp")))
_NOT_DURABLE = ("memory", "data", "http", "https", "github", "git", "zip", "tar")  # lost with the process, or read-only
_CONNECT_S, _READ_S = 10, 60  # timeouts of requests to S3


def check_scheme(url: str, setting: str, writes: bool = True) -> None:
    """Raise ConfigError if nothing can be stored at a URL on this host: unknown scheme, or a missing package.

    `setting` begins the message. Without `writes` the storage may be read-only.
    """
    import fsspec  # only a run with a remote storage needs it

    scheme = scheme_of(url)
    if writes and scheme in _NOT_DURABLE:
        raise ConfigError(f"{setting} {url}: nothing can be stored at {scheme}://, which is read-only or volatile")
    if scheme not in fsspec.available_protocols():
        raise ConfigError(f"{setting} {url}: unknown scheme {scheme}://; use s3, gs, sftp, file or another of fsspec")
    package, extra = _EXTRAS.get(scheme, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{setting} {url} needs the package {package}, which is not installed: pip install 'raypod[{extra}]'"
        )
    try:
        with _without_warnings():
            fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(f"{setting} {url}: its storage library cannot be imported: {error}") from None


def connect(url: str) -> Tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Any exception of the storage library."""
    import fsspec

    options: Dict[str, Any] = {"skip_instance_cache": True}
    scheme = scheme_of(url)
    if scheme in S3:
        limits = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": {"max_attempts": 2}}
        options["config_kwargs"] = limits
    elif scheme in SFTP:
        with _without_warnings():
            kind = importlib.import_module("raypod.system.remote.sftp").VerifiedSftp
        fsspec.register_implementation(scheme, kind, clobber=True)
    with _without_warnings():
        file_system, path = fsspec.core.url_to_fs(url, **options)
    return file_system, str(path)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings of packages about the versions of Python and of each other that are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
