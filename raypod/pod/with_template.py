"""Start Ray so that its workers are forked from a template: `python with_template.py ray start OPTION...`.

The start commands of the cluster files run it with the interpreter of `ray`. A worker of this host then begins with
torch and the SDK imported. The template is started with Ray's processes and ends with the raylet.
"""

from __future__ import annotations

import importlib
import runpy
import shutil
import sys
from typing import List

from raypod.runtime.workers.ray_template import Template


def run(words: List[str]) -> None:
    """Run a command of Ray in this process; a raylet that it starts uses a template.

    Raises:
        FileNotFoundError: the first word is no program.
    """
    program = shutil.which(words[0])
    if program is None:
        raise FileNotFoundError(f"{words[0]} is not in PATH")
    sys.argv = [program, *words[1:]]
    template = Template()
    with template.used_by(importlib.import_module("ray._private.services")):
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
