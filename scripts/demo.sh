#!/usr/bin/env bash
# An RL run without a GPU: create a tiny Qwen3 model, fine-tune it, then train it with GRPO advantages.
# The task is reasoning-gym's spell_backward; held-out words are never trained on.
#
#   bash scripts/demo.sh                          SAPO, tensor parallel 2
#   LOSS=ppo LAYOUT=pp2 bash scripts/demo.sh      another loss; LAYOUT is tp2, pp2, dp2 or one (a single process)
#   ENGINE=sglang MODE=async bash scripts/demo.sh  sample on an SGLang server during training (make sglang-env)
#
# The output is in $OUTPUT (default outputs/demo-<loss>-<layout>): sft/ and rl/, each with metrics.jsonl,
# report.png, TensorBoard files and hf/. START=<output of another demo> reuses its prompts and fine-tuned model,
# as scripts/demo_engines.sh does to compare engines.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
LOSS=${LOSS:-sapo}
LAYOUT=${LAYOUT:-tp2}
ENGINE=${ENGINE:-local}
MODE=${MODE:-sync}
OUTPUT=${OUTPUT:-outputs/demo-$LOSS-$LAYOUT}
START=${START:-$OUTPUT}
ROLLOUTS=${ROLLOUTS:-160}
SFT_STEPS=${SFT_STEPS:-112}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case $LAYOUT in
  tp2) RANKS=2 PARALLEL=(--tensor-model-parallel-size 2) ;;
  pp2) RANKS=2 PARALLEL=(--pipeline-model-parallel-size 2) ;;
  dp2) RANKS=2 PARALLEL=(--use-distributed-optimizer) ;;
  one) RANKS=1 PARALLEL=() ;;
  *) echo "LAYOUT=$LAYOUT is unknown; legal values: tp2, pp2, dp2, one" >&2; exit 2 ;;
esac
case $LOSS in
  sapo) ALGORITHM=(--policy-loss-type sapo --sapo-tau-pos 1.0 --sapo-tau-neg 1.05) ;;
  *) ALGORITHM=(--policy-loss-type "$LOSS") ;;
esac
case $ENGINE in
  local) ROLLOUT=() ;;
  sglang) ROLLOUT=(--rollout-engine sglang --rollout-num-gpus 1 --sglang-python "${SGLANG_PYTHON:-scripts/sglang_cpu/python}") ;;
  *) echo "ENGINE=$ENGINE is unknown; legal values: local, sglang" >&2; exit 2 ;;
esac
case $MODE in
  sync) ;;
  async) ROLLOUT+=(--async-rollout --max-staleness 1) ;;
  *) echo "MODE=$MODE is unknown; legal values: sync, async" >&2; exit 2 ;;
esac

source scripts/demo_functions.sh
DATA=(--prompt-data "$START/train.jsonl" --input-key messages --label-key answer --apply-chat-template --rollout-shuffle)
EVAL=(--eval-prompt-data heldout "$START/heldout.jsonl" --n-samples-per-eval-prompt 4 --custom-rm-path scripts/demo_reward.py:score --rollout-max-response-len 8)

rm -rf "$OUTPUT"
if [ "$START" = "$OUTPUT" ]; then
  say "step 1 of 4: a tiny model, its tokenizer and prompts"
  show "$PYTHON" scripts/make_demo.py --output-dir "$OUTPUT" --max-word-len 4
  say "step 2 of 4: supervised fine-tuning, $SFT_STEPS steps"
  train --hf-checkpoint "$OUTPUT/model" --loss-type sft_loss "${DATA[@]}" "${EVAL[@]}" --eval-interval 50 \
    --num-rollout "$SFT_STEPS" --rollout-batch-size 128 --micro-batch-size 64 \
    --lr 3e-3 --lr-decay-style linear --lr-warmup-iters 20 \
    --output-dir "$OUTPUT/sft" --save-hf "$OUTPUT/sft/hf" --log-interval 25
fi

say "step 3 of 4: reinforcement learning, $ROLLOUTS rollouts"
train --hf-checkpoint "$START/sft/hf" --advantage-estimator grpo "${ALGORITHM[@]}" "${DATA[@]}" "${EVAL[@]}" "${ROLLOUT[@]}" --eval-interval 20 \
  --num-rollout "$ROLLOUTS" --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --micro-batch-size 64 \
  --lr 1e-3 --lr-decay-style linear --min-lr 2e-4 --entropy-coef 0.01 --output-dir "$OUTPUT/rl" --save-hf "$OUTPUT/rl/hf" --log-interval 10

say "step 4 of 4: did the score rise?"
"$PYTHON" scripts/check_curve.py "$OUTPUT/rl/metrics.jsonl" --metric eval/heldout/mean --start-at-most 0.4 --end-at-least 0.8
echo "the demo took $((SECONDS - STARTED)) s; curves: $OUTPUT/rl/report.png"
