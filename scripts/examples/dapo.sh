#!/usr/bin/env bash
# DAPO, arXiv 2503.14476: clip-higher and every token weighted alike, no KL. Its dynamic sampling and its length penalty are not here.
#
#   bash scripts/examples/dapo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type ppo --eps-clip 0.2 --eps-clip-high 0.28 --loss-reduction token_mean "$@"
