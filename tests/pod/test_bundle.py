"""`raypod bundle` with tiny wheels from a local folder: what it writes, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any, Callable, List

import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.pod import bundle
from tests.support import ROOT

pytest.importorskip("pip", reason="this Python has no pip")
CONSTRAINTS = ROOT / "constraints.txt"
VERSION = ".".join(map(str, sys.version_info[:2]))
MakeWheel = Callable[..., Path]


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    index = tmp_path / "index"
    index.mkdir()

    def write(name: str, *requires: str, version: str = "1.0", tag: str = "py3-none-any") -> Path:
        path = index / f"{name}-{version}-{tag}.whl"
        info = f"{name}-{version}.dist-info"
        metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
        if name == "extras":
            metadata.append("Provides-Extra: more")
        with zipfile.ZipFile(path, "w") as content:
            content.writestr(f"{name}/__init__.py", "")
            content.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
            content.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
            names = [f"{name}/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
            content.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in names))
        return path

    return write


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_wheel: MakeWheel) -> Path:
    """Let pip find only the wheels of `index`, and raypod's own wheel be a tiny one; return the folder of bundles."""
    variables = {"NO_INDEX": "1", "FIND_LINKS": f"{tmp_path}/index", "CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    own = make_wheel("raypod", "base>=1", "extras[more]", "old; python_version < '3.9'")

    def build(self: bundle.Pip, source: Path, folder: Path) -> None:
        (folder / own.name).write_bytes(own.read_bytes())

    monkeypatch.setattr(bundle.Pip, "build", build)
    for version in re.findall(r"^ray==([\w.]+)", CONSTRAINTS.read_text(), re.MULTILINE):
        make_wheel("ray", version=version)
    make_wheel("extras", "wanted; extra == 'more'", "unwanted; extra == 'other'")
    make_wheel("old", "older")
    for name in ("base", "wanted", "older"):
        make_wheel(name)
    return tmp_path


def create_venv(folder: Path) -> None:
    """Create a virtual environment with this environment's pip: to install one takes seconds."""
    import pip

    venv.create(str(folder), with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{VERSION}" / "site-packages"
    (site / "pip").symlink_to(Path(pip.__file__).parent)


def names(folder: Path) -> List[str]:
    return sorted(name.partition("-")[0] for name in json.loads((folder / "manifest.json").read_text())["sha256"])


def test_a_bundle_has_what_its_python_needs(processes: None, offline: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)  # this interpreter runs pip for all versions
    assert main(["bundle", str(offline / "new"), "--python", "3.11"]) == 0
    assert names(offline / "new") == ["base", "extras", "ray", "raypod", "wanted"]
    assert "5 wheels for Python 3.11" in capsys.readouterr().out
    assert main(["bundle", str(offline / "old"), "--python", "3.8"]) == 0  # whatever runs the command
    assert names(offline / "old") == ["base", "extras", "old", "older", "ray", "raypod", "wanted"]
    assert not [*offline.glob(".*")]
    if VERSION != "3.8":  # the script refuses another Python
        line = ["sh", str(offline / "old" / "install.sh"), str(offline / "venv"), sys.executable]
        done = subprocess.run(line, stderr=subprocess.PIPE, timeout=60)
        assert done.returncode == 2
        assert b"this bundle is for Python 3.8" in done.stderr
        assert not (offline / "venv").exists()


def test_a_bundle_can_be_installed_without_an_index(processes: None, offline: Path, tmp_path: Path) -> None:
    folder, created = offline / "bundle", tmp_path / "venv"
    assert main(["bundle", str(folder)]) == 0
    create_venv(created)
    line = ["sh", str(folder / "install.sh"), str(created)]
    subprocess.run(line, check=True, timeout=120)
    code = "import importlib.util as u, sys; sys.exit(not u.find_spec('wanted') or not u.find_spec('raypod'))"
    subprocess.run([str(created / "bin" / "python"), "-I", "-c", code], check=True, timeout=60)
    damaged = next((folder / "wheels").glob("base*"))
    damaged.write_bytes(damaged.read_bytes() + b"x")
    create_venv(tmp_path / "other")
    again = subprocess.run([*line[:2], str(tmp_path / "other")], stderr=subprocess.PIPE, timeout=120)
    assert again.returncode != 0
    assert b"HASHES" in again.stderr.upper()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--python", "2.7"], "--python 2.7: must be the version of the hosts' Python, as in 3.8"),
        (["--constraints", "missing"], "the file of --constraints, missing, does not exist"),
        (["absent"], "pip download failed: No matching distribution found for absent"),
        (["base", "--python", "3.8", "wrong=1"], "'wrong=1' is neither a requirement, as numpy>=1.20, nor a wheel"),
        (["missing.whl"], "the wheel missing.whl does not exist"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(
    processes: None, words: List[str], message: str, offline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", str(offline / "bundle"), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err
    assert [path.name for path in offline.iterdir()] == ["index"]


def test_an_existing_folder_is_kept_and_pip_is_needed(offline: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(bundle, "_has_pip", lambda interpreter: False)
    for name, message in (
        ("index", "index: it exists; remove it"),
        ("b", "has no pip; install it with: python -m ensu"),
    ):
        assert main(["bundle", str(offline / name)]) == 2
        assert message in capsys.readouterr().err
    assert [*(offline / "index").glob("base*")]


def test_an_index_that_cannot_be_reached_is_named(
    processes: None, offline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert main(["bundle", str(offline / "bundle"), "absent"]) == 2
    assert "the package index cannot be reached" in capsys.readouterr().err


def test_constraints_of_the_python_of_the_hosts() -> None:
    assert "torch==2.0.1" in bundle.constraints_for(CONSTRAINTS, "3.8")
    assert "torch==2.13.0" in bundle.constraints_for(CONSTRAINTS, "3.11")
    assert "ray==2.10.0" not in bundle.constraints_for(CONSTRAINTS, "3.11")
    assert bundle.installed(["pip", "not-installed"]) == [f"pip=={importlib.metadata.version('pip').partition('+')[0]}"]


def test_the_wheel_of_an_installed_package(tmp_path: Path, monkeypatch: Any, make_wheel: MakeWheel) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(make_wheel("pure")) as content:
        content.extractall(str(site))
    (site / "pure-1.0.dist-info" / "INSTALLER").write_text("pip")
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "out").mkdir()
    bundle.repack("pure", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out" / "pure-1.0-py3-none-any.whl") as content:
        assert {"pure/__init__.py", "pure-1.0.dist-info/RECORD"} <= {*content.namelist()}
        assert "pure-1.0.dist-info/INSTALLER" not in content.namelist()
    (site / "pure-1.0.dist-info" / "RECORD").write_text("")
    with pytest.raises(ConfigError, match="run the command in a checkout"):
        bundle.repack("pure", tmp_path / "out")
