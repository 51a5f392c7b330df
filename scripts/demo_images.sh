#!/usr/bin/env bash
# An RL run with images, without a GPU: make a tiny Qwen3-VL model with random weights, fine-tune it for a
# minute, then train it with GRPO advantages to say how many squares of which colour a picture has.
#
#   bash scripts/demo_images.sh              one process
#   LAYOUT=tp2 bash scripts/demo_images.sh   tensor parallel 2; or dp2
#
# The output is in $OUTPUT (default outputs/images-<layout>): sft/ and rl/, each with metrics.jsonl,
# report.png and hf/. START=<output of another demo> reuses its pictures and fine-tuned model.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
LAYOUT=${LAYOUT:-one}
OUTPUT=${OUTPUT:-outputs/images-$LAYOUT}
START=${START:-$OUTPUT}
ROLLOUTS=${ROLLOUTS:-120}
SFT_STEPS=${SFT_STEPS:-60}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case $LAYOUT in
  one) RANKS=1 PARALLEL=() ;;
  tp2) RANKS=2 PARALLEL=(--tensor-model-parallel-size 2) ;;
  dp2) RANKS=2 PARALLEL=(--use-distributed-optimizer) ;;
  *) echo "LAYOUT=$LAYOUT is unknown; legal values: one, tp2, dp2" >&2; exit 2 ;;
esac

source scripts/demo_functions.sh
DATA=(--prompt-data "$START/train.jsonl" --input-key question --label-key answer --multimodal-keys '{"image": "images"}' --apply-chat-template --rollout-shuffle)
EVAL=(--eval-prompt-data heldout "$START/heldout.jsonl" --rm-type exact_match --rollout-max-response-len 8)

rm -rf "$OUTPUT"
if [ "$START" = "$OUTPUT" ]; then
  say "step 1 of 4: a tiny model, its image processor, and pictures"
  show "$PYTHON" scripts/make_image_demo.py --output-dir "$OUTPUT"
  say "step 2 of 4: supervised fine-tuning, $SFT_STEPS steps"
  train --hf-checkpoint "$OUTPUT/model" --loss-type sft_loss "${DATA[@]}" "${EVAL[@]}" --eval-interval 30 \
    --num-rollout "$SFT_STEPS" --rollout-batch-size 64 --micro-batch-size 64 \
    --lr 3e-3 --lr-decay-style linear --lr-warmup-iters 20 \
    --output-dir "$OUTPUT/sft" --save-hf "$OUTPUT/sft/hf" --log-interval 20
fi

say "step 3 of 4: reinforcement learning, $ROLLOUTS rollouts"
train --hf-checkpoint "$START/sft/hf" --advantage-estimator grpo "${DATA[@]}" "${EVAL[@]}" --eval-interval 20 \
  --num-rollout "$ROLLOUTS" --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --micro-batch-size 64 \
  --lr 1e-3 --lr-decay-style linear --min-lr 2e-4 --lr-warmup-iters 10 --entropy-coef 0.01 \
  --output-dir "$OUTPUT/rl" --save-hf "$OUTPUT/rl/hf" --log-interval 10

say "step 4 of 4: did the score rise?"
"$PYTHON" scripts/check_curve.py "$OUTPUT/rl/metrics.jsonl" --metric eval/heldout/mean --start-at-most 0.6 --end-at-least 0.8
echo "the demo took $((SECONDS - STARTED)) s; curves: $OUTPUT/rl/report.png"
