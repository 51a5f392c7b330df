#!/usr/bin/env bash
# GRPO with truncated importance sampling of each token: corrects for a sampler whose log-probs are not the trainer's.
#
#   bash scripts/examples/tis.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type ppo --eps-clip 0.2 --loss-reduction token_mean \
  --tis-ratio-type token --token-tis-ratio-clip-high 2.0 "$@"
