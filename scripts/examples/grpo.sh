#!/usr/bin/env bash
# GRPO, arXiv 2402.03300: group-relative rewards, a clipped ratio, equal weight per response, KL to the initial model.
#
#   bash scripts/examples/grpo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type ppo --eps-clip 0.2 --loss-reduction sequence_mean \
  --use-kl-loss --kl-loss-coef 0.001 --ref-load "$MODEL" "$@"
