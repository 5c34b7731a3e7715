"""`raypod up` collects the newest copy of each run on the head, and verifies it; damaged ones are passed over."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.pod import collect_copies, host_copies, ssh

HEAD, B, C = "10.9.9.1", "10.9.9.2", "10.9.9.3"
COMMAND = f"on {HEAD}: python3 -m raypod.train --cluster file.yaml"


class Hosts:
    """Hosts whose home folders are folders here; a command on one runs in a shell with that home."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self.run_dir = root, root / HEAD / "runs" / "digits"
        self.lines: List[str] = []
        self.lost: List[str] = []
        for name in (HEAD, B, C):
            (root / name).mkdir()
        monkeypatch.setattr(ssh, "ssh_command", self._ssh_command)

    def _ssh_command(self, host: Host, settings: Ssh, terminal: Any = ()) -> List[str]:
        if host.name in self.lost:
            return ["false"]
        return ["env", f"HOME={self._root / host.name}", "bash", "-c"]

    def copy(
        self,
        host: str,
        update: int,
        generation: int = 1,
        run_id: str = "digits-12",
        ended: bool = False,
        written: float = 0.0,
    ) -> Path:
        """Put a copy on a host, as `CopyReceiver` writes it."""
        folder = self._root / host / ".raypod" / "copies" / run_id / f"{generation:06d}-{update:08d}"
        contents = {
            "copies.json": json.dumps({"run_id": run_id}),
            "ledger.jsonl": f"{update}\n" * 3,
            "metrics.jsonl": "",
            **self.checkpoint(update, generation),
        }
        for name, text in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        records = {
            name: {"size_bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in contents.items()
        }
        facts = {"format": 1, "run_id": run_id, "run_dir": str(self.run_dir), "checkpoint": f"update-{update:08d}"}
        order = {"generation": generation, "update": update, "written_unix_s": written}
        (folder / "run.json").write_text(json.dumps({**facts, **order, "files": records}))
        if ended:
            (folder.parent / "ended").write_text(folder.name)
        return folder

    @staticmethod
    def checkpoint(update: int, generation: int) -> Dict[str, str]:
        """Return the contents of the files of a checkpoint by their names in the run folder."""
        weights, folder = f"weights {update}", f"checkpoints/update-{update:08d}"
        files = {"weights.safetensors": {"size_bytes": len(weights)}}
        manifest = json.dumps({"generation": generation, "update": update, "files": files})
        return {
            f"{folder}/weights.safetensors": weights,
            f"{folder}/manifest.json": manifest,
            f"{folder}/manifest.sha256": hashlib.sha256(manifest.encode()).hexdigest() + "  manifest.json\n",
        }

    def on_head(self, update: int, generation: int = 1, run_id: str = "digits-12") -> None:
        """Put a run folder with one checkpoint on the head."""
        for name, text in {
            "copies.json": json.dumps({"run_id": run_id}),
            **self.checkpoint(update, generation),
        }.items():
            (self.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (self.run_dir / name).write_text(text)

    def collect(self) -> List[str]:
        """Collect the copies; return the lines that were printed."""
        self.lines.clear()
        cluster = Cluster("pod", tuple(Host(name, name) for name in (HEAD, B, C)))
        collect_copies.collect(cluster, COMMAND, self.lines.append)
        return self.lines

    def updates(self) -> List[int]:
        """Return the updates of the checkpoints on the head."""
        return sorted(int(path.name[-8:]) for path in (self.run_dir / "checkpoints").glob("update-*"))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, monkeypatch)


def test_the_newest_copy_is_collected_and_the_command_to_continue_is_printed(hosts: Hosts) -> None:
    hosts.copy(B, 200, generation=1)
    newest = hosts.copy(C, 100, generation=2)
    hosts.copy(HEAD, 150, generation=1)
    assert hosts.collect() == [
        f"collected update-00000100 (generation 2) of {hosts.run_dir} from host {C}",
        f"continue it: {COMMAND} --resume {hosts.run_dir}",
    ]
    names = {path.relative_to(newest) for path in newest.rglob("*") if path.is_file()} - {Path("run.json")}
    assert {path.relative_to(hosts.run_dir) for path in hosts.run_dir.rglob("*") if path.is_file()} == names
    assert all((hosts.run_dir / name).read_bytes() == (newest / name).read_bytes() for name in names)
    assert hosts.collect() == []
    assert [path.name for path in hosts.run_dir.parent.iterdir()] == ["digits"]


def test_a_copy_on_the_head_itself_is_preferred(hosts: Hosts) -> None:
    for host in (HEAD, B, C):
        hosts.copy(host, 100)
    assert hosts.collect()[0].endswith(f"from host {HEAD}")
    assert hosts.updates() == [100]


@pytest.mark.parametrize(("own", "collected"), [((1, 100), False), ((2, 20), False), ((1, 99), True)])
def test_the_head_keeps_what_is_as_new(hosts: Hosts, own: Tuple[int, int], collected: bool) -> None:
    hosts.copy(B, 100)
    hosts.on_head(own[1], own[0])
    lines = hosts.collect()
    assert bool(lines) == collected
    assert hosts.updates() == ([100] if collected else [own[1]])
    if collected:
        assert lines[0].endswith(f"from host {B}; the older state is in {hosts.run_dir}.before-1")
        assert (hosts.run_dir.parent / "digits.before-1" / "checkpoints" / "update-00000099").is_dir()


def test_a_checkpoint_of_the_head_that_is_damaged_does_not_count(hosts: Hosts) -> None:
    hosts.copy(B, 100)
    hosts.on_head(110)
    (hosts.run_dir / "checkpoints" / "update-00000110" / "weights.safetensors").write_text("")
    assert hosts.collect()[0].startswith("collected update-00000100")


DAMAGES = {
    "changed": "the SHA-256 of checkpoints/update-00000100/weights.safetensors does not match run.json",
    "truncated": "checkpoints/update-00000100/weights.safetensors has 10 bytes, expected 11",
    "deleted": "checkpoints/update-00000100/weights.safetensors is missing",
    "a link": "checkpoints/update-00000100/weights.safetensors is no file",
    "index": "run.json cannot be read, or is of another format than 1",
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_copy_is_named_and_the_next_one_is_taken(hosts: Hosts, damage: str) -> None:
    hosts.copy(C, 90)
    bad = hosts.copy(B, 100)
    weights = bad / "checkpoints" / "update-00000100" / "weights.safetensors"
    if damage == "changed":
        weights.write_text("weights 1?0")
    elif damage == "truncated":
        weights.write_text("weights 10")
    elif damage == "deleted":
        weights.unlink()
    elif damage == "a link":
        weights.rename(weights.with_name("other"))
        weights.symlink_to("other")
    else:
        (bad / "run.json").write_text("{")
    warning, collected, _ = hosts.collect()
    assert warning.startswith("warning: ")
    assert f"host {B}: " in warning
    assert warning.endswith(f"{bad}/{DAMAGES[damage]}")
    assert collected.startswith("collected update-00000090")
    assert hosts.updates() == [90]
    assert [path.name for path in hosts.run_dir.parent.iterdir()] == ["digits"]


def test_the_folder_of_another_run_is_not_touched(hosts: Hosts) -> None:
    copy = hosts.copy(B, 100)
    hosts.on_head(10, run_id="another-34")
    (line,) = hosts.collect()
    assert line == (
        f"warning: {hosts.run_dir} on the head is not the run digits-12, whose update-00000100 (generation 1) is on "
        f"host {B} in {copy}"
    )
    assert hosts.updates() == [10]


def test_of_two_runs_that_have_had_the_same_folder_the_last_one_is_collected(hosts: Hosts) -> None:
    hosts.copy(B, 300, run_id="older-34", written=1.0)
    hosts.copy(B, 100, written=2.0)
    hosts.copy(C, 90, written=1.5)
    (collected, _) = hosts.collect()
    assert collected.startswith("collected update-00000100")
    assert hosts.collect() == []
    assert [path.name for path in hosts.run_dir.parent.iterdir()] == ["digits"]


def test_a_complete_run_is_only_named(hosts: Hosts) -> None:
    copy = hosts.copy(B, 100, ended=True)
    (line,) = hosts.collect()
    assert line == (
        f"the run {hosts.run_dir} is complete and not on the head; its update-00000100 (generation 1) is on host {B} "
        f"in {copy}"
    )
    assert not hosts.run_dir.exists()
    hosts.on_head(100)
    assert hosts.collect() == []


def test_a_head_that_cannot_write_the_folder_is_a_warning(hosts: Hosts) -> None:
    hosts.copy(B, 100)
    hosts.run_dir.parent.write_text("no folder")
    (line,) = hosts.collect()
    assert line.startswith(f"warning: cannot collect update-00000100 (generation 1) of {hosts.run_dir} from host {B}: ")
    assert line.endswith("Not a directory")


def test_a_host_that_is_lost_is_named(hosts: Hosts) -> None:
    hosts.copy(B, 100)
    hosts.copy(C, 90)
    hosts.lost = [B]
    lines = hosts.collect()
    assert lines[0] == f"warning: host {B}: its copies of checkpoints cannot be listed"
    assert lines[1].startswith("collected update-00000090")


def test_an_archive_that_ends_early_leaves_nothing(tmp_path: Path, hosts: Hosts) -> None:
    copy = hosts.copy(B, 100)
    archive = subprocess.run(["tar", "-C", str(copy), "-cf", "-", "."], capture_output=True, check=True).stdout
    settings = {"run_dir": str(tmp_path / "new"), "index": json.loads((copy / "run.json").read_text())}
    program = [sys.executable, str(host_copies.__file__), "install", json.dumps(settings)]
    for size in (0, 100, 700, 2000):
        done = subprocess.run(program, input=archive[:size], capture_output=True, check=True)
        assert json.loads(done.stdout)["damaged"]
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "new.partial").exists()
    assert json.loads(subprocess.run(program, input=archive, capture_output=True, check=True).stdout)["installed"]
    shutil.rmtree(str(tmp_path / "new"))


def test_an_index_with_a_name_outside_of_the_copy_is_refused(hosts: Hosts) -> None:
    copy = hosts.copy(B, 100)
    index = json.loads((copy / "run.json").read_text())
    index["files"]["../../stolen"] = {"size_bytes": 1, "sha256": ""}
    (copy / "run.json").write_text(json.dumps(index))
    (line,) = hosts.collect()
    assert line.endswith("run.json names a file outside of the copy: ../../stolen")
