#!/usr/bin/env bash
# Create a separate virtual environment for vLLM on the CPU; it pins other versions than the trainer. 2 GB.
#
#   bash scripts/vllm_cpu/make_env.sh [folder, by default $VLLM_ENV or .venv-vllm]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
env=${1:-${VLLM_ENV:-$here/../../.venv-vllm}}
if [ -e "$env/.ready" ]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$env"
"$env/bin/pip" install --quiet --constraint "$here/../../constraints.txt" torch
"$env/bin/pip" install --quiet --no-deps --requirement "$here/requirements.txt"
touch "$env/.ready"
