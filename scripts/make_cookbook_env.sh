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
install() {
  "$env/bin/pip" install --quiet --constraint "$here/../constraints.txt" "$@"
}
install torch
if ! install "tinker>=0.38,<0.39" "tinker-cookbook[math-rl]>=0.6,<0.7"; then
  # tml-renderers renders chats of Thinking Machines' own models; an index without the release that the cookbook asks
  # for serves all others
  echo "the cookbook without tml-renderers >= 0.4.1, which this index does not carry"
  install "tinker>=0.38,<0.39" "tinker-cookbook[math-rl]>=0.5.8,<0.6" tml-renderers "pyrage>=1.4"
  install --no-deps "tinker-cookbook>=0.6,<0.7"
fi
touch "$env/.ready"
