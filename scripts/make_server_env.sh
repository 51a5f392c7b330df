#!/usr/bin/env bash
# Create a separate virtual environment for a server on the CPU; it pins other versions than the trainer. 2 to 2.5 GB.
#
#   bash scripts/make_server_env.sh scripts/sglang_cpu .venv-sglang
#   bash scripts/make_server_env.sh scripts/vllm_cpu .venv-vllm
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=$1/requirements.txt
env=$2
if [ -e "$env/.ready" ]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$env"
"$env/bin/pip" install --quiet --constraint "$here/../constraints.txt" torch
"$env/bin/pip" install --quiet --no-deps --requirement "$packages"
touch "$env/.ready"
