#!/usr/bin/env bash
# SAO, arXiv 2607.07508: one answer a prompt, trained on as it ends; double-sided importance sampling against the engine's
# log-probs; a critic with frozen attention that takes two steps for each one of the policy.
#
#   bash scripts/examples/sao.sh [more flags of train.py]        variables: see common.sh, and CRITIC_LR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator ppo --lambd-length-alpha 1.5 --value-lambd 1 --policy-loss-type rollout_is --eps-clip 0.3 \
  --eps-clip-high 5 --loss-reduction token_mean --critic-lr "$CRITIC_LR" --critic-steps-per-policy-step 2 \
  --critic-freeze-params-name-list self_attention --num-critic-only-steps 3 --rollout-batch-size 256 \
  --n-samples-per-prompt 1 --async-rollout --fully-async "$@"
