#!/usr/bin/env bash
# Dr. GRPO, arXiv 2503.20783: divides neither by the group's standard deviation nor by the response length.
#
#   bash scripts/examples/dr_grpo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --disable-grpo-std-normalization --policy-loss-type ppo --eps-clip 0.2 \
  --loss-reduction seq_mean_token_sum_norm --loss-norm-length "$MAX_RESPONSE_LEN" "$@"
