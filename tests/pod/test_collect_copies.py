"""`raypod up` collects the newest copy of each run on the head, and verifies it; damaged ones are passed over."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import pytest

from raypod.plan.cluster import Cluster, Host
from raypod.pod import collect_copies, host_copies
from raypod.runtime import ssh

HEAD, B, C = "10.9.9.1", "10.9.9.2", "10.9.9.3"
COMMAND = f"on {HEAD}: python3 -m raypod.train --cluster file.yaml"
WEIGHTS = "checkpoints/update-00000100/weights.safetensors"


def write(folder: Path, contents: Dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def checkpoint(update: int, generation: int, run_id: str) -> Dict[str, str]:
    weights, folder = f"weights {update}", f"checkpoints/update-{update:08d}"
    files = {"weights.safetensors": {"size_bytes": len(weights)}}
    manifest = json.dumps({"generation": generation, "update": update, "files": files})
    return {
        "copies.json": json.dumps({"run_id": run_id}),
        f"{folder}/weights.safetensors": weights,
        f"{folder}/manifest.json": manifest,
        f"{folder}/manifest.sha256": hashlib.sha256(manifest.encode()).hexdigest() + "  manifest.json\n",
    }


class Hosts:
    """Hosts whose home folders are folders here; `host_copies` runs in this process."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self.run_dir, self._patch = root, root / HEAD / "runs" / "digits", monkeypatch
        self.lost: List[str] = []
        monkeypatch.setattr(ssh, "run_on", self._run_on)
        monkeypatch.setattr(ssh, "pipe", self._pipe)

    def _run_on(self, host: Host, _: Any, words: List[str], program: str, timeout_s: float) -> ssh.Result:
        if host.name in self.lost:
            return ssh.Result(255, "", "lost")
        folder = str(self._root / host.name / ".raypod" / "copies")
        answer = host_copies.main(words[2], {"folder": folder, **json.loads(words[3])})
        return ssh.Result(0, json.dumps(answer), "")

    def _pipe(self, source: Any, target: Any, settings: Any, timeout_s: float) -> ssh.Result:
        assert (source[1][:2], source[1][3:]) == (["tar", "-C"], ["-cf", "-", "."])
        self.send(packed(Path(source[1][2])))
        return ssh.Result(0, json.dumps(host_copies.main(target[1][3], json.loads(target[1][4]))), "")

    def send(self, archive: bytes) -> None:
        self._patch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(archive)))

    def copy(self, host: str, update: int, generation: int = 1, run_id: str = "digits-12", written: float = 0) -> Path:
        """Put a copy on a host, as `CopyReceiver` writes it."""
        folder = self._root / host / ".raypod" / "copies" / run_id / f"{generation:06d}-{update:08d}"
        contents = {"ledger.jsonl": f"{update}\n" * 3, "metrics.jsonl": "", **checkpoint(update, generation, run_id)}
        write(folder, contents)
        bytes_of = {name: text.encode() for name, text in contents.items()}
        records = {
            name: {"size_bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for name, b in bytes_of.items()
        }
        facts = {"format": 1, "run_id": run_id, "run_dir": str(self.run_dir), "checkpoint": f"update-{update:08d}"}
        order = {"generation": generation, "update": update, "written_unix_s": written}
        (folder / "run.json").write_text(json.dumps({**facts, **order, "files": records}))
        return folder

    def on_head(self, update: int, generation: int = 1, run_id: str = "digits-12") -> None:
        write(self.run_dir, checkpoint(update, generation, run_id))

    def collect(self) -> List[str]:
        lines: List[str] = []
        cluster = Cluster("pod", tuple(Host(name, name) for name in (HEAD, B, C)))
        collect_copies.collect(cluster, COMMAND, lines.append)
        return lines

    def updates(self) -> List[int]:
        return sorted(int(path.name[-8:]) for path in (self.run_dir / "checkpoints").glob("update-*"))


def packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(str(folder), arcname=".")
    return buffer.getvalue()


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


def test_commands_on_the_hosts_collect_copies_and_prefer_the_one_on_the_head(processes: None, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as undone:
        hosts = Hosts(tmp_path, undone)
    for host in (HEAD, B, C):
        (tmp_path / host).mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssh, "ssh_command", lambda host, *_: ["env", f"HOME={tmp_path / host.name}", "bash", "-c"])
        hosts.copy(C, 100)
        assert hosts.collect()[0].endswith(f"from host {C}")
        assert hosts.updates() == [100]
        for host in (HEAD, B, C):
            hosts.copy(host, 200)
        newest = f"collected update-00000200 (generation 1) of {hosts.run_dir} from host {HEAD}"
        assert hosts.collect()[0].startswith(newest)
        assert hosts.updates() == [200]


@pytest.mark.parametrize(("own", "collected"), [((1, 100), False), ((2, 20), False), ((1, 99), True)])
def test_the_head_keeps_what_is_as_new(hosts: Hosts, own: Tuple[int, int], collected: bool) -> None:
    hosts.copy(B, 100)
    hosts.on_head(own[1], own[0])
    lines = hosts.collect()
    assert (bool(lines), hosts.updates()) == (collected, [100] if collected else [own[1]])
    if collected:
        assert lines[0].endswith(f"from host {B}; the older state is in {hosts.run_dir}.before-1")
        assert (hosts.run_dir.parent / "digits.before-1" / "checkpoints" / "update-00000099").is_dir()


def test_a_checkpoint_of_the_head_that_is_damaged_does_not_count(hosts: Hosts) -> None:
    hosts.copy(B, 100)
    hosts.on_head(110)
    (hosts.run_dir / "checkpoints" / "update-00000110" / "weights.safetensors").write_text("")
    assert hosts.collect()[0].startswith("collected update-00000100")


def make_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def name_outside(path: Path) -> None:
    index = json.loads(path.read_text())
    index["files"]["../../stolen"] = {"size_bytes": 1, "sha256": ""}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (WEIGHTS, lambda path: path.write_text("weights 1?0"), f"the SHA-256 of {WEIGHTS} does not match run.json"),
        (WEIGHTS, lambda path: path.write_text("weights 10"), f"{WEIGHTS} has 10 bytes, expected 11"),
        (WEIGHTS, Path.unlink, f"{WEIGHTS} is missing"),
        (WEIGHTS, make_link, f"{WEIGHTS} is no file"),
        ("run.json", lambda path: path.write_text("{"), "run.json cannot be read, or is of another format than 1"),
        ("run.json", name_outside, "run.json names a file outside of the copy: ../../stolen"),
    ],
)
def test_a_damaged_copy_is_named_and_the_next_one_is_taken(hosts: Any, name: str, damage: Any, message: str) -> None:
    hosts.copy(C, 90)
    bad = hosts.copy(B, 100)
    damage(bad / name)
    warning, collected, _ = hosts.collect()
    assert warning.startswith("warning: ")
    assert f"host {B}: " in warning
    assert warning.endswith(f"{bad}/{message}")
    assert collected.startswith("collected update-00000090")
    assert hosts.updates() == [90]
    assert [path.name for path in hosts.run_dir.parent.iterdir()] == ["digits"]


