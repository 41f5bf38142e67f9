#!/usr/bin/env bash
# Makes .venv with ladder and what it trains with: `bash scripts/environment.sh train`, or `dev` for the tests too. A
# second call changes nothing. TORCH=torch==2.13.0 takes another torch than the newest that pip finds.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1 done=.venv/made-for-$1

if [ -e "$done" ]; then
    exit 0
fi
command -v g++ >/dev/null || {
    echo "There is no C++ compiler, with which DeepSpeed builds its operators: install g++." >&2
    exit 4
}
if command -v uv >/dev/null; then
    uv venv --quiet --allow-existing .venv
    install=(uv pip install --quiet --python .venv/bin/python)
else
    python3 -m venv .venv
    install=(.venv/bin/pip install --quiet)
fi
"${install[@]}" "${TORCH:-torch}"
"${install[@]}" -e ".[$extra]"
touch "$done"
