"""Tests of pod/autoscaler_hosts with the node provider of Ray's autoscaler."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.pod import autoscaler_hosts
from raypod.pod.autoscaler_hosts import ADD, AGAIN, KEEP, change

HEAD, FIRST, SECOND, THIRD = (f"10.0.0.1{last}" for last in range(1, 5))
TAGS = {"ray-node-type": "worker", "ray-node-status": "uninitialized"}  # of a worker that the autoscaler will start


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the import of the provider sets
    return tmp_path / "ray" / "cluster-pod.state"


@pytest.fixture
def provider(processes: None, state: Path) -> Any:  # the import of Ray 2.10 starts a process
    from ray.autoscaler._private.local import node_provider

    made = node_provider.LocalNodeProvider({"head_ip": HEAD, "worker_ips": [FIRST]}, "pod")
    node_provider.record_local_head_state_if_needed(made)
    made.create_node({}, dict(TAGS), 1)
    made.set_node_tags(FIRST, {"ray-node-status": "up-to-date"})
    return made


def workers(provider: Any) -> List[str]:
    return list(provider.non_terminated_nodes({"ray-node-type": "worker"}))


def entries(state: Path) -> Dict[str, Any]:
    return dict(json.loads(state.read_text()))


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_a_running_autoscaler_starts_a_host_that_was_added_to_the_file(provider: Any, state: Path) -> None:
    provider.create_node({}, dict(TAGS), 1)  # what it does for a file with one more worker
    assert workers(provider) == [FIRST]
    before = entries(state)
    assert change(state, KEEP, [FIRST, SECOND]) == {"failed": []}
    assert change(state, ADD, [FIRST, SECOND]) == {"failed": []}
    assert workers(provider) == [FIRST]
    provider.create_node({}, dict(TAGS), 1)
    assert workers(provider) == [FIRST, SECOND]
    assert {name: entries(state)[name] for name in before} == before  # the others are not started again
    assert sorted(path.name for path in state.parent.iterdir()) == ["cluster-pod.lock", "cluster-pod.state"]


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_a_host_replaced_in_the_file_is_forgotten_before_its_number_changes(provider: Any, state: Path) -> None:
    change(state, KEEP, [SECOND])
    assert workers(provider) == []
    provider.create_node({}, dict(TAGS), 1)  # nothing yet
    change(state, ADD, [SECOND])
    provider.create_node({}, dict(TAGS), 1)
    assert workers(provider) == [SECOND]
    assert provider.node_tags(HEAD)["ray-node-type"] == "head"


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_a_host_whose_start_has_failed_is_started_again(provider: Any, state: Path) -> None:
    """Under a name that the autoscaler has not seen: it starts each name once."""
    change(state, ADD, [FIRST, SECOND, THIRD])
    provider.create_node({}, dict(TAGS), 2)
    provider.set_node_tags(THIRD, {"ray-node-status": "setting-up"})
    seen = {FIRST, SECOND, THIRD}
    for _ in range(3):
        assert change(state, KEEP, [FIRST, SECOND, THIRD]) == {"failed": [SECOND]}
        change(state, AGAIN, [SECOND])
        provider.create_node({}, dict(TAGS), 1)
        change(state, ADD, [FIRST, SECOND, THIRD])
        (again,) = set(workers(provider)) - seen
        assert (provider.internal_ip(again), len(workers(provider))) == (SECOND, 3)
        seen.add(again)
    provider.set_node_tags(again, {"ray-node-status": "up-to-date"})
    change(state, AGAIN, [SECOND])  # it was started in the meantime
    assert again in workers(provider)


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_an_autoscaler_that_blocks_itself_is_named(provider: Any, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_hosts, "_LOCK_S", 0.2)
    with provider.state.file_lock, pytest.raises(TimeoutError, match="held the lock .*filelock<3.11"):
        change(state, ADD, [FIRST, SECOND])


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_without_an_autoscaler_nothing_is_written(state: Path) -> None:
    assert change(state, ADD, [FIRST]) == {"failed": []}
    assert not state.parent.exists()


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user_is_not_used(provider: Any, state: Path) -> None:
    os.chown(str(state.parent), 7, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        change(state, ADD, [FIRST])
