#!/usr/bin/env bash
# IcePop, arXiv 2510.18855: drops tokens where trainer and sampler disagree, and weights the others by their ratio.
#
#   bash scripts/examples/icepop.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type ppo --eps-clip 0.2 --loss-reduction sequence_mean \
  --tis-ratio-type token --token-tis-ratio-clip-high 5.0 --token-mask-is-threshold-low 0.5 --token-mask-is-threshold-high 5.0 "$@"
