"""Advantage estimators: rewards -> advantages. They need only torch.

>>> compute_advantages("grpo", rewards=rewards, group_ids=prompts, lengths=lengths).values  # [B]
>>> estimate_advantages(settings, outcomes, local_indices=range(n), masks=masks).values  # n x [R]
"""

from slime_like.advantages import (  # noqa: F401  (each registers its estimator)
    batch_mean,
    gdpo,
    gpg,
    grpo,
    grpo_token,
    maxrl,
    opo,
    otb,
    pass_at_k,
    ppo,
    reinforce_plus_plus,
    remax,
    rloo,
    turns,
)
from slime_like.advantages.distillation import teacher_gaps
from slime_like.advantages.episodes import EpisodeTurns
from slime_like.advantages.estimate import (
    AdvantageSettings,
    Outcomes,
    TokenAdvantages,
    estimate_advantages,
)
from slime_like.advantages.kl_reward import KLController, token_kl
from slime_like.advantages.otb import token_energies
from slime_like.advantages.outcome import AdvantageOutput, compute_advantages
from slime_like.advantages.registry import (
    AdvantageEstimator,
    GroupRewards,
    OutcomeEstimator,
    RewardParts,
    TokenEstimator,
    TokenRewards,
    TurnEstimator,
    advantage_estimators,
    compares_samples,
    follows_tokens,
    needs_critic,
    needs_energies,
    takes_token_rewards,
)
from slime_like.advantages.returns import discounted_returns, gae, token_rewards
from slime_like.advantages.whitening import whiten

__all__ = [
    "AdvantageEstimator",
    "AdvantageOutput",
    "AdvantageSettings",
    "EpisodeTurns",
    "GroupRewards",
    "KLController",
    "OutcomeEstimator",
    "Outcomes",
    "RewardParts",
    "TokenAdvantages",
    "TokenEstimator",
    "TokenRewards",
    "TurnEstimator",
    "advantage_estimators",
    "compares_samples",
    "compute_advantages",
    "discounted_returns",
    "estimate_advantages",
    "follows_tokens",
    "gae",
    "needs_critic",
    "needs_energies",
    "takes_token_rewards",
    "teacher_gaps",
    "token_energies",
    "token_kl",
    "token_rewards",
    "whiten",
]
