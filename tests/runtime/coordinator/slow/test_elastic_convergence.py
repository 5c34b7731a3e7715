"""A run that shrinks and grows again learns as one that does not: within the spread of five seeds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import pytest

from raypod import train
from raypod.runs import verify_data

SEEDS = (1, 2, 3, 4, 5)
UPDATES, SHRUNK_AT, GROWN_AT = 132, 40, 80  # 44 updates per epoch
WINDOW = 22  # updates whose mean loss is compared


def trained(folder: Path, seed: int, sizes: Sequence[Tuple[int, int]]) -> List[float]:
    """Train up to each update of `sizes` with its number of replicas; return the loss of every update."""
    for number, (updates, replicas) in enumerate(sizes):
        flags = ["--resume" if number else "--run-dir", str(folder), "--updates", str(updates)]
        flags += ["--replicas", str(replicas), "--gradient-accumulation", str(4 // replicas), "--seed", str(seed)]
        flags += ["--fleet", "inline", "--num-instances", "1", "--device", "emulated", "--elastic"]
        assert train.main([*flags, "--lr-schedule", "constant", "--learning-rate", "0.05"]) == 0
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, List[List[float]]]:
    """The losses of each seed, of undisturbed and of resized runs."""
    folder = tmp_path_factory.mktemp("runs")
    plain = [trained(folder / f"plain-{seed}", seed, [(UPDATES, 4)]) for seed in SEEDS]
    sizes = [(SHRUNK_AT, 4), (GROWN_AT, 1), (UPDATES, 4)]
    elastic = [trained(folder / f"elastic-{seed}", seed, sizes) for seed in SEEDS]
    for seed in SEEDS:
        verdict = verify_data.verify(folder / f"elastic-{seed}")
        assert verdict.is_proved, verdict.lines
    return {"plain": plain, "elastic": elastic}


def test_the_loss_stays_within_the_spread_of_seeds(losses: Dict[str, List[List[float]]]) -> None:
    plain, elastic = losses["plain"], losses["elastic"]
    assert all(len(each) == UPDATES for each in plain + elastic)
    for begin in range(0, UPDATES, WINDOW):
        part = slice(begin, begin + WINDOW)
        means = {kind: [statistics.mean(each[part]) for each in runs] for kind, runs in losses.items()}
        low, high = min(means["plain"]), max(means["plain"])
        spread = high - low
        assert low - spread / 2 <= statistics.mean(means["elastic"]) <= high + spread / 2, f"from update {begin}"
    assert statistics.mean(statistics.mean(each[-WINDOW:]) for each in elastic) < plain[0][0] / 2, "it learns"


def test_the_bits_are_equal_until_the_first_change_and_then_differ(losses: Dict[str, List[List[float]]]) -> None:
    for plain, elastic in zip(losses["plain"], losses["elastic"]):
        assert plain[:SHRUNK_AT] == elastic[:SHRUNK_AT]
        # The first update after it has the same weights and samples; only the sums of its gradients differ.
        assert plain[SHRUNK_AT] == pytest.approx(elastic[SHRUNK_AT], rel=1e-4)
        assert plain[SHRUNK_AT + 1 :] != elastic[SHRUNK_AT + 1 :]
