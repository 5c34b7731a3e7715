"""`raypod pack --task language-model`: a text that was tokenized once, and runs with it; windows of several files."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch

from raypod import train
from raypod.__main__ import main
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.training.data import corpus, packed_text, shards
from raypod.training.models.decoder import Decoder, DecoderSize
from raypod.training.tasks.registry import facts_of, schema_of, task_of
from tests.support.fed import equal, fed
from tests.support.refused import one_line

TASK = ["--task", "language-model"]
GIVEN = ["--text", "text", "--held-out", "0.1"]
SMALL = [*TASK, "--sequence-length", "16", "--batch-size", "2", "--replicas", "2", "--fleet", "inline"]
SMALL += ["--device", "emulated"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text").mkdir()
    for index in range(40):
        Path("text", f"{index}.txt").write_text("".join(f"{n} and {n + index}. " for n in range(1 + 7 * index % 12)))


def pack(*words: str) -> Path:
    assert main(["pack", *TASK, *GIVEN, *words, "packed"]) == 0
    return Path("packed").resolve()


def run(name: str, *words: str) -> Dict[str, Any]:
    assert train.main([*SMALL, *words, "--run-dir", name]) == 0
    return json.loads(Path(name, "summary.json").read_text())


def plan_of(instances: int, data: Dict[str, Any], task: Dict[str, Any]) -> Any:
    values = {
        "task": {"name": "language-model", "sequence_length": 16, **task},
        "data": data,
        "training": {"batch_size": 2, "epochs": 2},
        "pod": {"replicas": 4, "num_instances": instances},
    }
    config = from_values(values, schema=schema_of("language-model"))
    Path("run").mkdir(exist_ok=True)
    return make_plan(config, LOCAL, facts_of(config), "run")


def test_the_files_are_read_with_numpy_alone_and_shards_of_samples_are_no_text(capsys: Any) -> None:
    folder = pack()
    pieces = corpus.find_pieces(["text"], 0.1, None)
    for name, of_split in zip(("train", "val"), pieces):
        tokens, starts = (np.load(str(folder / name / f"{each}.npy")) for each in ("tokens", "starts"))
        files = [each.path.read_bytes()[each.start : each.stop] for each in of_split]
        assert tokens.dtype == np.uint8
        assert [bytes(each) for each in np.split(tokens, starts[1:])] == [each + b"\0" for each in files]
    assert main(["pack", "--verify", str(folder)]) == 0
    original = (folder / "index.json").read_text()
    (folder / "index.json").write_text(json.dumps({**json.loads(original), "text": None, "classes": ["a"]}))
    assert shards.read_index(folder).text is None
    capsys.readouterr()
    assert train.main([*SMALL, "--data-dir", "packed"]) == 2
    assert "packed has no text: `raypod pack --task language-model` writes one" in capsys.readouterr().err
    (folder / "index.json").write_text(original)
    (folder / "train" / "tokens.npy").write_bytes(bytes(10))
    assert main(["pack", "--verify", str(folder)]) == 2


def test_one_file_is_in_memory_at_a_time_and_a_run_maps_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    references: List[Any] = []
    found, most = corpus.encoded_pieces, 0

    def watched(pieces: Any, tokenizer: Any) -> Any:
        nonlocal most
        for tokens, sizes in found(pieces, tokenizer):
            references.append(weakref.ref(tokens))
            most = max(most, sum(each() is not None for each in references))
            yield tokens, sizes

    monkeypatch.setattr(packed_text, "encoded_pieces", watched)
    pack()
    assert (len(references), most) == (40, 2)
    mapped = task_of(plan_of(1, {"data_dir": "packed"}, {}).config).load().train.text
    assert not mapped.tokens.flags.owndata
    assert not mapped.tokens.flags.writeable


@pytest.mark.parametrize("packing", [[], ["--pack-sequences"]])
def test_a_run_computes_the_same_with_the_text_and_with_the_packed_one(packing: List[str]) -> None:
    expected = run("text-run", *packing, *GIVEN, "--updates", "6")
    folder = pack()
    Path("text").rename("moved")
    found = run("folder", *packing, "--data-dir", str(folder), "--updates", "6")
    streamed = run("url", *packing, "--data-dir", f"file://{folder}", "--cache-size", "1MB", "--updates", "6")
    for key in ("weights_sha256", "test_bits_per_byte", "test_loss"):
        assert found[key] == streamed[key] == expected[key]
    run("part", *packing, "--data-dir", str(folder), "--updates", "3", "--lr-schedule", "constant")
    whole = run("whole", *packing, "--data-dir", str(folder), "--updates", "6", "--lr-schedule", "constant")
    resumed = run("rest", *packing, "--resume", "part", "--updates", "6")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_any_placement_feeds_the_same(instances: int, is_packed: bool) -> None:
    folder, task = pack(), {"pack_sequences": is_packed}
    expected = fed(plan_of(1, {}, {**task, "text": "text", "held_out": 0.1}))
    for place in (str(folder), f"file://{folder}"):
        assert equal(fed(plan_of(instances, {"data_dir": place}, task)), expected)


def test_a_plan_of_a_packed_text_reads_neither_text_nor_tokens(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pack()
    with monkeypatch.context() as patch:
        patch.setattr(packed_text, "load_mapped", None)
        assert main(["plan", *SMALL, "--data-dir", "packed"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"packed text of \d+ \+ \d+ bytes, 0.0\d MB, at packed", out)
    assert main(["plan", *SMALL, "--text", "text", "--pack-sequences"]) == 0
    assert re.search(r"\d+ sequences packed into \d+ windows, 9\d.\d % of their tokens", capsys.readouterr().out)


def test_a_text_without_held_out_files_has_an_empty_test_split() -> None:
    assert main(["pack", *TASK, "--text", "text", "--held-out", "0", "packed"]) == 0
    for packing in ([], ["--pack-sequences"]):
        plan = plan_of(1, {"data_dir": "packed"}, {"pack_sequences": bool(packing)})
        assert (plan.dataset_size.test_samples, len(task_of(plan.config).load().test)) == (0, 0)


@torch.no_grad()
def test_a_sequence_is_predicted_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    network = Decoder(DecoderSize(2, 2, 16), 256, 16).eval()
    plan = plan_of(1, {}, {"text": "text", "held_out": 0.1, "pack_sequences": True})
    source = task_of(plan.config).load()
    tokens, labels, segments, places, _ = source.gather(source.train, np.arange(len(source.train)), None)
    logits, count = network(tokens, segments, places), 0
    for row in torch.nonzero(segments.max(dim=1).values > 1).flatten().tolist():
        for segment in range(1, int(segments[row].max()) + 1):
            here = segments[row] == segment
            torch.testing.assert_close(logits[row][here], network(tokens[row][here][None])[0])
            assert torch.equal(labels[row][here][:-1], tokens[row][here][1:])
            count += 1
    assert count > 10
    task = task_of(plan.config)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels.long(), reduction="none")
    ratios = task.evaluation_outputs(network, tokens, labels, segments, places, segments[:, 0])
    torch.testing.assert_close(ratios["loss"], (losses.sum(dim=1), (labels >= 0).sum(dim=1)))
    expected = losses.sum() / (labels >= 0).sum()
    loss, _ = task.training_outputs(network, tokens, labels, segments, places, segments[:, 0])
    torch.testing.assert_close(loss, expected)
    from raypod.training.models.program import mean_loss  # imports the SDK

    torch.testing.assert_close(mean_loss(logits, labels.long(), 5, (labels >= 0).sum()), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "pack --task language-model --text text --held-out 0.1 --batch-size 2 new",
            "--batch-size has no effect on raypod pack: omit it",
        ),
        (
            "pack --task language-model --text text --held-out 0.1 --pack-sequences new",
            "--pack-sequences has no effect on raypod pack: omit it",
        ),
        (
            "pack --task language-model --text text --held-out 0.1 task.size=small new",
            "--size has no effect on raypod pack: omit it",
        ),
        (
            "pack --task language-model --text text --held-out 0.1 --shard-size 1MB new",
            "--shard-size has no effect on a text, which has no",
        ),
        (
            "pack --task language-model --text text --held-out 0.1 packed",
            "packed exists; choose another folder, or remove it",
        ),
        ("pack --task language-model --text none new", "--text none does not exist"),
        ("train SMALL --data-dir packed --text text", "--text has no effect on the packed text of --da"),
        ("train SMALL --data-dir packed --held-out 0.1", "--held-out has no effect on the packed text"),
        ("train SMALL --data-dir packed --shuffle-window 2", "--shuffle-window 2 has no effect on a te"),
        ("train SMALL --data-dir packed --cache-dir x", "--cache-dir has no effect on the folder packed"),
        ("train SMALL --cache-dir x", "--cache-dir has no effect without --data-dir URL: omit it"),
        ("train SMALL --data-dir text", "--data-dir text has no index.json, which `raypod pack --task langu"),
        ("train SMALL --data-dir file://{} --cache-size 1kB", "--cache-size 0.00 MB is too small for th"),
        ("train --dataset imagefolder --data-dir packed", "packed has a text: train with --task language-"),
        ("train --dataset shards --data-dir packed", "packed has a text: train with --task language-model"),
        ("train SMALL --pack-sequences --generated-windows 9", "--pack-sequences has no effect on --gener"),
    ],
)
def test_what_has_no_effect_is_one_line(words: str, message: str, capsys: Any) -> None:
    folder = pack()
    assert message in one_line(capsys, main, words.replace("SMALL", " ".join(SMALL)).replace("{}", str(folder)).split())
    assert not list(Path().glob("new*"))


def test_a_run_continues_with_the_kind_of_text_with_which_it_began(capsys: Any) -> None:
    run("text-run", *GIVEN, "--updates", "1")
    folder = pack()
    run("packed-run", "--data-dir", "packed", "--updates", "1", "--lr-schedule", "constant")
    for name, words in (("text-run", ["--data-dir", "packed"]), ("packed-run", ["--text", "text"])):
        line = one_line(capsys, train.main, ["--resume", name, *words, "--updates", "2", "--run-dir", "more"])
        assert line.endswith("omit one; a run continues with the kind of text with which it began")
        assert not Path("more").exists()
    run("more", "--resume", "packed-run", "--data-dir", f"file://{folder}", "--updates", "2")
