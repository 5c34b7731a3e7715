"""The former path of `raypod/system/private.py`, which start commands in existing cluster files name."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent.parent / "system" / "private.py"), run_name=__name__)
