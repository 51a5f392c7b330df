#!/usr/bin/env bash
# Run the demo with each engine, synchronously and asynchronously, from one fine-tuned model, and print a table of
# scores and seconds by phase.
#
#   bash scripts/demo_engines.sh
#   RUNS="sglang-sync sglang-async" ROLLOUTS=40 bash scripts/demo_engines.sh
#
# A run is an engine (local; sglang: --rollout-engine sglang) and a mode (sync; async: --async-rollout --max-staleness 1).
# SGLang: make sglang-env, or SGLANG_ENV, or SGLANG_PYTHON. One process trains and one server samples, one core each;
# LAYOUT is as in demo.sh. $OUTPUT has one folder per run.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
ROOT=${OUTPUT:-outputs/engines}
export LAYOUT=${LAYOUT:-one} PYTHON
RUNS=${RUNS:-local-sync local-async sglang-sync sglang-async}

FIRST='' FOLDERS=() FAILED=()
for RUN in $RUNS; do
  printf '\n== %s\n' "$RUN"
  FOLDER=$ROOT/$RUN
  OUTPUT=$FOLDER START=${FIRST:-$FOLDER} ENGINE=${RUN%-*} MODE=${RUN#*-} bash scripts/demo.sh || FAILED+=("$RUN")
  FIRST=${FIRST:-$FOLDER}
  FOLDERS+=("$FOLDER")
done

printf '\n'
"$PYTHON" benchmarks/engine_table.py "${FOLDERS[@]}"
if [ ${#FAILED[@]} -gt 0 ]; then
  echo "failed: ${FAILED[*]}" >&2
  exit 1
fi
