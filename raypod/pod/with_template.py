"""Start Ray so that its workers are forked from a template: `python with_template.py ray start OPTION...`.

The start commands of the cluster files run it with the interpreter of `ray`. A worker of this host then begins with
torch and the SDK imported. The template is started with Ray's processes and ends with the raylet.
"""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import sys
from pathlib import Path
from typing import List

from raypod.errors import ConfigError
from raypod.runtime.workers.ray_template import Template
from raypod.system.command_line import report_errors


def run(words: List[str]) -> int:
    """Run a command of Ray in this process, and return 0; a raylet that it starts uses a template.

    Raises:
        ConfigError: the first word is no Python program, or this interpreter has no Ray.
        SystemExit: as the program ends.
    """
    if not words:
        raise ConfigError("with_template.py: the command is missing: python with_template.py ray start OPTION...")
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"with_template.py {words[0]}: no such program in PATH; name ray, or its path")
    try:
        compile(Path(program).read_bytes(), program, "exec")
    except (SyntaxError, ValueError):
        raise ConfigError(f"with_template.py {program}: this is no Python program, as ray is one") from None
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"with_template.py: run it with the Python of {program}: {sys.executable} has no Ray")
    sys.argv = [program, *words[1:]]
    template = Template()
    with template.used_by(importlib.import_module("ray._private.services")):
        runpy.run_path(program, run_name="__main__")
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(report_errors(lambda: run(words)))
