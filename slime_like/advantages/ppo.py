"""PPO's estimator: generalised advantage estimation with the values of a critic, Schulman et al.,
arXiv 1506.02438 and 1707.06347.

A_t = sum_k (gamma lambd)^k delta_(t+k),    delta_t = R_t + gamma V_next - V_t,    R_s = -penalty_s + R at the last active token

Where the reward function gave each token its own, R_s = -penalty_s + r_s.
Only active tokens count; see `returns.gae`. The critic learns the returns A_t + V_t, taken before
any whitening.
"""

from __future__ import annotations

from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.returns import gae, token_rewards
from slime_like.lazy import Tensor


@register_token_estimator("ppo", needs_values=True, takes_token_rewards=True, aliases=("gae",))
def ppo(batch: TokenRewards) -> list[Tensor]:
    if batch.values is None:
        raise ValueError("--advantage-estimator ppo needs a critic's value of every token (values)")
    rewards = token_rewards(batch.outcomes, batch.masks, batch.penalties, batch.token_rewards)
    advantages, _ = gae(rewards, batch.values, batch.masks, batch.gamma, batch.lambd)
    return advantages
