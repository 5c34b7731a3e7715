"""Reduce KubeRay's CRDs to the schema that the tests of `cluster/kuberay*.yaml` need.

    python scripts/kuberay_schema.py KUBERAY_FOLDER > tests/pod/kuberay_schema.json

KUBERAY_FOLDER is a clone of https://github.com/ray-project/kuberay, which is licensed under Apache-2.0. The CRDs have
30,000 lines. The result has every field next to one that a manifest uses, with its type, and what is below those that
are used; the cluster of a RayJob refers to RayCluster. Unknown fields are errors, as for `kubectl apply`, whose default
is `--validate=strict`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import yaml

CLUSTER = Path(__file__).resolve().parent.parent / "cluster"
MANIFESTS = sorted(CLUSTER.glob("kuberay*.yaml"))
VERSION = "v1"  # of the API ray.io
_SPEC = "#/RayCluster/properties/spec"
_CRDS = "helm-chart/kuberay-operator/crds/ray.io_{}s.yaml"
_KEPT = ("type", "enum", "format", "minimum", "maximum", "pattern", "required", "anyOf", "maxItems", "minItems")


def documents(path: Path) -> List[Dict[str, Any]]:
    """Return the objects of a manifest."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def schema_of(kuberay: Path, kind: str, version: str) -> Dict[str, Any]:
    """Return the schema of a kind from its CRD."""
    crd = yaml.safe_load((kuberay / _CRDS.format(kind.lower())).read_text())
    (found,) = [each for each in crd["spec"]["versions"] if each["name"] == version]
    schema: Dict[str, Any] = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return schema


def reduced(schema: Dict[str, Any], values: List[Any]) -> Dict[str, Any]:
    """Return a schema in which only the fields that `values` use have a schema below them."""
    kept = {key: schema[key] for key in _KEPT if key in schema}
    objects = [each for each in values if isinstance(each, dict)]
    if "properties" in schema:
        kept["properties"] = {}
        for name, field in schema["properties"].items():
            used = [each[name] for each in objects if name in each]
            kept["properties"][name] = (
                reduced(field, used) if used else {key: field[key] for key in ("type",) if key in field}
            )
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        kept["additionalProperties"] = reduced(extra, [value for each in objects for value in each.values()])
    if "items" in schema:
        kept["items"] = reduced(schema["items"], [item for each in values if isinstance(each, list) for item in each])
    return kept


def main() -> int:
    """Print the schemas of the kinds in the manifests."""
    kuberay = Path(sys.argv[1])
    commit = ["git", "-C", str(kuberay), "rev-parse", "HEAD"]
    revision = subprocess.run(commit, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    by_kind: Dict[str, List[Any]] = {}
    for each in (document for path in MANIFESTS for document in documents(path)):
        if each["apiVersion"].startswith("ray.io/"):
            by_kind.setdefault(each["kind"], []).append(each)
    note = (
        f"Derived by scripts/kuberay_schema.py from {_CRDS.format('ray*')} of https://github.com/ray-project/kuberay, "
        f"commit {revision}. Copyright The KubeRay Authors, licensed under the Apache License, Version 2.0 "
        "(https://www.apache.org/licenses/LICENSE-2.0). Changed: descriptions and unused fields are left out."
    )
    by_kind["RayCluster"] += [{"spec": each["spec"]["rayClusterSpec"]} for each in by_kind["RayJob"]]
    schemas = {kind: reduced(schema_of(kuberay, kind, VERSION), used) for kind, used in sorted(by_kind.items())}
    schemas["RayJob"]["properties"]["spec"]["properties"]["rayClusterSpec"] = {"$ref": _SPEC}
    lines = [f"{json.dumps(key)}: {json.dumps(each, sort_keys=True)}" for key, each in schemas.items()]
    print("{\n" + ",\n".join([f'"$comment": {json.dumps(note)}', *lines]) + "\n}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
