"""`raypod completion`: what a bash that has sourced the script completes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from raypod.__main__ import main

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the script of bash, in a process that shows what it imports."""
    file = tmp_path_factory.mktemp("completion") / "raypod.bash"
    code = (
        "import sys; from raypod.__main__ import main; main(['completion', 'bash']); "
        "print(sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    )
    with file.open("wb") as out:
        words = [sys.executable, "-c", code]
        ended = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, timeout=60, check=True)
    assert ended.stderr == b"[]\n"
    return file


_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
name=$(complete -p raypod); name=${name#*-F }
${name% *} raypod "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("raypod tr", ["train"]),
        ("raypod train --num-i", ["--num-instances", "--num-ipus"]),
        ("raypod train --precision ", ["16.16", "16.32", "32.32"]),
        ("raypod train --data-dir fo", ["folder"]),
        ("raypod train --cluster fi", ["file.yaml"]),
        ("raypod plan --js", ["--json"]),
        ("raypod launch --print-topology ", ["yes", "no"]),
        ("raypod report fo", ["folder"]),
    ],
)
def test_bash_completes(line: str, offered: List[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.yaml").touch()
    shell = ["bash", "--norc", "-c", _COMPLETE, "bash", str(script), *line.split(" ")]
    ended = subprocess.run(shell, stdout=subprocess.PIPE, cwd=str(tmp_path), timeout=30, check=True)
    assert ended.stdout.decode().split() == offered


def test_a_wrong_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsah"]) == 2
    assert capsys.readouterr().err == "raypod: error: completion bsah: no such shell; did you mean bash?\n"
