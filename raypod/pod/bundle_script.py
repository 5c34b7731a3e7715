"""`install.sh` of a bundle (`raypod bundle`). `@PYTHON@` stands for the version of the hosts' Python."""

from __future__ import annotations

INSTALL = """#!/bin/sh
# Install the wheels of this folder: sh install.sh VENV [PYTHON]. pip compares their hashes with requirements.txt, and
# uses no package index.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: sh install.sh VENV [PYTHON]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
python=${2:-python@PYTHON@}
if [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
elif ! command -v "$python" >/dev/null; then
    python=python3
fi
if ! "$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")'; then
    echo "install.sh: this bundle is for Python @PYTHON@, and $python is another version" >&2
    echo "name one: sh install.sh VENV PYTHON" >&2
    exit 2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$here/wheels" \\
    --require-hashes -r "$here/requirements.txt"
"""
