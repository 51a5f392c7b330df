#!/usr/bin/env bash
# GRPO with token-level truncated importance sampling, which corrects for differences between sampler and trainer.
#
#   bash scripts/examples/tis.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type ppo --eps-clip 0.2 --loss-reduction token_mean \
  --tis-ratio-type token --token-tis-ratio-clip-high 2.0 "$@"
