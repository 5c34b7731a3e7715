"""Every kind of data and task: equal weights on each placement, after a kill and a resume; and user code that fails."""

from __future__ import annotations

import io
import signal
import tarfile
import threading
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest

from raypod.__main__ import main
from raypod.errors import DataUnreadable
from raypod.plan.config import HF_TASKS
from raypod.plan.plan import Plan
from raypod.training.checkpoint import resume
from raypod.training.data.order import call_positions, epoch_order
from tests.support import hf_folders, image_folders
from tests.support.faulty_runs import Outcome, assert_undisturbed, plan_for, run, send
from tests.support.fragile_runs import fail, plan_of

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
TASK = """
import numpy as np, raypod
from tests.support.regression import Regression
X = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
class Task(Regression):
    def datasets(self):
        return [[{"x": row, "y": row[0]} for row in rows] for rows in (X[:40], X[40:])]
class Padded(Regression):
    collate = raypod.pad_collate(4, 6, fields=["x"])
    def datasets(self):
        return [[{"x": row[: 2 + n % 4], "y": row[0]} for n, row in enumerate(rows)] for rows in (X[:40], X[40:])]
    def network(self, first_batch):
        import torch
        return torch.nn.Linear(1, 1)
    def training_outputs(self, network, **named):
        x = named["x"].float().mean(dim=1, keepdim=True)
        return super().training_outputs(network, x=x, y=named["y"])
    def evaluation_outputs(self, network, **named):
        x = named["x"].float().mean(dim=1, keepdim=True)
        return super().evaluation_outputs(network, x=x, y=named["y"])
class Parquet(Regression):
    def datasets(self):
        return tuple(raypod.from_parquet(f"tables/{split}.parquet", ["x", "y"]) for split in ("train", "test"))
class Saved(Regression):
    def datasets(self):
        return tuple(raypod.from_hf(f"saved/{split}") for split in ("train", "test"))
"""
Sections = Dict[str, Dict[str, Any]]


def at_url(name: str) -> Dict[str, Any]:
    return {"data_dir": f"file://{Path(name).resolve()}", "cache_dir": str(Path("cache").resolve())}


def images() -> Sections:
    packed = ["pack", str(image_folders.write(Path("images"))), "packed", "--shard-size", "1KB"]
    assert main(packed) == 0
    data = {"dataset": "imagefolder", "image_size": 16, "shuffle_window": 3, **at_url("packed")}
    return {"data": data, "training": {"model": "tiny"}}


