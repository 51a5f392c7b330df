#!/usr/bin/env bash
# CISPO, arXiv 2506.13585: the clipped ratio is a constant weight, so no token loses its gradient.
#
#   bash scripts/examples/cispo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type cispo --cispo-eps-clip-low 1.0 --cispo-eps-clip-high 4.0 --loss-reduction token_mean "$@"
