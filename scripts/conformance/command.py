"""How the conformance scripts begin and end as commands."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Callable, NoReturn


def refuse(message: str) -> int:
    """Print why the arguments cannot be used; return the exit code."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return 2


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with its result; at SIGTERM exit in order, so that temporary folders are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
