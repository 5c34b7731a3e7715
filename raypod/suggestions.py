"""What somebody may have meant who wrote a name that is not known."""

from __future__ import annotations

import difflib
from typing import Iterable


def nearest(word: str, known_names: Iterable[str]) -> str:
    """The end of a complaint about `word`, a name or section.key: the one that was meant, else all that are known."""
    known = list(known_names)
    section, _, key = word.partition(".")
    found = [name for name in known if key and name.partition(".")[2] == key]  # the right key in the wrong section
    if key:
        known = [name for name in known if name.startswith(f"{section}.")]
        keys = difflib.get_close_matches(key, [name.partition(".")[2] for name in known], n=1, cutoff=0.5)
        found = found or [f"{section}.{each}" for each in keys]
    else:
        found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else f"; known: {', '.join(sorted(known))}"
