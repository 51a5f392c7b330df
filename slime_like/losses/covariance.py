"""What clip_cov and kl_cov share: the covariance of advantage and log-prob, token by token, and how many tokens are picked by it.

arXiv 2505.22617: cov = (A - mean A)(log_prob - mean log_prob). The means, and the number of tokens that are picked, are of the
micro-batch, as everywhere: these two losses depend on how a step is cut into micro-batches.
"""

from __future__ import annotations

from torch import Tensor

from slime_like.losses.inputs import LossInputs


def covariances(inputs: LossInputs) -> Tensor:
    """[T], constant; 0 at inactive tokens."""
    advantages, log_probs = inputs.required("advantages"), inputs.masked(inputs.log_probs.detach())
    count = inputs.loss_mask.sum().clamp(min=1)
    return inputs.masked((advantages - advantages.sum() / count) * (log_probs - log_probs.sum() / count))


def pick(candidates: Tensor, order: Tensor, share: float, inputs: LossInputs) -> Tensor:
    """The max(1, floor(share * N)) candidates that come first in descending `order`, N active tokens; all, where there are fewer.

    candidates: [T] bool. order: [T]. Returns [T] bool. Nothing is read from the device.
    """
    wanted = (inputs.loss_mask.sum().double() * share).floor().clamp(min=1)
    rank = order.masked_fill(~candidates, float("-inf")).argsort(descending=True, stable=True).argsort()
    return candidates & (rank < wanted)
