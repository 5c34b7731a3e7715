"""Every command of docs/how-to/trained-models.md, in one process: without Ray, and with fewer updates."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from documented import commands
from trained_runs import digits, train_inline

from raypod.__main__ import main

Image: Any = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_every_command_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Image.fromarray(digits()[3, 0].numpy()).save("photos/seven.png")
    text = ["--task", "language-model", "--max-mb", "0.1", "--sequence-length", "32", "--updates", "2"]
    train_inline(tmp_path / "runs" / "text", *text, "--replicas", "1")
    found = commands("how-to/trained-models.md")
    assert len(found) == 13
    for line in found:
        words = shlex.split(line.replace("--num-instances 4", ""))
        assert words[0] == "raypod"
        if words[1] == "train":
            train_inline(tmp_path / "runs" / "digits", *words[2:], "--replicas", "4", "--num-instances", "1")
        else:
            assert main(words[1:]) == 0, line
    assert Path("digits-pixels.pt").is_file()
    assert Path("digits-average.safetensors").is_file()
