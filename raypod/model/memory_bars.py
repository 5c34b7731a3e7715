"""The estimated memory of each IPU of a replica as bars, and as JSON data."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

_WIDTH = 40  # characters of a bar, which stand for the memory of an IPU
_PARTS = (
    ("weights", "w"),
    ("gradients", "g"),
    ("optimizer", "o"),
    ("activations", "a"),
    ("code", "c"),
)


class MemoryEstimate(NamedTuple):
    """The memory of an IPU, and the emulated SDK's estimates of what is used of it."""

    bytes_per_ipu: int
    ipus: Tuple[Any, ...]


def describe_memory(memory: MemoryEstimate) -> Dict[str, Any]:
    """Return the estimate as JSON data."""
    ipus = [{**each._asdict(), "total": each.total, "share": round(each.share, 4)} for each in memory.ipus]
    return {"is_estimate": True, "bytes_per_ipu": memory.bytes_per_ipu, "ipus": ipus}


def render_memory(memory: MemoryEstimate) -> str:
    """Return a bar for each IPU; a bar that is longer than the memory ends with `!`."""
    legend = ", ".join(f"{letter} {name}" for name, letter in _PARTS)
    title = f"an estimate for Mk2 IPUs with {memory.bytes_per_ipu / 1e6:.0f} MB, per replica"
    lines = [f"{'memory':>12}  {title}", f"{'':>12}  ({legend} and exchange)"]
    return "\n".join([*lines, *(_line(each, memory.bytes_per_ipu) for each in memory.ipus)])


def _line(ipu: Any, available: int) -> str:
    sizes = [(letter, getattr(ipu, name)) for name, letter in _PARTS]
    parts = ", ".join(f"{letter} {size / 1e6:.1f}" for letter, size in sizes)
    note = ": DOES NOT FIT" if ipu.share > 1 else ": nearly full" if ipu.share > 0.85 else ""
    return f"{f'IPU {ipu.ipu}':>12}  [{_bar(sizes, available)}] {100 * ipu.share:3.0f} % ({parts} MB){note}"


def _bar(sizes: Sequence[Tuple[str, int]], available: int) -> str:
    text: List[str] = []
    used = 0
    for letter, size in sizes:
        used += size
        text += [letter] * (round(_WIDTH * used / available) - len(text))
    if len(text) > _WIDTH:
        return "".join(text[: _WIDTH - 1]) + "!"
    return "".join(text).ljust(_WIDTH, ".")
