# shellcheck shell=bash
# Settings shared by the recipes in this folder, which source it.
#
# Without variables a recipe trains the demo's tiny model on the CPU; the first call fine-tunes it (a minute). With these
# it trains your model on one GPU, on files with GSM8K's fields question and answer (not run on a GPU yet):
#
#   MODEL=models/Qwen3-0.6B TRAIN=data/gsm8k/train.jsonl TEST=data/gsm8k/test.jsonl bash scripts/examples/grpo.sh [more flags of train.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUTPUT=${OUTPUT:-outputs/examples/$(basename "$0" .sh)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ -n "${MODEL:-}" ]; then
  : "${TRAIN:?set TRAIN to a Parquet or JSONL file with the fields question and answer}"
  : "${TEST:?set TEST to a Parquet or JSONL file with the fields question and answer}"
  MAX_RESPONSE_LEN=${MAX_RESPONSE_LEN:-512}
  CRITIC_LR=${CRITIC_LR:-1e-5}
  SHARED=(
    --bf16 --prompt-data "$TRAIN" --input-key question --label-key answer --rm-type gsm8k --rollout-max-prompt-len 512
    --eval-prompt-data test "$TEST@[:256]" --eval-interval 10
    --num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-local-batch-size 128 --micro-batch-size 8
    --lr 1e-6 --lr-warmup-iters 10 --weight-decay 0.01
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 20
  )
else
  WORK=${WORK:-outputs/examples/warm_start}
  [ -e "$WORK/sft/done" ] || "$PYTHON" scripts/warm_start.py --output-dir "$WORK"
  MODEL=$WORK/sft/hf
  MAX_RESPONSE_LEN=8
  CRITIC_LR=${CRITIC_LR:-3e-3}
  SHARED=(
    --prompt-data "$WORK/data/train.jsonl" --input-key messages --label-key answer --custom-rm-path scripts/demo_reward.py:score
    --eval-prompt-data heldout "$WORK/data/heldout.jsonl" --n-samples-per-eval-prompt 4 --eval-interval 20
    --num-rollout 60 --rollout-batch-size 32 --n-samples-per-prompt 8 --micro-batch-size 64
    --lr 1e-3 --lr-warmup-iters 20 --lr-decay-style linear --min-lr 1e-4
  )
fi

# Run train.py with the shared settings and the recipe's; the caller's flags come last and take precedence.
train() {
  exec "$PYTHON" train.py --hf-checkpoint "$MODEL" --apply-chat-template --rollout-shuffle --num-steps-per-rollout 4 \
    --rollout-max-response-len "$MAX_RESPONSE_LEN" --output-dir "$OUTPUT" --save-hf "$OUTPUT/hf" "${SHARED[@]}" "$@"
}
