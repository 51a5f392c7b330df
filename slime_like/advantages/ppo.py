"""PPO's estimator: generalised advantage estimation with the values of a critic, Schulman et al.,
arXiv 1506.02438 and 1707.06347.

    A_t = sum_k (gamma lambda)^k delta_(t+k),    delta_t = R_t + gamma V_next - V_t
    R_s = -penalty_s + R at the last active token, or -penalty_s + r_s with token rewards r

Only active tokens count; see `returns.gae`, and `tree_returns.py` for agents. The critic learns the
returns A_t + V_t, before any whitening.

With a separate lambda for the critic (decoupled GAE of VC-PPO, arXiv 2503.01491, section 4.2) the
returns come from a second estimate: lambda 1 lets the reward at the end of a long response reach
the values of its first tokens, which a policy's lambda of 0.95 fades out after a hundred. In VAPO,
arXiv 2504.05118, section 4.2, the policy's lambda grows with the number l of the sample's active
tokens (of the whole episode for an agent): lambda = max(0, 1 - 1 / (alpha l)).
"""

from __future__ import annotations

from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.tree_returns import active_tokens, batch_gae
from slime_like.lazy import Tensor


def returns(batch: TokenRewards) -> list[Tensor] | None:
    """Returns for the critic's own lambda; None: A + V."""
    if batch.value_lambd is None and batch.lambd_length_alpha is None:
        return None
    lambd = batch.lambd if batch.value_lambd is None else batch.value_lambd
    return _estimate(batch, [lambd] * len(batch.masks))[1]


@register_token_estimator(
    "ppo",
    needs_values=True,
    returns=returns,
    takes_token_rewards=True,
    follows_tokens=True,
    aliases=("gae",),
)
def ppo(batch: TokenRewards) -> list[Tensor]:
    """A_t = delta_t + gamma lambda A_next over active tokens, [R] per sample; lambda is
    max(0, 1 - 1 / (alpha l)) with VAPO's alpha."""
    alpha = batch.lambd_length_alpha
    if alpha is None:
        return _estimate(batch, [batch.lambd] * len(batch.masks))[0]
    lengths = active_tokens(batch)
    return _estimate(batch, [max(0.0, 1 - 1 / (alpha * max(n, 1))) for n in lengths])[0]


def _estimate(batch: TokenRewards, lambd: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns). lambd: per sample."""
    if batch.values is None:
        raise ValueError("--advantage-estimator ppo needs a critic's values (values)")
    return batch_gae(batch, batch.values, lambd)
