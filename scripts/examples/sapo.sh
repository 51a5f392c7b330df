#!/usr/bin/env bash
# SAPO, arXiv 2511.20347: a soft gate instead of the clip.
#
#   bash scripts/examples/sapo.sh [more flags of train.py]        variables: see common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
train --advantage-estimator grpo --policy-loss-type sapo --sapo-tau-pos 1.0 --sapo-tau-neg 1.05 --loss-reduction sequence_mean "$@"
