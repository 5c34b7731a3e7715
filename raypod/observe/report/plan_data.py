"""The plan of a run as the report draws it: hosts, instances, replicas, IPUs and pipeline stages."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from raypod.plan.stages import ipus_of
from raypod.training.models.schedule import StageCost, compare_strategies

_MAX_CYCLES = 64  # of the schedule that is drawn


def plan_data(plan: Mapping[str, Any], config: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Return what is drawn of the content of `plan.json`; None if it is no plan.

    Args:
        plan: the content of `plan.json`.
        config: the settings by their full names, as in `training.execution`.
    """
    geometry, cluster = plan.get("geometry"), plan.get("cluster")
    if not isinstance(geometry, dict) or not isinstance(cluster, dict) or not isinstance(plan.get("instances"), list):
        return None
    return {
        "cluster": cluster.get("name"),
        "hosts": [host.get("name") for host in cluster.get("hosts") or ()],
        "geometry": geometry,
        "dataset": plan.get("dataset"),
        "updates_per_epoch": plan.get("updates_per_epoch"),
        "total_updates": plan.get("total_updates"),
        "legs": len(plan.get("legs") or ()),
        "instances": [
            {name: each.get(name) for name in ("index", "host", "replica_offset", "local_replicas", "link_domain")}
            for each in plan["instances"]
        ],
        "pipeline": _pipeline(plan, geometry, config),
    }


def _pipeline(
    plan: Mapping[str, Any], geometry: Mapping[str, Any], config: Mapping[str, Any]
) -> Optional[Dict[str, Any]]:
    """Return the stages of a replica and the schedule of one update; None for a replica on one IPU."""
    num_ipus, accumulation = geometry.get("ipus_per_replica"), geometry.get("gradient_accumulation")
    if not isinstance(num_ipus, int) or not isinstance(accumulation, int) or num_ipus < 2:
        return None
    splits: List[str] = [str(each) for each in plan.get("pipeline_splits") or ()]
    try:
        ipus = ipus_of(splits) if splits else tuple(range(num_ipus))
    except ValueError:  # of a later version
        return None
    names = (
        ["the input", *(each.partition("=")[0] for each in splits)]
        if splits
        else ["the blocks of the model"] * num_ipus
    )
    execution = str(config.get("training.execution") or "pipelined")
    schedules = compare_strategies([StageCost(1.0, 2.0, 1.0, ipu) for ipu in ipus], accumulation)
    schedule = schedules.get(execution)
    found: Dict[str, Any] = {"execution": execution, "stages": names, "ipus": list(ipus), "accumulation": accumulation}
    found["cycles"] = None
    if schedule is not None:
        found["cycles"] = schedule.cycles
        found["sections"] = list(schedule.sections[:_MAX_CYCLES])
        found["cells"] = [
            [cell.cycle, cell.stage, cell.what, cell.micro_batch]
            for cell in schedule.cells
            if cell.cycle < _MAX_CYCLES and cell.what != "idle"
        ]
    return found