def test_the_folder_of_another_run_is_not_touched(hosts: Hosts) -> None:
    copy = hosts.copy(B, 100)
    hosts.on_head(10, run_id="another-34")
    assert hosts.collect() == [
        f"warning: {hosts.run_dir} on the head is not the run digits-12, whose update-00000100 (generation 1) is on "
        f"host {B} in {copy}"
    ]
    assert hosts.updates() == [10]


def test_of_two_runs_that_have_had_the_same_folder_the_last_one_is_collected(hosts: Hosts) -> None:
    hosts.copy(B, 300, run_id="older-34", written=1.0)
    hosts.copy(B, 100, written=2.0)
    hosts.copy(C, 90, written=1.5)
    (collected, _) = hosts.collect()
    assert collected.startswith("collected update-00000100")
    assert hosts.collect() == []
    assert [path.name for path in hosts.run_dir.parent.iterdir()] == ["digits"]


def test_a_complete_run_is_only_named_and_once(hosts: Hosts) -> None:
    copy = hosts.copy(B, 100)
    (copy.parent / "ended").write_text(copy.name)
    assert hosts.collect() == [
        f"the run {hosts.run_dir} is complete and not on the head; its update-00000100 (generation 1) is on host {B} "
        f"in {copy}"
    ]
    assert not hosts.run_dir.exists()
    assert hosts.collect() == []  # it was named
    hosts.on_head(100)
    assert hosts.collect() == []


def test_a_head_that_cannot_write_the_folder_is_a_warning(hosts: Hosts) -> None:
    hosts.copy(B, 100)
    hosts.run_dir.parent.parent.mkdir()
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
    archive, new = packed(copy), tmp_path / "new"
    settings = {"run_dir": str(new), "index": json.loads((copy / "run.json").read_text())}
    for size in (0, 100, 700, 2000):
        hosts.send(archive[:size])
        assert host_copies.main("install", settings)["damaged"]
        assert not new.exists()
        assert not (tmp_path / "new.partial").exists()
    hosts.send(archive)
    assert host_copies.main("install", settings)["installed"]
