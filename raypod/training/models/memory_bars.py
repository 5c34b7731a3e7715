"""The estimated memory of each IPU of a replica as bars, and as JSON data."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

_WIDTH = 40  # characters of a bar, which stand for the memory of an IPU
_PARTS = (
    ("weights", "w"),
    ("gradients", "g"),
    ("optimizer", "o"),
    ("activations", "a"),
    ("code", "c"),
)


def describe_memory(ipus: Sequence[Any]) -> Dict[str, Any]:
    """Return the emulated SDK's estimate for each IPU as JSON data."""
    described = [{**each._asdict(), "total": each.total, "share": round(each.share, 4)} for each in ipus]
    return {"is_estimate": True, "bytes_per_ipu": ipus[0].available, "ipus": described}


def render_memory(ipus: Sequence[Any]) -> str:
    """Return a bar for each IPU; the bar of an IPU whose memory does not suffice ends with `!`."""
    legend = ", ".join(f"{letter} {name}" for name, letter in _PARTS)
    title = f"an estimate for Mk2 IPUs with {ipus[0].available / 1e6:.0f} MB, per replica"
    lines = [f"{'memory':>12}  {title}", f"{'':>12}  ({legend} and exchange)"]
    return "\n".join([*lines, *map(_line, ipus)])


def _line(ipu: Any) -> str:
    parts = ", ".join(f"{letter} {getattr(ipu, name) / 1e6:.1f}" for name, letter in _PARTS)
    note = ": DOES NOT FIT" if ipu.share > 1 else ": nearly full" if ipu.is_nearly_full else ""
    return f"{f'IPU {ipu.ipu}':>12}  [{_bar(ipu)}] {100 * ipu.share:3.0f} % ({parts} MB){note}"


def _bar(ipu: Any) -> str:
    text: List[str] = []
    used = 0
    for name, letter in _PARTS:
        used += getattr(ipu, name)
        text += [letter] * (round(_WIDTH * used / ipu.available) - len(text))
    if ipu.share > 1:  # also if the bar is longer by less than a character
        return "".join(text[: _WIDTH - 1]) + "!"
    return "".join(text).ljust(_WIDTH, ".")
