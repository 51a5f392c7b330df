"""Generation of responses, and their rewards."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import (
    AT_LEAST_ONE,
    POSITIVE,
    TEMPERATURE,
    UNIT_OPEN_LOW,
    CheckedSettings,
    Range,
    arg,
)

TOP_K = Range("-1 (all) or >= 1", lambda k: k == -1 or k >= 1)


@dataclass(frozen=True, slots=True)
class RolloutConfig(CheckedSettings):
    num_rollout: int | None = arg(
        None, "Rollouts (generate, then train) in the whole run.", legal=POSITIVE
    )
    num_epoch: int | None = arg(
        None,
        "Passes over the prompts, in place of --num-rollout.",
        legal=POSITIVE,
        excludes="num_rollout",
    )
    rollout_batch_size: int = arg(32, "Prompts in each rollout.", legal=AT_LEAST_ONE)
    n_samples_per_prompt: int = arg(
        8, "Responses to each prompt: the group of GRPO.", legal=AT_LEAST_ONE
    )
    rollout_engine: str = arg(
        "local",
        "What samples responses.",
    )
    rollout_max_response_len: int = arg(128, "Longest response, in tokens.", legal=AT_LEAST_ONE)
    rollout_temperature: float = arg(
        1.0, "Sampling temperature; the trainer's log-probs use the same.", legal=TEMPERATURE
    )
    rollout_top_p: float = arg(
        1.0, "Nucleus sampling: smallest set of tokens with this probability.", legal=UNIT_OPEN_LOW
    )
    rollout_top_k: int = arg(-1, "Sample from the k likeliest tokens; -1: from all.", legal=TOP_K)
    renormalize_sampled_log_probs: bool = arg(
        False,
        "With --rollout-top-k or --rollout-top-p: log-probs and entropy, the sampler's and those of policy, reference and teacher, are over the "
        "tokens that the sampler chose from, which come with each sample. Takes 4 bytes for each token of the largest set of a micro-batch, at "
        "each of its rows; --rollout-top-k bounds the sets of --rollout-top-p.",
        needs="rollout_top_p<1|rollout_top_k>0",
        excludes=("loss_type=sft_loss", "rollout_engine=sglang"),
    )
    use_rollout_routing_replay: bool = arg(
        False,
        "Mixtures of experts: send each token to the experts that the sampler sent it to, in the pass of the old log-probs and in the update; "
        "the share of tokens whose router would choose others is reported. --use-routing-replay beside it changes nothing.",
        needs="@experts",
        excludes="loss_type=sft_loss",
    )
    rollout_stop: list[str] | None = arg(None, "Strings that end a response.", nargs="+")
    rollout_stop_token_ids: list[int] | None = arg(
        None, "Token ids that end a response, besides the model's own.", nargs="+"
    )
    rollout_local_batch_size: int | None = arg(
        None,
        "Samples that the local engine decodes together. Default: as many as 256 MiB of keys and values hold, from 64 to 512.",
        legal=AT_LEAST_ONE,
    )
    sample_buffer_size: int = arg(
        64 * 2**20,
        "Bytes of samples under way at a time on a rank, on their way from where they were sampled to the ranks that train on them.",
        legal=AT_LEAST_ONE,
    )


@dataclass(frozen=True, slots=True)
class RewardConfig(CheckedSettings):
    rm_type: str | None = arg(
        None,
        "The reward.",
    )
    custom_rm_path: str | None = arg(
        None,
        "module.function or file.py:function of your own reward, called as function(args, sample), sync or async.",
    )
    reward_key: str | None = arg(
        None, "Where the reward function returns a dict: the key to train on."
    )
    rm_timeout_s: float = arg(
        10.0, "Seconds after which a reward is given up and the sample is unscored.", legal=POSITIVE
    )
    rm_num_workers: int = arg(
        0,
        "Processes that grade, killed hard when they hang; 0: a share of the cores, at most 4.",
        legal=Range(">= 0", lambda x: x >= 0),
    )
    max_abs_reward: float = arg(1e6, "A reward of a larger magnitude is an error.", legal=POSITIVE)
    rm_type_from_metadata: bool = arg(
        False,
        "A row's metadata key rm_type chooses its reward, in place of --rm-type. Without it such rows are refused: data that others wrote would choose what runs here.",
    )
    group_rm: bool = arg(
        False,
        "--custom-rm-path is called with all samples of a group, as function(args, samples), and returns a list.",
        needs="custom_rm_path",
    )
    sum_token_rewards: bool = arg(
        False,
        "Where the reward function returns a number for each token: train on their sum, as one reward of the response.",
    )
    rm_url: str | None = arg(
        None,
        "Reward server of --rm-type remote_rm: gets prompt, response and label as JSON, answers a number or an object (--reward-key).",
        required_with="rm_type=remote_rm",
    )
