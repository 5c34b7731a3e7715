"""`--precision 16.32` casts explicitly: no result depends on how the SDK resolves operands of different dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
from poptorch import device_mode

from raypod import train

IMAGES = ["--dataset", "synthetic", "--samples", "32", "--image", "1x8x8", "--model"]
TEXT = ["--task", "language-model", "--sequence-length", "8", "--optimizer", "adamw", "--text"]


def weights_of(folder: Path, *flags: str) -> str:
    inline = ["--fleet", "inline", "--device", "emulated", "--replicas", "2", "--batch-size", "2", "--updates", "1"]
    assert train.main([*inline, *flags, "--run-dir", str(folder)]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return str(summary["weights_sha256"])


def uncast(mode: Any, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Call a layer's function with its operands as they are: torch converts those of different dtypes to float32."""
    return func(*args, **kwargs)


@pytest.mark.parametrize("flags", [[*IMAGES, "resnet8", "--norm", "frozen"], [*IMAGES, "vit_tiny"], TEXT])
def test_layers_that_cast_their_weights_and_those_that_do_not_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: List[str]
) -> None:
    if flags is TEXT:
        (tmp_path / "text.txt").write_text("one two three " * 40)
        flags = [*flags, str(tmp_path / "text.txt")]
    flags = [*flags, "--precision", "16.32"]
    with caplog.at_level("WARNING", "poptorch"):
        cast = weights_of(tmp_path / "cast", *flags, "--strict")
    assert "operands in half and in float32" not in caplog.text
    layers = device_mode._functions(device_mode._LAYER_NAMES)
    monkeypatch.setattr(device_mode, "_HANDLERS", {**device_mode._HANDLERS, **dict.fromkeys(layers, uncast)})
    monkeypatch.setattr(device_mode, "_weights_like_input", uncast)
    assert weights_of(tmp_path / "uncast", *flags) == cast
