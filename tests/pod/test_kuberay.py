"""`cluster/kuberay.yaml` and `cluster/kuberay-job.yaml`: valid for KubeRay, and what their commands do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import jsonschema
import pytest
import yaml

from raypod.plan import flags, resolve
from raypod.runs import run_state
from raypod.system.command_line import FlagParser
from tests.support import ROOT
from tests.support.bounded import COMMAND_S, wait_until

SCHEMA = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())  # see its "$comment"


def manifest(name: str) -> Dict[str, Any]:
    loaded: Dict[str, Any] = yaml.safe_load((ROOT / "cluster" / f"{name}.yaml").read_text())
    return loaded


def mistakes(document: Dict[str, Any]) -> List[str]:
    schema = {"$ref": f"#/{document['kind']}", **SCHEMA}
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


def cluster_of(name: str) -> Any:
    spec = manifest(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def pods(name: str) -> List[Dict[str, Any]]:
    spec = cluster_of(name)
    return [group["template"]["spec"] for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]]


@pytest.mark.parametrize(("name", "kind"), [("kuberay", "RayCluster"), ("kuberay-job", "RayJob")])
def test_kuberay_accepts_the_manifest(name: str, kind: str) -> None:
    document = manifest(name)
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
    assert mistakes(document) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec["headGroupSpec"].update(rayStartParam={}),
        lambda spec: spec["headGroupSpec"].pop("template"),
        lambda spec: spec["workerGroupSpecs"][0].update(replicas="three"),
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["env"][0].update(valu="1"),
    ],
    ids=["unknown", "missing", "wrong type", "wrong below"],
)
def test_a_wrong_manifest_is_found(spoil: Callable[[Dict[str, Any]], Any]) -> None:
    document = manifest("kuberay")
    spoil(document["spec"])
    assert mistakes(document)


def test_the_job_fits_its_cluster_which_is_that_of_the_manifest() -> None:
    assert cluster_of("kuberay-job") == cluster_of("kuberay")
    words = shlex.split(manifest("kuberay-job")["spec"]["entrypoint"])
    middle = words.index("&&")
    prepare, training = words[:middle], words[middle + 1 :]
    hosts = 1 + sum(group["replicas"] for group in cluster_of("kuberay-job")["workerGroupSpecs"])
    assert prepare[:6] == ["python", "-m", "raypod", "cluster-file", "--hosts", str(hosts)]
    assert training[:4] == ["exec", "python", "-m", "raypod.train"]
    parser = FlagParser()
    flags.add_flags(parser)
    values, _ = resolve.merge(parser.parse_args(training[4:]))
    config = resolve.from_values(values, "the entrypoint")
    assert config.pod.cluster == prepare[prepare.index("--output") + 1]
    assert config.run.preemption_grace_s is not None
    for pod in pods("kuberay-job"):
        assert config.run.preemption_grace_s < pod["terminationGracePeriodSeconds"]
        (container,) = pod["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert config.run.run_dir == variables["RAYPOD_RUN_DIR"]
        assert any(config.run.run_dir.startswith(each["mountPath"]) for each in container["volumeMounts"])


def hooks() -> List[str]:
    return [pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] for pod in pods("kuberay")]


def test_the_hook_of_the_head_preempts_the_training_and_waits_for_its_end(processes: None, tmp_path: Path) -> None:
    for hook in hooks():
        assert subprocess.run(["bash", "-n", "-c", hook], timeout=60, check=False).returncode == 0
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {"python": f'exec {sys.executable} "$@"', "ray": 'cp run/state.json "ended-before-ray-$1"'}
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    run_dir = tmp_path / "run"
    paths = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    variables = {**os.environ, **paths, "RAYPOD_RUN_DIR": str(run_dir)}
    flags = ["--device", "emulated", "--fleet", "inline", "--num-instances", "1", "--epochs", "400", "--model", "tiny"]
    line = [sys.executable, "-m", "raypod.train", *flags, "--preemption-grace-s", "60", "--run-dir", str(run_dir)]
    with (tmp_path / "out").open("w+") as out:
        training = subprocess.Popen(line, cwd=tmp_path, env=variables, stdout=out, stderr=out)
        try:
            metrics = run_dir / "metrics.jsonl"
            assert wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, COMMAND_S)
            hook = ["bash", "-c", hooks()[0]]
            subprocess.run(hook, cwd=tmp_path, env=variables, stdout=out, timeout=COMMAND_S, check=True)
            assert training.wait(COMMAND_S) == 130
        finally:
            training.kill()
            training.wait()
    (tmp_path / "ended-before-ray-stop").rename(tmp_path / "state.json")
    state = run_state.read(tmp_path)
    assert (state.state, state.has_ended) == (run_state.PREEMPTED, True)
