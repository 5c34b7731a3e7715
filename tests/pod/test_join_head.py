"""`up --no-restart` of another operator joins the running head: Ray's launcher does not start it again."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Optional

import pytest
import yaml

from raypod.errors import ClusterError
from raypod.plan import cluster_file
from raypod.plan.cluster import Host, Ssh, cluster_from
from raypod.pod import join_head, stop_runs
from raypod.runtime import ssh
from tests.support import ROOT

SHIPPED = ROOT / "cluster" / "emulated-pod.yaml"
HEAD = "10.0.0.11"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file of a cluster with an ssh key, parsed, its cluster and its path; the home folder is temporary."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    path, key = tmp_path / "pod.yaml", tmp_path / "key"
    key.write_text("a key")
    path.write_text(SHIPPED.read_text().replace("~/.ssh/id_ed25519", str(key)))
    file = cluster_file.parse(path.read_text())
    return SimpleNamespace(file=file, cluster=cluster_from(file, str(path)), path=str(path))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("before", [None, "{", '{"10.0.0.11": {"tags": {"ray-node-type": "head"}, "state": "gone"}}'])
def test_rays_launcher_starts_a_head_that_runs_not_again(
    processes: None, pod: Any, is_noted: bool, before: Optional[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the next line sets
    from ray.autoscaler._private import commands, providers
    from ray.autoscaler._private.local.node_provider import LocalNodeProvider

    started: List[List[str]] = []

    class Updater:
        exitcode = 0

        def __init__(self, ray_start_commands: List[str], **_: Any) -> None:
            started.append(ray_start_commands)

        def start(self) -> None: ...

        def join(self) -> None: ...

    def create_node(provider: Any, *arguments: Any) -> None:
        created.append(arguments)
        create(provider, *arguments)

    create, created = LocalNodeProvider.create_node, []  # type: Any, List[Any]
    monkeypatch.setattr(LocalNodeProvider, "create_node", create_node)
    monkeypatch.setattr(commands, "NodeUpdaterThread", Updater)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_UP_enable_autoscaler_v2", "0")
    (tmp_path / "ray").mkdir()
    if before is not None and (is_noted or before != "{"):
        (tmp_path / "ray" / "cluster-emulated-pod.state").write_text(before)
    if is_noted:
        join_head.note_running_head(pod.cluster, pod.path, tmp_path / "ray")
    providers._clear_provider_cache()
    given = {**yaml.safe_load(Path(pod.path).read_text()), "file_mounts": {}}
    config = commands._bootstrap_config(given, no_config_cache=True)
    commands.get_or_create_head_node(config, pod.path, True, False, True, None, no_monitor_on_head=True)
    assert not is_noted or started == [[]]
    assert (created == []) is is_noted


@pytest.mark.parametrize(
    ("own", "of_head", "expected", "error"),
    [
        (None, "secret\n", "secret\n", ""),
        ("secret", "secret\n", "secret", ""),
        (
            "other",
            "secret",
            "other",
            f"is not the token with which emulated-pod runs.*copy {HEAD}:~/.ray/auth_token to",
        ),
        (None, None, None, ""),
    ],
)
def test_the_token_of_the_head_is_not_replaced(
    pod: Any,
    own: Optional[str],
    of_head: Optional[str],
    expected: Optional[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, said = tmp_path / ".ray" / "auth_token", []  # type: Path, List[str]
    if own is not None:
        path.parent.mkdir()
        path.write_text(own)
    answer = ssh.Result(0, "Welcome\n" + json.dumps({"token": of_head}), "")
    monkeypatch.setattr(ssh, "run_on", lambda *_: answer)
    if error:
        with pytest.raises(ClusterError, match=error):
            join_head.take_token(pod.cluster, pod.file, said.append)
    else:
        join_head.take_token(pod.cluster, pod.file, said.append)
    assert (path.read_text() if path.exists() else None) == expected
    if said:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert bool(said) == (own is None and of_head is not None)


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        ({"drivers": [], "error": "", "runs": False}, False),
        ({"drivers": [], "error": "", "runs": True}, True),
        ({}, True),
    ],
)
def test_a_head_whose_answer_is_unknown_counts_as_running(pod: Any, answer: Any, runs: bool, monkeypatch: Any) -> None:
    def run_on(host: Host, _: Ssh, words: List[str], *__: Any) -> ssh.Result:
        return ssh.Result(0 if answer else 255, json.dumps(answer), "no answer")

    monkeypatch.setattr(ssh, "run_on", run_on)
    assert stop_runs.is_running(pod.cluster, pod.file) is runs
