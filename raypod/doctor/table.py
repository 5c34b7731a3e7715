"""Findings for the eye: one line each; what is the same on many hosts is said once."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from raypod.doctor.finding import OK, TROUBLE, WARN, Finding

_WHAT_WIDTH = 15


def render(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    """The table, and a last line that counts."""
    together: Dict[Tuple[str, str, str, str], List[str]] = {}
    for finding in findings:
        together.setdefault((finding.level, finding.what, finding.text, finding.way_out), []).append(finding.host)
    rows = [(key, _told(names, hosts)) for key, names in together.items()]
    width = max([4, *(len(told) for _, told in rows)])
    lines = [f"{'':<8} {'what':<{_WHAT_WIDTH}} {'host':<{width}} finding"]
    for (level, what, text, way_out), told in rows:
        shown = text if not way_out else f"{text}; {way_out}"
        lines.append(f"{level:<8} {what:<{_WHAT_WIDTH}} {told:<{width}} {shown}")
    return "\n".join([*lines, "", summary(findings, len(hosts))])


def summary(findings: Sequence[Finding], hosts: int) -> str:
    """How many of each level."""
    counts = {level: sum(finding.level == level for finding in findings) for level in (OK, WARN, TROUBLE)}
    verdict = "not ready" if counts[TROUBLE] else "ready"
    told = f"{hosts} host{'s' if hosts != 1 else ''}"
    return f"{verdict}: {told}, {counts[OK]} ok, {counts[WARN]} to know, {counts[TROUBLE]} in the way of a run"


def _told(names: Sequence[str], hosts: Sequence[str]) -> str:
    if names == [""]:
        return "pod"
    if len(hosts) > 1 and len(names) == len(hosts):
        return f"all {len(hosts)}"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
