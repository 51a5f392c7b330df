#!/usr/bin/env bash
# GSPO, arXiv 2507.18071: one ratio per response, clipped to a narrow range.
#
#   bash scripts/examples/gspo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --loss-reduction sequence_mean "$@"
