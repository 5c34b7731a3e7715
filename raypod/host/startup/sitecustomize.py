"""The former path of `raypod/system/startup`, which existing scripts have on their `PYTHONPATH`."""

import runpy
import sys
from pathlib import Path

_former = Path(__file__).resolve().parent
_startup = _former.parent.parent / "system" / "startup"
sys.path[:] = [str(_startup) if Path(entry or ".").resolve() == _former else entry for entry in sys.path]
runpy.run_path(str(_startup / "sitecustomize.py"), run_name=__name__)
