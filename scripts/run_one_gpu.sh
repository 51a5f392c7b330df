#!/usr/bin/env bash
# GRPO advantages with the SAPO loss on GSM8K, one process on one GPU. A test checks the command line, but it has not
# been run on a GPU: treat batch sizes and learning rate as a starting point.
#
#   MODEL=models/Qwen3-0.6B TRAIN=data/gsm8k/train.jsonl TEST=data/gsm8k/test.jsonl bash scripts/run_one_gpu.sh [more flags of train.py]
#
# MODEL: folder of a Hugging Face model. TRAIN, TEST: Parquet or JSONL files with the fields question and answer, as GSM8K has them;
# docs/en/data_and_rewards.md says how to get it.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
: "${MODEL:?set MODEL to the folder of a Hugging Face model, for example Qwen3-0.6B}"
: "${TRAIN:?set TRAIN to a Parquet or JSONL file with the fields question and answer}"
: "${TEST:?set TEST to a Parquet or JSONL file with the fields question and answer}"
OUTPUT=${OUTPUT:-outputs/gsm8k-one-gpu}

FLAGS=(
  # model
  --hf-checkpoint "$MODEL" --bf16
  # data and reward
  --prompt-data "$TRAIN" --input-key question --label-key answer --rollout-shuffle --rollout-max-prompt-len 512
  --apply-chat-template --apply-chat-template-kwargs '{"enable_thinking": false}' --rm-type gsm8k
  --eval-prompt-data gsm8k "$TEST@[:256]" --eval-interval 10
  # rollouts
  --num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 512 --rollout-local-batch-size 128
  # algorithm
  --advantage-estimator grpo --policy-loss-type sapo --sapo-tau-pos 1.0 --sapo-tau-neg 1.05
  --num-steps-per-rollout 2 --micro-batch-size 8
  # optimizer
  --lr 1e-6 --lr-warmup-iters 10 --clip-grad 1.0 --weight-decay 0.01
  # memory: activations of a layer are computed again in the backward pass
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  # files: calling this again goes on from the newest checkpoint
  --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 20 --save-hf "$OUTPUT/hf" --output-dir "$OUTPUT"
)
exec "$PYTHON" train.py "${FLAGS[@]}" "$@"
