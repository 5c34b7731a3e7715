"""The snippets of docs/how-to/from-python.md and tune.md run, and type checkers accept them."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from tests.support.documented import DOCS
from tests.support.ray_cluster import ray_cluster

# Ray's own code leaves sockets and files to the garbage collector, and warns of its own interfaces.
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = "".join((DOCS / page).read_text() for page in ("how-to/from-python.md", "how-to/tune.md"))
# The packages that a snippet needs besides raypod's own, and its code.
SNIPPETS: List[Tuple[str, str]] = re.findall(r"<!-- run(?:: ([\w ]+))? -->\n```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED: Dict[str, str] = {
    "result.metrics": r"\d+\.\d+ [0-9a-f]{64}\n.*update-00000012\n$",
    "UntilAccurate": r"True the callback UntilAccurate requested it\n$",
    "raypod.log_image": r"\['00000044-confusion.png', '00000088-confusion.png'\]\n$",
    "raypod.stream": r"\d+\n$",
    "raypod.run": r"\[\(0, 2\.5\), \(1, 2\.5\)\]\n$",
    "tune.Tuner": r"0\.\d+ \d+\.\d+\n$",
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray session, so that not every snippet starts its own."""
    with ray_cluster(("",), num_cpus=2) as started:
        yield started.ray


def test_every_snippet_is_run_or_checked() -> None:
    assert len(SNIPPETS) == PAGE.count("```python") == len(PRINTED)


@pytest.mark.parametrize("mark", PRINTED)
def test_a_snippet_prints_what_the_page_says(
    mark: str, ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((packages, code),) = [each for each in SNIPPETS if mark in each[1]]
    for package in packages.split():
        pytest.importorskip(package, reason="the snippet needs it", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # of the results of Tune
    (tmp_path / "snippet.py").write_text(code)
    runpy.run_path("snippet.py", run_name="__main__")
    assert re.search(PRINTED[mark], capsys.readouterr().out, re.DOTALL)
    assert ray.is_initialized()


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed (extra dev)")
def test_type_checkers_accept_the_snippets(tmp_path: Path) -> None:
    names = []
    for number, (_, code) in enumerate(SNIPPETS):
        names.append(f"snippet_{number}.py")
        (tmp_path / names[-1]).write_text(code)
    settings = "[mypy]\nstrict = True\n[mypy-ray.*,horovod.*,popdist.*,torch.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(settings + "ignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}", *names]
    environment = {"MYPYPATH": str(DOCS.parent)}
    options: Any = {"capture_output": True, "text": True, "check": False, "timeout": 300}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
