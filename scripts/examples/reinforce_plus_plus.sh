#!/usr/bin/env bash
# REINFORCE++, arXiv 2501.03262: no groups; token-level KL in the reward, advantages whitened over the rollout.
#
#   bash scripts/examples/reinforce_plus_plus.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 1.0 --policy-loss-type ppo --eps-clip 0.2 \
  --loss-reduction token_mean --kl-coef 0.001 --ref-load "$MODEL" "$@"
