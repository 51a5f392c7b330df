"""Draw every policy loss against the ratio, for both signs of the advantage: python
benchmarks/plot_losses.py [--output FILE].

A panel shows the token loss (dashed) and the weight of the policy gradient, -(dl / d log_prob) / A
(solid), of one token in a separate sequence, under the loss's default settings. On-policy, at
ratio 1, every weight is 1. Of a loss that is a constant weight times the log-prob (cispo,
rollout_is, topr, up, vespo) look at the gradient weight: the slope of its value is another.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime_like.losses import LossInputs, PolicyLoss, policy_losses  # noqa: E402

TARGET = ROOT / "docs" / "images" / "losses.png"
OLD_LOG_PROB = -1.0  # a probability of 0.37, for losses that depend on it
LEAST = 0.02
LARGEST = 2.6
POINTS = 300
# Settings to draw where there is no default, or its effect is outside the plotted range.
SETTINGS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.5},
    "gspo": {"eps_clip": 0.1},
    "luspo": {"eps_clip": 0.1},
    "kl_cov": {"kl_cov_frac": 1.0, "kl_cov_coef": 0.3},
}
WITHOUT_A_RATIO = ("cross_entropy", "dpo", "bradley_terry")
# Remarks on what a panel cannot show.
NOTES = {
    "clip_cov": "ppo, where not chosen",
    "kl_cov": "a chosen token, coef 0.3",
    "dro": "beta 0.5",
    "gspo": "eps 0.1, not 3e-4",
    "luspo": "eps 0.1, not 2e-3",
    "topr": "reward has A's sign",
    "gpg": "no ratio",
}


def curves(loss: PolicyLoss, config: Any, ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """(loss minus its value at ratio 1, gradient weight), [N] each, for N one-token sequences."""
    count = ratio.numel()
    old = torch.full_like(ratio, OLD_LOG_PROB)
    log_probs = (old + ratio.log()).requires_grad_()
    advantages = torch.full_like(ratio, advantage)
    losses = []
    gradients = []
    for i in range(count):  # one micro-batch each: some losses select tokens per micro-batch
        one = slice(i, i + 1)
        inputs = LossInputs(
            log_probs=log_probs[one] - 0.0,
            loss_mask=torch.ones(1, dtype=torch.bool),
            loss_weights=torch.ones(1),
            seq_ids=torch.zeros(1, dtype=torch.long),
            num_seqs=1,
            advantages=advantages[one],
            old_log_probs=old[one],
            rollout_log_probs=old[one],
            rewards=advantages[one],
        )
        token_loss = loss.fn(inputs, config).token_losses
        gradients.append(torch.autograd.grad(token_loss.sum(), log_probs)[0][i])
        losses.append(token_loss.detach()[0])
    return torch.stack(losses), -torch.stack(gradients) / advantage


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    named = [(name, loss) for name, loss in policy_losses.items() if name not in WITHOUT_A_RATIO]
    ratio = torch.linspace(LEAST, LARGEST, POINTS, dtype=torch.float64)
    columns = 5
    rows = -(-len(named) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.1 * columns, 2.6 * rows),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axis, (name, loss) in zip(axes.flat, named):
        config = loss.config_type(**SETTINGS.get(name, {}))
        for advantage, colour, width in (
            (1.0, "tab:blue", 3.2),
            (-1.0, "tab:red", 1.4),
        ):  # the wider line shows where both coincide
            value, weight = curves(loss, config, ratio, advantage)
            at_one = int((ratio - 1).abs().argmin())
            axis.plot(
                ratio,
                weight,
                color=colour,
                linewidth=width,
                label=f"gradient weight, A = {advantage:+.0f}",
            )
            axis.plot(
                ratio,
                value - value[at_one],
                color=colour,
                linewidth=1.0,
                linestyle="--",
                label=f"loss, A = {advantage:+.0f}",
            )
        axis.axvline(1, color="grey", linewidth=0.6)
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.set_title(f"{name} ({NOTES[name]})" if name in NOTES else name, fontsize=9)
        axis.set_ylim(-1.6, 2.8)
    for axis in axes.flat[len(named) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("ratio of current to old policy", fontsize=8)
    figure.suptitle(
        "Policy losses against the ratio; losses are shifted to 0 at ratio 1", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw every policy loss against the ratio.")
    parser.add_argument("--output", type=Path, default=TARGET)
    path = parser.parse_args().output
    draw(path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
