#!/usr/bin/env bash
# PPO with a critic, arXiv 1707.06347 and 1506.02438: a value model predicts the return at every token; whitened GAE.
#
#   bash scripts/examples/ppo.sh [more flags of train.py]        variables: see common.sh, and CRITIC_LR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator ppo --normalize-advantages --gamma 1.0 --lambd 1.0 --policy-loss-type ppo --eps-clip 0.2 \
  --loss-reduction token_mean --critic-lr "$CRITIC_LR" --num-critic-only-steps 3 "$@"
