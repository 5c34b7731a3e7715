"""A training on an emulated pod whose Ray uses TLS, with certificates of a CA of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from tests.support.emulated_pod import ROOT, EmulatedPod, address, copy_source, skip_reason

HOSTS = 2
FOLDER = "/root/tls"  # on every host
VARIABLES = (
    "RAY_USE_TLS=1 RAY_TLS_SERVER_CERT=~/tls/host.crt RAY_TLS_SERVER_KEY=~/tls/host.key RAY_TLS_CA_CERT=~/tls/ca.crt"
)
CLUSTER = "cluster/pod64.yaml"

pytestmark = [
    pytest.mark.pod,
    pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason())),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing"),
]


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def make_authority(folder: Path, name: str) -> None:
    words = ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}")
    openssl("req", "-x509", *words, "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"))


def make_certificate(folder: Path, authority: str, name: str, place: str) -> None:
    """Create the key of a host, and its certificate for the address `place` and for loopback."""
    request, certificate, key = (str(folder / f"{name}.{kind}") for kind in ("csr", "crt", "key"))
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName=IP:{place},IP:127.0.0.1,DNS:localhost\n")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    signed_by = ("-CA", str(folder / f"{authority}.crt"), "-CAkey", str(folder / f"{authority}.key"), "-CAcreateserial")
    openssl("x509", "-req", "-days", "2", "-in", request, *signed_by, "-extfile", str(extensions), "-out", certificate)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    copy_source(folder, HOSTS)
    file = folder / CLUSTER
    file.write_text(file.read_text().replace("export RAYPOD_CLUSTER", f"export {VARIABLES} RAYPOD_CLUSTER"))
    return folder


@pytest.fixture(scope="module")
def pod(shared: Path) -> Iterator[EmulatedPod]:
    """The pod, with a Ray cluster that uses TLS."""
    made = EmulatedPod(f"s{os.getpid()}", HOSTS, shared)
    try:
        for authority in ("ca", "other"):
            make_authority(shared, authority)
        for host in range(1, HOSTS + 1):
            make_certificate(shared, "ca", f"host{host}", address(host))
            copies = [f"cp {shared}/host{host}.{kind} {FOLDER}/host.{kind}" for kind in ("crt", "key")]
            copy = "; ".join([f"mkdir -m 700 {FOLDER}", f"cp {shared}/ca.crt {FOLDER}/ca.crt", *copies])
            made.run("on", str(host), "bash", "-c", copy)
        made.run("op", "bash", "-c", f"cd {shared} && python -m raypod up {CLUSTER}", within_s=200)
        yield made
    finally:
        made.down()


def train(pod: EmulatedPod, shared: Path, name: str, variables: str) -> str:
    """Run a short training on the head with these variables; return its output, with the exit code at the end."""
    flags = f"--cluster {shared}/{CLUSTER} --run-dir {shared}/{name} --device emulated --updates 8"
    command = f"cd {ROOT}; {variables} python -m raypod.train {flags}; echo exit code $?"
    return pod.run("on", "1", "bash", "-lc", command, within_s=150)


def test_a_training_under_tls_succeeds(pod: EmulatedPod, shared: Path) -> None:
    output = train(pod, shared, "run", VARIABLES)
    assert output.splitlines()[-1] == "exit code 0", output
    plan, summary = (json.loads((shared / "run" / f"{name}.json").read_text()) for name in ("plan", "summary"))
    assert [instance["host"] for instance in plan["instances"]] == [address(1), address(2)]
    assert summary["updates"] == 8


@pytest.mark.parametrize("name", ["plain", "stranger"])
def test_a_client_without_tls_or_of_another_authority_is_refused(pod: EmulatedPod, shared: Path, name: str) -> None:
    make_certificate(shared, "other", "stranger", address(1))
    variables = VARIABLES.replace("~/tls/host", f"{shared}/stranger") if name == "stranger" else ""
    *_, error, code = train(pod, shared, name, variables).splitlines()
    assert code == "exit code 2"
    if name == "plain":
        assert "does it use TLS" in error
    else:
        assert "does it accept the certificate" in error or "unknown ca" in error  # as the handshake's end arrives
