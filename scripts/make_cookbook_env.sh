#!/usr/bin/env bash
# Create a separate virtual environment for tinker-cookbook, which pins other versions of transformers. 2 GB.
#
#   bash scripts/make_cookbook_env.sh [folder, by default $COOKBOOK_ENV or .venv-cookbook]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
env=${1:-${COOKBOOK_ENV:-$here/../.venv-cookbook}}
if [ -e "$env/.ready" ]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$env"
"$env/bin/pip" install --quiet --constraint "$here/../constraints.txt" torch
"$env/bin/pip" install --quiet --constraint "$here/../constraints.txt" "tinker>=0.38,<0.39" "tinker-cookbook[math-rl]>=0.5.8,<0.6"
touch "$env/.ready"
