#!/usr/bin/env bash
# GMPO, arXiv 2507.20673: the geometric mean of clipped ratios.
#
#   bash scripts/examples/gmpo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type gmpo --gmpo-eps-low 0.4 --gmpo-eps-high 0.4 --loss-reduction sequence_mean "$@"
