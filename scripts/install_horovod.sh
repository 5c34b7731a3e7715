#!/usr/bin/env bash
# Builds Horovod 0.28.1 with PyTorch and Gloo into an environment that has torch, and checks that it works.
#
#   scripts/install_horovod.sh [PYTHON]      PYTHON: the environment's interpreter, by default python3
#
# Needs cmake (3.17 or newer), make, g++ and patch; takes two to five minutes. MAKEFLAGS=-j1 takes less of the machine.
# Horovod has no binary packages, and its last release asks for C++14 where torch 2.1 and later need C++17. Its build
# files strip a -std from CXXFLAGS, so the flag is put behind theirs by the launcher of the compiler.
#
# The patch beside this script corrects one line, without which processes abort on hosts whose own name resolves to
# loopback, as on Debian and Ubuntu; the patch says why. The version of the corrected build is 0.28.1+gloo.iface.
set -euo pipefail
python=$(command -v "${1:-python3}") || { echo "no interpreter ${1:-python3}"; exit 2; }

patch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/horovod-0.28.1-gloo-iface.patch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for tool in cmake make g++ patch; do
    command -v "$tool" > /dev/null || { echo "install_horovod: $tool is missing, which the build needs"; exit 2; }
done
"$python" -c 'import torch, numpy' || { echo "install_horovod: $python needs torch and numpy first"; exit 2; }

standard=$("$python" -c 'import torch; print(14 if torch.__version__.startswith("2.0.") else 17)')
"$python" -m pip install --quiet setuptools
"$python" -m pip download --quiet --no-build-isolation --no-binary :all: --no-deps --dest "$work" horovod==0.28.1
mkdir "$work/source"
tar -xzf "$work/horovod-0.28.1.tar.gz" -C "$work/source" --strip-components=1
patch --quiet --fuzz=0 --strip=1 --directory="$work/source" < "$patch"
HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
CMAKE_CXX_COMPILER_LAUNCHER="sh;-c;exec \"\$@\" -std=c++$standard -g0;sh" \
CMAKE_POLICY_VERSION_MINIMUM=3.5 LDFLAGS=-s MAKEFLAGS="${MAKEFLAGS:--j2}" \
    "$python" -m pip install --no-build-isolation --no-cache-dir "$work/source"

echo "check: two processes, allreduce"
cat > "$work/check.py" <<'PROGRAM'
import horovod.torch as hvd
import torch

hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
assert (hvd.size(), total) == (2, 3.0), (hvd.size(), total)
print(f"rank {hvd.rank()} of {hvd.size()}: the sum is {total:g}, as it should be")
PROGRAM
timeout 120 "$python" -m horovod.runner.launch --gloo -np 2 "$python" "$work/check.py"