def tars() -> Sections:
    from PIL import Image

    Path("tars").mkdir()
    generator = np.random.default_rng(0)
    for name, number in (("train-0", 24), ("train-1", 24), ("val-0", 6)):
        with tarfile.open(f"tars/{name}.tar", "w") as tar:
            for each in range(number):
                picture = io.BytesIO()
                Image.fromarray(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(picture, "PNG")
                for suffix, data in (("png", picture.getvalue()), ("cls", b"%d" % (each % 3))):
                    member = tarfile.TarInfo(f"s{each}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    assert main(["pack", "tars", "packed"]) == 0
    data = {"dataset": "imagefolder", "image_size": 16, "shuffle_window": 1, **at_url("packed")}
    return {"data": data, "training": {"model": "tiny"}}


def samples() -> Sections:
    assert main(["pack", "--task", "data_kinds:Task", "packed", "--shard-size", "4KB"]) == 0
    return {"task": {"name": "data_kinds:Task"}, "data": {"shuffle_window": 2, **at_url("packed")}}


def ragged() -> Sections:
    return {"task": {"name": "data_kinds:Padded"}}


def parquet() -> Sections:
    pa = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    from pyarrow import parquet

    Path("tables").mkdir()
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    for name, part in (("train", rows[:40]), ("test", rows[40:])):
        parquet.write_table(pa.table({"x": list(part), "y": part[:, 0]}), f"tables/{name}.parquet", row_group_size=7)
    return {"task": {"name": "data_kinds:Parquet"}}


def saved() -> Sections:
    """Write tables as `save_to_disk` of Hugging Face's datasets does."""
    pa = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    for name, part in (("train", rows[:40]), ("test", rows[40:])):
        folder = Path("saved", name)
        folder.mkdir(parents=True)
        table = pa.table({"x": list(part), "y": part[:, 0]})
        with pa.OSFile(f"{folder}/data.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return {"task": {"name": "data_kinds:Saved"}}


def write_text() -> str:
    Path("text").mkdir()
    for index in range(20):
        Path("text", f"{index}.txt").write_text("".join(f"{n} and {n + index}. " for n in range(1 + 7 * index % 12)))
    return str(Path("text").resolve())


def text_files() -> Sections:
    return {"task": {"name": "language-model", "sequence_length": 16, "text": [write_text()]}}


def text(**options: Any) -> Sections:
    write_text()
    assert main(["pack", "--task", "language-model", "--text", "text", "packed"]) == 0
    task = {"name": "language-model", "sequence_length": 16, **options}
    return {"task": task, "data": at_url("packed")}


def sequences() -> Sections:
    return text(pack_sequences=True)


def hf(task: str) -> Callable[[], Sections]:
    def sections() -> Sections:
        pytest.importorskip("transformers", reason="the extra hf is not installed")
        return hf_folders.values(hf_folders.options(task, Path.cwd()))

    return sections


KINDS: Dict[str, Callable[[], Sections]] = {
    "images": images,
    "tars": tars,
    "samples": samples,
    "ragged": ragged,
    "parquet": parquet,
    "saved": saved,
    "text files": text_files,
    "text": text,
    "sequences": sequences,
    **{task: hf(task) for task in HF_TASKS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_placements_a_kill_and_a_resume_have_the_weights_of_one_instance(
    session: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("data_kinds.py").write_text(TASK)
    sections = KINDS[kind]()
    training = {"updates": 10, "batch_size": 1, "lr_schedule": "constant", **sections.pop("training", {})}

    def planned(instances: int, **run_section: Any) -> Any:
        folder = tmp_path / f"{instances}x{4 // instances}"
        run_section["start_timeout_s"] = 400  # transformers is slow to import on a busy machine
        return plan_for(folder, training=training, pod={"num_instances": instances}, run=run_section, **sections)

    one = planned(1, fleet="inline", checkpoint_every="5 updates")
    whole = run(one)
    killed = run(planned(2), [(4, send(signal.SIGKILL, 1))])
    resumed = run(planned(4, resume=f"{one.run_dir}/checkpoints/update-00000005"))
    assert (killed.lost, resumed.updates) == ([(1, "died")], [6, 7, 8, 9, 10])
    assert whole.sha256 == killed.sha256 == resumed.sha256


def test_user_code_that_ends_its_process_or_never_returns(session: Any, folder: Path, undisturbed: Outcome) -> None:
    plan = plan_of(folder, "dies", stuck_after_s=3, report_timeout_s=30)
    faults = ["model-throws", "optimizer-dies", "model-loops"]
    outcome = run(plan, [(4 + 5 * number, fail(folder, failure)) for number, failure in enumerate(faults)])
    assert_undisturbed(plan, outcome, undisturbed)
    assert outcome.lost == [(1, kind) for kind in ("died", "died", "stuck")]
    threw, died, loops = outcome.losses
    assert threw.cause.startswith("its process died: ")
    assert threw.cause.endswith("(what(): the device is gone)")
    assert "what()" not in died.cause
    assert "s while its threads use CPU time)" in loops.cause
    assert {repair.seeded_from for repair in outcome.repairs} == {"instance 0"}


def test_data_that_cannot_be_read_costs_no_state(session: Any, folder: Path, undisturbed: Outcome) -> None:
    """An exception in all instances, then an outage of their disk that passes, then one that does not."""
    plan = plan_of(folder, "unreadable", checkpoint_every="60 updates", read_retry_s=60, max_restarts=1)
    outage = folder / "outage"
    order = epoch_order(plan.config.training.seed, 0, plan.dataset_size.train_samples)
    for instance in (0, 1):
        first_sample = order[call_positions(plan.geometry, instance, 16)][0]
        (folder / f"raises-at-{first_sample}").touch()

    def begin_an_outage(plan: Plan) -> None:
        outage.touch()
        threading.Timer(2.0, outage.unlink).start()

    outcome = run(plan, [(20, begin_an_outage)])
    assert_undisturbed(plan, outcome, undisturbed)
    assert sorted(outcome.lost) == [(0, "raised"), (1, "raised")]
    assert all("no such sample" in loss.cause for loss in outcome.losses)
    (repair,) = outcome.repairs
    assert Path(repair.seeded_from).name == f"update-{repair.update:08d}"
    assert repair.update == 16
    lasting = plan_of(folder, "lasting", checkpoint_every="60 updates", read_retry_s=0.5)
    with pytest.raises(DataUnreadable, match="cannot read samples for 0.5 s"):
        run(lasting, [(4, lambda plan: outage.touch())])
    outage.unlink()
    resumed = plan_of(folder, "lasting", resume=lasting.run_dir)
    assert resume.find_checkpoint(resumed).checkpoint.update >= 4
    assert run(resumed).sha256 == undisturbed.sha256
