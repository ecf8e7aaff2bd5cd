#!/bin/sh
# KV caches on one device (a GPU) and on the host, of unlike layouts, handed over both ways: are they exact, and how fast.
#
#     benchmarks/device_handoff.sh [--device cuda|npu|cpu|…] [--json] [--save] [--tokens N] [--layers N] [--rounds N]
#
# Needs a Python with torch (PYTHON, by default python3), and no engine. Where numpy, msgspec and xxhash are beside it,
# nothing is installed; else deeplink goes into .venv-device, which sees that Python's packages. Ends with 1 when a
# single bit is wrong.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import torch' || { echo "this Python has no torch: PYTHON=/path/to/one $0" >&2; exit 2; }
if ! "$PYTHON" -c 'import msgspec, numpy, tomllib, xxhash' 2>/dev/null; then
    test -x .venv-device/bin/python || "$PYTHON" -m venv --system-site-packages .venv-device
    PYTHON=.venv-device/bin/python
    "$PYTHON" -m pip install --quiet --editable .
fi
"$PYTHON" tools/link_types.py
PYTHONPATH=.types exec "$PYTHON" benchmarks/device_handoff.py "$@"
