#!/usr/bin/env bash
# Create separate virtual environments for OpenEnv, NeMo Gym and Harbor, whose dependencies conflict. 2 GB together.
#
#   bash scripts/make_environments_env.sh [folder, by default $ENVIRONMENTS_ENV or .venv-environments]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
env=${1:-${ENVIRONMENTS_ENV:-$here/../.venv-environments}}
make_env() {  # folder, then what to install
  local folder=$env/$1
  shift
  if [ -e "$folder/.ready" ]; then
    return
  fi
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/pip" install --quiet "$@"
  touch "$folder/.ready"
}
make_env openenv "openenv-core>=0.3,<0.4"
make_env nemo_gym "nemo-gym>=0.4,<0.5"
make_env harbor "harbor>=0.26,<0.27"
