"""Advantages, the terms of the loss, and how a rollout is cut into optimizer steps. The flags of
each policy loss are declared in the loss's own file."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    POSITIVE,
    UNIT,
    CheckedSettings,
    Range,
    arg,
)
from slime_like.losses.registry import PolicyLoss, policy_losses

ALL_OR_SOME = Range("-1 (all) or >= 1", lambda x: x == -1 or x >= 1)


@dataclass(frozen=True, slots=True)
class AlgorithmConfig(CheckedSettings):
    loss_type: str = arg(
        "policy_loss",
        "policy_loss: reinforcement learning. sft_loss: fine-tuning on given answers. dpo_loss, rm_loss: on pairs of them, a policy or a "
        "reward model. custom_loss: policy_loss with a function.",
        choices=("policy_loss", "sft_loss", "dpo_loss", "rm_loss", "custom_loss"),
    )
    policy_loss_type: str = arg("ppo", "The policy loss.")
    custom_loss_function_path: str | None = arg(
        None,
        "module.function or file.py:function of your own policy loss, called as function(inputs: LossInputs, config) -> PolicyLossOutput; config "
        "has the settings of all policy losses.",
    )
    loss_reduction: str = arg(
        "rollout_mean", "How token losses are weighted over the optimizer step."
    )
    loss_norm_length: int | None = arg(
        None,
        "Tokens by which --loss-reduction seq_mean_token_sum_norm divides each sequence's sum.",
        legal=AT_LEAST_ONE,
        only_with="loss_reduction=seq_mean_token_sum_norm",
        required_with="loss_reduction=seq_mean_token_sum_norm",
    )
    advantage_estimator: str = arg(
        "grpo", "How rewards become advantages.", excludes="loss_type=sft_loss"
    )
    disable_grpo_std_normalization: bool = arg(
        False,
        "Dr. GRPO: do not divide by the group's standard deviation.",
        excludes="loss_type=sft_loss",
    )
    gdpo_reward_keys: list[str] | None = arg(
        None,
        "GDPO: keys of the dict that the reward function returns, each a reward that is compared within groups on its own.",
        nargs="+",
        only_with="advantage_estimator=gdpo",
        excludes=("custom_reward_post_process_path", "kl_coef", "loss_type=sft_loss"),
    )
    gdpo_reward_weights: list[float] | None = arg(
        None,
        "GDPO: weight of each of --gdpo-reward-keys in their sum; default: 1.",
        nargs="+",
        needs="gdpo_reward_keys",
        excludes="loss_type=sft_loss",
    )
    custom_reward_post_process_path: str | None = arg(
        None,
        "module.function or file.py:function that makes the estimator's numbers of the rewards of a rollout, in place of the comparison within "
        "groups: function(args, samples) -> (raw_rewards, rewards), on rank 0. With grpo and its like they are the advantages.",
    )
    singleton_advantage: str = arg(
        "zero",
        "Advantage in a group of one: zero, or the reward itself.",
        choices=("zero", "reward"),
        excludes="loss_type=sft_loss",
    )
    normalize_advantages: bool = arg(
        False,
        "Whiten advantages over all active tokens of a rollout and all ranks.",
        aliases=("--advantage-batch-normalize",),
        excludes="loss_type=sft_loss",
    )
    gamma: float = arg(
        1.0,
        "Discount of the rewards of later tokens or answers (reinforce_plus_plus, remax, otb, ppo, grpo_token, grpo_turn).",
        legal=UNIT,
        excludes="loss_type=sft_loss",
    )
    lambd: float = arg(
        1.0,
        "Lambda of generalised advantage estimation (ppo): 1 trusts rewards alone, 0 the critic's next value.",
        legal=UNIT,
        excludes="loss_type=sft_loss",
        only_with="@critic",
    )
    value_lambd: float | None = arg(
        None,
        "Decoupled GAE (VC-PPO): lambda of the returns that the critic learns; 1 keeps the reward of a long response whole. Default: --lambd.",
        legal=UNIT,
        excludes="loss_type=sft_loss",
        only_with="@critic",
    )
    lambd_length_alpha: float | None = arg(
        None,
        "VAPO: the policy's lambda is 1 - 1 / (this x active tokens of the response), 0.05 in its paper; --lambd is then the critic's.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        only_with="@critic",
    )
    use_kl_loss: bool = arg(
        False,
        "Add kl_loss_coef times the KL to the reference to the loss.",
        excludes="loss_type=sft_loss",
    )
    kl_loss_coef: float = arg(
        0.0,
        "Weight of the KL in the loss.",
        legal=NON_NEGATIVE,
        excludes="loss_type=sft_loss",
        needs="use_kl_loss",
    )
    kl_loss_type: str | None = arg(
        None,
        "KL estimator; default low_var_kl in the loss, k1 in the reward.",
        excludes="loss_type=sft_loss",
        needs="use_kl_loss|kl_coef",
    )
    use_unbiased_kl: bool = arg(
        False,
        "Weight the KL of the loss by the ratio of current to old policy, so that its gradient is right.",
        excludes="loss_type=sft_loss",
        needs="use_kl_loss",
    )
    kl_coef: float = arg(
        0.0,
        "Weight of the KL taken off the reward.",
        legal=NON_NEGATIVE,
        excludes="loss_type=sft_loss",
    )
    kl_ctrl_type: str = arg(
        "fixed",
        "How --kl-coef changes: not at all, or towards --kl-target as the KL is above or below it.",
        choices=("fixed", "adaptive"),
        excludes="loss_type=sft_loss",
        needs="kl_coef",
    )
    kl_target: float = arg(
        0.1,
        "KL for each token that --kl-ctrl-type adaptive aims at.",
        legal=POSITIVE,
        aliases=("--kl-ctrl-kl-target",),
        excludes="loss_type=sft_loss",
        idle_without="kl_ctrl_type=adaptive",
    )
    kl_horizon: float = arg(
        10000.0,
        "Samples over which --kl-ctrl-type adaptive changes the coefficient.",
        legal=POSITIVE,
        aliases=("--kl-ctrl-horizon",),
        excludes="loss_type=sft_loss",
        idle_without="kl_ctrl_type=adaptive",
    )
    entropy_coef: float = arg(
        0.0, "Weight of the entropy bonus.", legal=NON_NEGATIVE, excludes="loss_type=sft_loss"
    )
    entropy_ctrl_type: str = arg(
        "fixed",
        "How the entropy bonus changes: not at all, or as --entropy-target needs, starting from --entropy-coef.",
        choices=("fixed", "adaptive"),
        excludes="loss_type=sft_loss",
    )
    entropy_target: float = arg(
        0.2,
        "Entropy by token, in nats, that --entropy-ctrl-type adaptive keeps: no bonus above it.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    entropy_coef_delta: float = arg(
        1e-4,
        "Change of the coefficient at each optimizer step with --entropy-ctrl-type adaptive.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    entropy_coef_min: float = arg(
        0.0,
        "Least adaptive coefficient.",
        legal=NON_NEGATIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    entropy_coef_max: float = arg(
        0.005,
        "Largest adaptive coefficient.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    use_opsm: bool = arg(
        False,
        "Off-policy sequence mask: no policy loss for negative advantages in sequences that the policy has moved away from.",
    )
    opsm_delta: float = arg(
        1e-4,
        "Mean of old minus current log-prob in a sequence above which --use-opsm masks.",
        legal=NON_NEGATIVE,
        needs="use_opsm",
    )
    positive_nll_coef: float = arg(
        0.0,
        "VAPO: weight of the mean negative log-prob of samples with a reward above 0, added to the loss.",
        legal=NON_NEGATIVE,
        excludes="loss_type=sft_loss",
    )
    observation_loss_coef: float = arg(
        0.0,
        "ECHO: weight of the mean negative log-prob of observations, the tokens between an agent's answers, added to the loss.",
        legal=NON_NEGATIVE,
        excludes=("loss_type=sft_loss", "renormalize_sampled_log_probs"),
        needs="agent_function_path|agent_command|agent_environment|agent_worker_keys|custom_generate_function_path|rollout_function_path|load_debug_rollout_data",
    )
    use_rollout_logprobs: bool = arg(
        False,
        "Take the sampler's log-probs as the old ones, without recomputing them.",
        excludes="loss_type=sft_loss",
    )
    use_routing_replay: bool = arg(
        False,
        "Mixtures of experts: in the update, send each token to the experts that the pass of the old log-probs chose for it.",
        needs="@experts",
    )
    num_steps_per_rollout: int | None = arg(
        None,
        "Optimizer steps into which each rollout is cut; default: from --global-batch-size, else 1.",
        legal=AT_LEAST_ONE,
    )
    global_batch_size: int | None = arg(
        None, "Samples in each optimizer step, over all ranks.", legal=AT_LEAST_ONE
    )
    micro_batch_size: int = arg(
        1,
        "Samples in each forward pass of a data-parallel rank. Without it and without --use-dynamic-batch-size micro-batches have up to 4096 "
        "tokens; with --pipeline-model-parallel-size, --qkv-format bshd or token_mean_legacy one sample.",
        legal=AT_LEAST_ONE,
    )
    log_probs_micro_batch_size: int | None = arg(
        None,
        "As --micro-batch-size, for forward-only passes; default: the same.",
        legal=AT_LEAST_ONE,
    )
    use_dynamic_batch_size: bool = arg(
        False,
        "Fill micro-batches up to --max-tokens-per-gpu tokens, in place of --micro-batch-size samples.",
    )
    max_tokens_per_gpu: int | None = arg(
        None,
        "Tokens of a micro-batch with --use-dynamic-batch-size, times --context-parallel-size; a longer sequence gets a micro-batch of its own.",
        legal=AT_LEAST_ONE,
        needs="use_dynamic_batch_size",
    )
    log_probs_max_tokens_per_gpu: int | None = arg(
        None,
        "As --max-tokens-per-gpu, for forward-only passes; default: the same.",
        legal=AT_LEAST_ONE,
        needs="use_dynamic_batch_size",
    )
    balance_data: bool | None = arg(
        None,
        "Give data-parallel ranks the samples of an optimizer step by their work, in place of equal runs of them; default: with "
        "--use-dynamic-batch-size.",
    )
    qkv_format: str = arg(
        "thd",
        "thd: the sequences of a micro-batch end to end, without padding. bshd: each padded to the longest, for comparison.",
        choices=("thd", "bshd"),
        excludes="use_dynamic_batch_size",
    )
    log_probs_chunk_size: int = arg(
        1024,
        "Rows that the vocabulary projection takes at a time, for log-probs and for the loss; -1: all. Its columns are cut so that a block fits "
        "the cache, and no result changes beyond rounding.",
        legal=ALL_OR_SOME,
    )

    @property
    def pair_loss(self) -> PolicyLoss | None:
        """The loss of preferences that the run learns by, if it does."""
        if self.loss_type != "sft_loss" or self.custom_loss_function_path is not None:
            return None
        loss = policy_losses.get(self.policy_loss_type)
        return loss if loss.pairs else None

    @property
    def samples_together(self) -> int:
        """Neighbours that stay in one micro-batch: both answers of a pair."""
        return 1 if self.pair_loss is None else 2

    @property
    def trains_reward_model(self) -> bool:
        """Whether the network has a scalar head, which scores answers, in place of the vocabulary."""
        return self.pair_loss is not None and self.pair_loss.scores

    @property
    def compares_with_reference(self) -> bool:
        """Whether the loss of preferences needs a reference model."""
        return self.pair_loss is not None and "ref_log_probs" in self.pair_loss.needs


@dataclass(frozen=True, slots=True)
class GateConfig(CheckedSettings):
    """Numeric gates: what is checked in every run, and what a breach does."""

    max_train_rollout_diff: float | None = arg(
        None,
        "Absolute log-prob difference between trainer and sampler above which a rollout is a breach: its mean over the tokens or its 99th "
        "percentile; default 1e-3 in float32 on CPU, else 0.1.",
        legal=NON_NEGATIVE,
    )
    train_rollout_diff_patience: int = arg(
        3, "Breaches in a row before the run stops.", legal=AT_LEAST_ONE
    )
    max_consecutive_skipped_steps: int = arg(
        3,
        "Optimizer steps skipped in a row, for non-finite gradients, before the run stops.",
        legal=AT_LEAST_ONE,
    )
    max_failed_samples: float = arg(
        0.1,
        "Share of a rollout's samples without a usable response or reward above which the run stops.",
        legal=UNIT,
    )
