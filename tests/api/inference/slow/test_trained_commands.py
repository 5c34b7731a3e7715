from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from PIL import Image

from raypod.__main__ import main
from tests.support.documented import commands
from tests.support.trained_runs import digits, train_inline


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_every_command_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of docs/how-to/trained-models.md, without Ray, and with fewer updates."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Image.fromarray(digits()[3, 0].numpy()).save("photos/seven.png")
    text = ["--task", "language-model", "--max-mb", "0.1", "--sequence-length", "32", "--updates", "2"]
    train_inline(tmp_path / "runs" / "text", *text, "--replicas", "1")
    found = commands("how-to/trained-models.md")
    assert len(found) == 14
    for line in found:
        words = shlex.split(line.replace("--num-instances 4", ""))
        assert words[0] == "raypod"
        if words[1] == "train":
            train_inline(tmp_path / "runs" / "digits", *words[2:], "--replicas", "4", "--num-instances", "1")
        else:
            assert main(words[1:]) == 0, line
    assert Path("digits-pixels.pt").is_file()
    assert Path("digits-average.safetensors").is_file()
