from __future__ import annotations

import pickle
from pathlib import Path

import make_cifar


def test_a_batch_may_be_empty(tmp_path: Path) -> None:
    folder = make_cifar.write(tmp_path, train=4, test=2, classes=10)
    batches = [pickle.loads((folder / f"data_batch_{number}").read_bytes()) for number in range(1, 6)]
    assert [batch["data"].shape for batch in batches].count((0, 3072)) == 1
