"""Check that all instances run the same code on the same data set, and decode its images alike."""

from __future__ import annotations

from typing import Iterable, List, Optional, Tuple

from raypod.errors import ConfigError
from raypod.events import InstanceStarted
from raypod.plan.plan import Plan
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.resume import allowed_differences, check_data

# They determine the bits of the results. Ray requires that all hosts have the same Ray and Python.
_PACKAGES = ("torch", "poptorch")
COPY_FILES = "`raypod up FILE` copies the same to all hosts, or install the same version there"


def check_same_data(plan: Plan, started: List[InstanceStarted], resumed: Optional[Checkpoint] = None) -> None:
    """Check that all instances run the same raypod and torch, and loaded the same data set: that of the checkpoint."""
    first = started[0]
    for other in started:
        if other.host != first.host and other.sources != first.sources:  # one host has one folder of them
            raise ConfigError(
                f"raypod's files on host {other.host} of instance {other.instance} differ from those on host "
                f"{first.host} of instance {first.instance} (sha256 {other.sources[:12]} and {first.sources[:12]}); "
                f"{COPY_FILES}"
            )
        for package, ours, theirs in zip(_PACKAGES, code_of(first)[1:], code_of(other)[1:]):
            if theirs != ours:
                raise ConfigError(
                    f"instance {other.instance} on host {other.host} has {package} {theirs}, and instance "
                    f"{first.instance} on host {first.host} {ours}; install one version on all hosts"
                )
        if other.data_fingerprint != first.data_fingerprint:
            raise ConfigError(
                f"the data set of instance {other.instance} on host {other.host} differs from that of instance "
                f"{first.instance} on host {first.host}: fingerprints {other.data_fingerprint} and "
                f"{first.data_fingerprint}; copy one to all hosts"
            )
    if resumed is not None:
        check_data(plan, resumed, first.data_fingerprint)
    _check_same_decoder(plan, started, resumed)


def code_of(started: InstanceStarted) -> Tuple[Optional[str], ...]:
    """Return what determines the code of an instance: the digest of raypod's files, and the versions of packages."""
    versions = dict(started.versions)
    return (started.sources, *(versions.get(package) for package in _PACKAGES))


def _check_same_decoder(plan: Plan, started: List[InstanceStarted], resumed: Optional[Checkpoint]) -> None:
    """Check that all have the same major version of the package that decodes the images.

    The pixels of Pillow 10 and 13, for example, differ by 1 where images are enlarged.
    """
    package = plan.config.decoder
    if package is None:
        return
    first, ours = started[0], _major(started[0].versions, package)
    for other in started:
        theirs = _major(other.versions, package)
        if theirs != ours:
            raise ConfigError(
                f"instance {other.instance} on host {other.host} decodes images with {package} {theirs}, and instance "
                f"{first.instance} on host {first.host} with {package} {ours}; install one version on all hosts"
            )
    if resumed is None or "jpeg_decoder" in {name.rpartition(".")[2] for name in allowed_differences(plan)}:
        return
    recorded = _major(resumed.manifest.versions.items(), package)
    if recorded not in (None, ours):
        raise ConfigError(
            f"--resume {resumed.path}: its images were decoded with {package} {recorded}, and this run's are with "
            f"{package} {ours}; --resume-anyway jpeg_decoder resumes with {ours}"
        )


def _major(versions: Iterable[Tuple[str, str]], package: str) -> Optional[str]:
    """Return the major version of a package; None if it is not listed."""
    found = dict(versions).get(package)
    return None if found is None else found.partition(".")[0]
