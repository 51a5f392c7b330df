#!/usr/bin/env bash
# DAPO, arXiv 2503.14476: clip-higher, equal weight per token, no KL. Put its length penalty into the reward. For its
# dynamic sampling add --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
#
#   bash scripts/examples/dapo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type ppo --eps-clip 0.2 --eps-clip-high 0.28 --loss-reduction token_mean "$@"
