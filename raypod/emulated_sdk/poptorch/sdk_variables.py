"""The environment variables of the Poplar SDK: their effect here, or one warning that names those without.

The table is also in docs/reference/emulated-sdk.md.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Mapping, Set

from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.options import Options

_ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"
PREFIXES = ("GCDA_", "IPUOF_", "POPART_", "POPLAR_", "POPLIBS_", "POPTORCH_", "PVTI_", "TF_POPLAR_")

EFFECTS = {
    "POPTORCH_CACHE_DIR": "stored in the options, as by enableExecutableCaching; nothing is written",
    "POPTORCH_DEFAULT_OPTIONS": "called as setters of each Options",
    "POPTORCH_LOG_LEVEL": "the level of the log",
    "PVTI_OPTIONS": "spans as Trace Event JSON",
}
# Without effect, by name or prefix: why.
NO_EFFECT = {
    _ENGINE_OPTIONS: "there is no Poplar engine",
    "POPLAR_TARGET_OPTIONS": "there are no IPUs",
    "POPLAR_": "there is no Poplar",
    "POPART_": "there is no PopART",
    "POPLIBS_": "there are no Poplar libraries",
    "POPTORCH_EXPORT_PROTO_AS_BINARY": "no graph is written",
    "POPTORCH_EXPORT_PROTO_FILE": "no graph is written",
    "POPTORCH_IPU_MODEL": "every model runs on the CPU",
    "POPTORCH_IPU_MODEL_VERSION": "every model runs on the CPU",
    "POPTORCH_LOG_DEST": "the log goes to stderr",
    "POPTORCH_MAX_GRAPH_LEN": "no graph is logged",
    "POPTORCH_SMALL_IPU_MODEL": "every model runs on the CPU",
    "POPTORCH_WAIT_FOR_IPU": "there are no IPUs to wait for",
    "POPTORCH_": "PopTorch 3.4 does not have it",
    "GCDA_": "there are no IPUs to monitor",
    "IPUOF_": "there are no IPUs",
    "PVTI_": "there is no PVTI library",
    "TF_POPLAR_": "TensorFlow is not emulated",
}
# Set by the SDK's own scripts, and by poprun for each instance.
_OF_THE_SDK = frozenset(("POPLAR_SDK_ENABLED", "POPLAR_DIR", "POPART_DIR", "POPLAR_LIB"))
_OF_POPRUN = ("IPUOF_VIPU_API_", "IPUOF_LOG_LEVEL", "POPLAR_TARGET_OPTIONS")
_REPORT = "autoReport."

_warned: Set[str] = set()


def warn_once(options: Options) -> None:
    """Warn in the first process of each variable that is set and has no effect, and of a report that is not written.

    Raises:
        Error: POPLAR_ENGINE_OPTIONS is not a JSON object.
    """
    found = dict(_without_effect(os.environ))
    report = _report(_all_engine_options(options))
    if report and _ENGINE_OPTIONS in found:
        found[_ENGINE_OPTIONS] = report
    elif report:
        found["enableProfiling"] = report
    new = {name: reason for name, reason in found.items() if name not in _warned}
    _warned.update(new)
    if new and options.Distributed.processId == 0:
        logger.warning(
            "The emulated SDK ignores: %s.", "; ".join(f"{name} ({reason})" for name, reason in sorted(new.items()))
        )


def host_sync_timeout_s(options: Options) -> float:
    """Return the seconds after which an IPU ends a call: `target.hostSyncTimeout` of the engine options, else 300."""
    return float(_all_engine_options(options).get("target.hostSyncTimeout", 300))


def _all_engine_options(options: Options) -> Dict[str, Any]:
    return {**(options._Popart.options.get("engineOptions") or {}), **_engine_options(os.environ)}


def _without_effect(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables of the SDK that are set and have no effect, each with the reason."""
    is_launched = "POPDIST_NUM_TOTAL_REPLICAS" in environment
    ignored = {name for name in environment if is_launched and name.startswith(_OF_POPRUN)}
    names = [name for name in environment if name.startswith(PREFIXES) and environment[name]]
    return {name: _reason(name) for name in names if name not in {*EFFECTS, *_OF_THE_SDK, *ignored}}


def _reason(name: str) -> str:
    prefixes: List[str] = sorted(filter(name.startswith, NO_EFFECT), key=len)
    return NO_EFFECT[name] if name in NO_EFFECT else NO_EFFECT[prefixes[0]]


def _engine_options(environment: Mapping[str, str]) -> Dict[str, Any]:
    text = environment.get(_ENGINE_OPTIONS, "")
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise Error(f"{_ENGINE_OPTIONS}={text!r} is not JSON ({error})") from None
    if not isinstance(options, dict):
        raise Error(f'{_ENGINE_OPTIONS}={text!r} is not a JSON object, as {{"autoReport.all": "true"}} is')
    return options


def _report(engine: Mapping[str, Any]) -> str:
    """Return which report of PopVision these engine options request; empty if they request none."""
    requested = [name for name in engine if name.startswith(_REPORT) and str(engine[name]).lower() == "true"]
    directory = engine.get(f"{_REPORT}directory", ".")
    return f"no profile.pop for PopVision is written in {directory}" if requested else ""
