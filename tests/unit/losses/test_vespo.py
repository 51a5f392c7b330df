"""VESPO against loops over sequences, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slime_like.losses import policy_losses
from slime_like.losses.vespo import VESPOConfig
from tests.unit.losses.loss_cases import clamp20, doubles, gradient, make, value
from tests.unit.losses.sequence_cases import (
    ADVANTAGES,
    KEEP,
    LOG_RATIO,
    SEQ_IDS,
    WEIGHTS,
    active,
    assert_matches,
    inputs_of,
)


def vespo_loop(
    config: VESPOConfig, keep: Tensor | None, weights: Tensor | None, level: str
) -> tuple[list[float], list[float], float]:
    log_probs = inputs_of()[0].detach()
    losses, grads, phis = [0.0] * 12, [0.0] * 12, []
    for sequence in range(5):
        tokens, kept = active(sequence), active(sequence, keep)
        log_w = sum(clamp20(float(LOG_RATIO[t]))[0] for t in tokens)
        if weights is not None and kept:
            log_w += (
                math.log(float(weights[kept[0]]))
                if level == "sequence"
                else sum(math.log(float(weights[t])) for t in kept)
            )
        log_w = min(max(log_w, math.log(1e-8)), 20.0)
        of_sequence = []
        for t in tokens:
            a = float(ADVANTAGES[t])
            k, decay = (
                (config.vespo_k_pos, config.vespo_lambda_pos)
                if a >= 0
                else (config.vespo_k_neg, config.vespo_lambda_neg)
            )
            phi = math.exp(decay + k * log_w - decay * math.exp(log_w))
            of_sequence.append(phi)
            if keep is None or keep[t]:
                losses[t], grads[t] = -phi * a * float(log_probs[t]), -phi * a
        if tokens:
            phis.append(sum(of_sequence) / len(of_sequence))
    return losses, grads, sum(phis) / len(phis)


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize(
    ("weights", "level"),
    [
        (None, "token"),
        (WEIGHTS, "token"),
        (torch.tensor([0.5, 1.2, 2.0, 1.0, 0.7], dtype=torch.float64)[SEQ_IDS], "sequence"),
    ],
)
@pytest.mark.parametrize("config", [VESPOConfig(), VESPOConfig(1.0, 0.5, 0.7, 2.5)])
def test_vespo_is_the_formula(
    config: VESPOConfig, weights: Tensor | None, level: str, keep: Tensor | None
) -> None:
    leaf, inputs = inputs_of(importance_weights=weights, importance_level=level, keep_mask=keep)
    losses, grads, phi = vespo_loop(config, keep, weights, level)
    assert_matches("vespo", config, inputs, leaf, losses, grads)
    assert value(
        policy_losses.get("vespo").fn(inputs, config).metrics["vespo/phi_seq_mean"]
    ) == pytest.approx(phi, rel=1e-5)


def test_vespos_weight_is_one_on_policy_and_largest_at_k_over_lambda() -> None:
    config = VESPOConfig()
    vespo = policy_losses.get("vespo")

    def phi(log_w: float, advantage: float) -> float:
        leaf, inputs = make(*doubles([log_w], [advantage]))
        return abs(float(gradient(vespo, config, leaf, inputs)))

    for sign, best in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert phi(0.0, sign) == 1
        assert phi(math.log(best), sign) > max(
            phi(math.log(best) + 0.01, sign), phi(math.log(best) - 0.01, sign)
        )
