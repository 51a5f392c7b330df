#!/usr/bin/env bash
# Create a separate virtual environment for SGLang on the CPU; it pins other versions than the trainer. 2.5 GB.
#
#   bash scripts/sglang_cpu/make_env.sh [folder, by default $SGLANG_ENV or .venv-sglang]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
env=${1:-${SGLANG_ENV:-$here/../../.venv-sglang}}
if [ -e "$env/.ready" ]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$env"
"$env/bin/pip" install --quiet --constraint "$here/../../constraints.txt" torch
"$env/bin/pip" install --quiet --no-deps --requirement "$here/requirements.txt"
touch "$env/.ready"
