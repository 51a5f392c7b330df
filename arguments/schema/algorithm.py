"""Advantages, loss terms, and how a rollout is split into optimizer steps. The flags of each policy
loss are declared in the file of that loss."""

from __future__ import annotations

from dataclasses import dataclass

from arguments.schema.rollout import ALL_OR_SOME
from slime_like.advantages.outcome import SINGLETONS, Singleton
from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, UNIT, CheckedSettings, arg
from slime_like.losses.registry import PolicyLoss, policy_losses

_KL_IN_LOSS = "whose rewards it would not reach; use --use-kl-loss"


@dataclass(frozen=True, slots=True)
class AlgorithmConfig(CheckedSettings):
    loss_type: str = arg(
        "policy_loss",
        "policy_loss: reinforcement learning. sft_loss: supervised fine-tuning. dpo_loss, "
        "orpo_loss, rm_loss: train a policy or a reward model on preference pairs. kto_loss: train "
        "a policy on single answers, desirable or not. custom_loss: policy_loss with "
        "--custom-loss-function-path.",
        choices=(
            "policy_loss",
            "sft_loss",
            "dpo_loss",
            "orpo_loss",
            "kto_loss",
            "rm_loss",
            "custom_loss",
        ),
    )
    policy_loss_type: str = arg("ppo", "The policy loss.")
    custom_loss_function_path: str | None = arg(
        None,
        "module.function or file.py:function of a custom policy loss, called as function(inputs: "
        "LossInputs, config) -> PolicyLossOutput; config has the settings of all policy losses.",
    )
    loss_reduction: str = arg(
        "rollout_mean", "How token losses are weighted over the optimizer step."
    )
    loss_norm_length: int | None = arg(
        None,
        "Constant that --loss-reduction seq_mean_token_sum_norm divides each sequence's sum by, in "
        "tokens.",
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
        "GDPO: keys of the reward function's dict; each is a reward that is normalised within "
        "groups separately.",
        nargs="+",
        only_with="advantage_estimator=gdpo",
        excludes=("custom_reward_post_process_path", "kl_coef", "loss_type=sft_loss"),
        needs="reward_key, the reward for filters, metrics and evaluation",
    )
    gdpo_reward_weights: list[float] | None = arg(
        None,
        "GDPO: weight of each of --gdpo-reward-keys in the sum; default: 1.",
        nargs="+",
        needs="gdpo_reward_keys",
        excludes="loss_type=sft_loss",
    )
    custom_reward_post_process_path: str | None = arg(
        None,
        "module.function or file.py:function that post-processes the rewards of a rollout, in "
        "place of normalisation within groups: function(args, samples) -> (raw_rewards, rewards), "
        "on rank 0. With grpo and similar estimators the rewards are the advantages.",
        excludes=("loss_type=sft_loss", "debug_rollout_only, which computes no advantages"),
    )
    singleton_advantage: Singleton = arg(
        "zero",
        "Advantage in a group of one sample: zero, or the reward itself.",
        choices=SINGLETONS,
        excludes="loss_type=sft_loss",
    )
    normalize_advantages: bool = arg(
        False,
        "Whiten advantages over all active tokens of a rollout and all ranks.",
        aliases=("--advantage-batch-normalize",),
        excludes=(
            "loss_type=sft_loss",
            "advantage_estimator=gdpo, which normalises over the rollout itself",
        ),
    )
    gamma: float = arg(
        1.0,
        "Discount factor of rewards of later tokens or turns (reinforce_plus_plus, remax, otb, "
        "ppo, grpo_token, grpo_turn).",
        legal=UNIT,
        excludes="loss_type=sft_loss",
    )
    lambd: float = arg(
        1.0,
        "Lambda of generalised advantage estimation (ppo): 1 uses rewards only, 0 one-step "
        "bootstrapping from the critic.",
        legal=UNIT,
        excludes="loss_type=sft_loss",
        only_with="@critic",
    )
    value_lambd: float | None = arg(
        None,
        "Decoupled GAE (VC-PPO): lambda of the critic's returns; with 1 the reward of a long "
        "response does not decay. Default: --lambd.",
        legal=UNIT,
        excludes="loss_type=sft_loss",
        only_with="@critic",
    )
    lambd_length_alpha: float | None = arg(
        None,
        "VAPO: the policy's lambda is 1 - 1 / (this x active tokens of the response), 0.05 in its "
        "paper; --lambd is then the critic's.",
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
        "Weight the KL in the loss by the importance ratio of current to old policy, which makes "
        "its gradient unbiased.",
        excludes="loss_type=sft_loss",
        needs="use_kl_loss",
    )
    kl_coef: float = arg(
        0.0,
        "Weight of the KL penalty subtracted from the reward.",
        legal=NON_NEGATIVE,
        excludes=(
            "loss_type=sft_loss",
            "kl_loss_coef",
            f"custom_reward_post_process_path, {_KL_IN_LOSS}",
            f"custom_convert_samples_to_train_data_path, {_KL_IN_LOSS}",
        ),
    )
    kl_ctrl_type: str = arg(
        "fixed",
        "Controller of --kl-coef: constant, or adapted to keep the KL at --kl-target.",
        choices=("fixed", "adaptive"),
        excludes="loss_type=sft_loss",
        needs="kl_coef",
    )
    kl_target: float = arg(
        0.1,
        "KL per token that --kl-ctrl-type adaptive aims at.",
        legal=POSITIVE,
        aliases=("--kl-ctrl-kl-target",),
        excludes="loss_type=sft_loss",
        idle_without="kl_ctrl_type=adaptive",
    )
    kl_horizon: float = arg(
        10000.0,
        "Horizon of --kl-ctrl-type adaptive, in samples.",
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
        "Controller of the entropy bonus: constant, or adapted to keep --entropy-target, starting "
        "from --entropy-coef.",
        choices=("fixed", "adaptive"),
        excludes="loss_type=sft_loss",
    )
    entropy_target: float = arg(
        0.2,
        "Entropy per token, in nats, that --entropy-ctrl-type adaptive aims at; above it there is "
        "no bonus.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    entropy_coef_delta: float = arg(
        1e-4,
        "Change of the coefficient per optimizer step with --entropy-ctrl-type adaptive.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    entropy_coef_min: float = arg(
        0.0,
        "Lower bound of the adaptive coefficient.",
        legal=NON_NEGATIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
        at_most="entropy_coef_max",
    )
    entropy_coef_max: float = arg(
        0.005,
        "Upper bound of the adaptive coefficient.",
        legal=POSITIVE,
        excludes="loss_type=sft_loss",
        idle_without="entropy_ctrl_type=adaptive",
    )
    use_opsm: bool = arg(
        False,
        "Off-policy sequence masking (OPSM): drop sequences with negative advantages from which "
        "the policy has moved too far.",
    )
    opsm_delta: float = arg(
        1e-4,
        "Mean of (old - current) log-prob over a sequence above which --use-opsm masks it.",
        legal=NON_NEGATIVE,
        needs="use_opsm",
    )
    estr_threshold: float | None = arg(
        None,
        "Entropy-scaled trust region (ESTR): drop tokens whose squared log-ratio to the rollout "
        "engine's policy is above this times their entropy; default: off.",
        legal=POSITIVE,
    )
    estr_entropy_floor: float = arg(
        0.01,
        "Added to the entropy for --estr-threshold, in nats.",
        legal=POSITIVE,
        needs="estr_threshold",
    )
    positive_nll_coef: float = arg(
        0.0,
        "VAPO: weight of the mean NLL of samples with a positive reward, added to the loss.",
        legal=NON_NEGATIVE,
        excludes="loss_type=sft_loss",
    )
    observation_loss_coef: float = arg(
        0.0,
        "ECHO: weight of the mean NLL of observation tokens (those between an agent's turns), "
        "added to the loss.",
        legal=NON_NEGATIVE,
        excludes=("loss_type=sft_loss", "renormalize_sampled_log_probs"),
        needs="agent_function_path|agent_command|agent_environment|agent_worker_keys"
        "|custom_generate_function_path|rollout_function_path|load_debug_rollout_data",
    )
    use_rollout_logprobs: bool = arg(
        False,
        "Use the rollout engine's log-probs as the old log-probs instead of recomputing them with "
        "the trainer.",
        excludes="loss_type=sft_loss",
    )
    use_routing_replay: bool = arg(
        False,
        "MoE router replay (R2): in the update, route each token to the experts that the "
        "old-log-prob forward pass chose.",
        needs="@experts",
    )
    num_steps_per_rollout: int | None = arg(
        None,
        "Optimizer steps per rollout; default: from --global-batch-size, else 1.",
        legal=AT_LEAST_ONE,
    )
    global_batch_size: int | None = arg(
        None, "Samples per optimizer step, over all ranks.", legal=AT_LEAST_ONE
    )
    micro_batch_size: int = arg(
        1,
        "Samples per micro-batch of a data-parallel rank. Default without "
        "--use-dynamic-batch-size: micro-batches of up to 4096 tokens; one "
        "sample with --pipeline-model-parallel-size, --qkv-format bshd or token_mean_legacy.",
        legal=AT_LEAST_ONE,
    )
    log_probs_micro_batch_size: int | None = arg(
        None,
        "As --micro-batch-size, for forward-only passes; default: the same.",
        legal=AT_LEAST_ONE,
    )
    use_dynamic_batch_size: bool = arg(
        False,
        "Fill micro-batches up to --max-tokens-per-gpu tokens instead of --micro-batch-size "
        "samples.",
    )
    max_tokens_per_gpu: int | None = arg(
        None,
        "With --use-dynamic-batch-size: tokens per micro-batch and GPU, so times "
        "--context-parallel-size in all; a longer sequence gets its own micro-batch.",
        legal=AT_LEAST_ONE,
        needs="use_dynamic_batch_size",
        required_with="use_dynamic_batch_size",
    )
    log_probs_max_tokens_per_gpu: int | None = arg(
        None,
        "As --max-tokens-per-gpu, for forward-only passes; default: the same.",
        legal=AT_LEAST_ONE,
        needs="use_dynamic_batch_size",
    )
    balance_data: bool | None = arg(
        None,
        "Balance the samples of an optimizer step over data-parallel ranks by their compute cost "
        "instead of their number; default: on with --use-dynamic-batch-size.",
    )
    qkv_format: str = arg(
        "thd",
        "thd: pack the sequences of a micro-batch without padding. bshd: pad each to the longest, "
        "for comparison.",
        choices=("thd", "bshd"),
        excludes="use_dynamic_batch_size",
    )
    log_probs_chunk_size: int = arg(
        1024,
        "Rows per chunk of the output layer, for log-probs and loss; -1: all at once. The "
        "vocabulary is chunked to fit the cache. Results change by rounding only.",
        legal=ALL_OR_SOME,
    )

    @property
    def preference_loss(self) -> PolicyLoss | None:
        """The preference loss of the run, of pairs or of single answers, if it has one."""
        if self.loss_type != "sft_loss" or self.custom_loss_function_path is not None:
            return None
        loss = policy_losses.get(self.policy_loss_type)
        return loss if loss.pairs or loss.mismatched else None

    @property
    def pair_loss(self) -> PolicyLoss | None:
        """The preference loss of pairs, if the run has one."""
        loss = self.preference_loss
        return loss if loss is not None and loss.pairs else None

    @property
    def scores_mismatches(self) -> bool:
        """Whether each answer comes with a mismatched one, for a reference point (KTO)."""
        return self.preference_loss is not None and self.preference_loss.mismatched

    @property
    def samples_together(self) -> int:
        """Number of adjacent samples that stay on one rank: 2 for preference pairs, and for an
        answer and its mismatched one."""
        return 1 if self.preference_loss is None else 2

    @property
    def trains_reward_model(self) -> bool:
        """Whether the model has a scalar value head instead of the output layer."""
        return self.pair_loss is not None and self.pair_loss.scores

    @property
    def compares_with_reference(self) -> bool:
        """Whether the preference loss needs a reference model."""
        loss = self.preference_loss
        return loss is not None and "ref_log_probs" in loss.needs

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term or a preference loss uses a reference model."""
        return self.use_kl_loss or self.kl_coef != 0 or self.compares_with_reference


# of what certificates cannot compare
CERTIFIES_NO = (
    "multimodal_keys, whose images certificates do not have",
    "@reward_model",
    "custom_model_provider_path, whose model transformers does not have",
)


@dataclass(frozen=True, slots=True)
class GuardConfig(CheckedSettings):
    """Numeric guards, checked in every run, and their limits."""

    certify: bool = arg(
        False,
        "Compare trainer, transformers in float64 and the engine layer by layer on the same "
        "tokens, write the certificate and end; the exit status is 1 if they differ. `slime-like "
        "certify` sets it.",
        needs="hf_checkpoint",
        excludes=CERTIFIES_NO,
    )
    certify_interval: int | None = arg(
        None,
        "Do so before the first rollout and then every this many rollouts, and warn of what is "
        "found. Rank 0 holds the model two or three more times meanwhile, once in float64.",
        legal=AT_LEAST_ONE,
        needs="hf_checkpoint",
        excludes=("certify", *CERTIFIES_NO),
    )
    certify_search_minutes: float = arg(
        10.0,
        "Time of a certificate for the causes of layers that differ, all together, and once more "
        "for settings of the whole model that explain the log-probs of servers; what is not found "
        "by then is an unknown cause.",
        legal=POSITIVE,
        idle_without="certify|certify_interval",
    )
    max_train_rollout_diff: float | None = arg(
        None,
        "Limit of the absolute log-prob difference between trainer and rollout engine, for its "
        "mean over tokens and its 99th percentile; default 1e-3 in float32 on CPU, else 0.1. A "
        "rollout above it is a breach.",
        legal=NON_NEGATIVE,
    )
    true_on_policy_mode: bool = arg(
        False,
        "Require that the log-probs of trainer and rollout engine are equal bit for bit, in every "
        "rollout; the first difference ends the run. With the local engine the trainer itself "
        "draws the tokens that transformers' model drafts. SGLang servers get "
        "--enable-deterministic-inference, which needs a GPU.",
        excludes=(
            "loss_type=sft_loss",
            "rollout_engine=vllm",
            "debug_rollout_only",
            "debug_train_only",
            "load_debug_rollout_data, whose weights were another run's",
            "use_rollout_logprobs, which replaces the trainer's log-probs; remove that flag",
            "async_rollout, whose tokens older weights have sampled",
            "partial_rollout, whose tokens older weights have sampled",
            "rollout_top_p<1, which samples from another distribution than the one trained on",
            "rollout_top_k>0, which samples from another distribution than the one trained on",
            "use_dynamic_batch_size, whose micro-batches have several sequences, and the bits of "
            "a matrix product depend on its size",
            "micro_batch_size>1, since the bits of a matrix product depend on its size",
            "log_probs_micro_batch_size>1, since the bits of a matrix product depend on its size",
        ),
    )
    train_rollout_diff_patience: int = arg(
        3, "Consecutive breaches before the run stops.", legal=AT_LEAST_ONE
    )
    max_consecutive_skipped_steps: int = arg(
        3,
        "Consecutive optimizer steps skipped for non-finite gradients before the run stops.",
        legal=AT_LEAST_ONE,
    )
    max_failed_samples: float = arg(
        0.1,
        "Fraction of failed samples (no usable response or reward) in a rollout above which the "
        "run stops.",
        legal=UNIT,
    )
