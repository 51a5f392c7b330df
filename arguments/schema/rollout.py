"""Generation of responses, and their rewards."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    POSITIVE,
    TEMPERATURE,
    UNIT_OPEN_LOW,
    CheckedSettings,
    Range,
    arg,
)

ALL_OR_SOME = Range("-1 (all) or >= 1", lambda k: k == -1 or k >= 1)


@dataclass(frozen=True, slots=True)
class RolloutConfig(CheckedSettings):
    num_rollout: int | None = arg(
        None, "Rollouts (generate, then train) in the whole run.", legal=POSITIVE
    )
    num_epoch: int | None = arg(
        None,
        "Epochs over the prompts, in place of --num-rollout, which takes precedence.",
        legal=POSITIVE,
    )
    rollout_batch_size: int = arg(32, "Prompts per rollout.", legal=AT_LEAST_ONE)
    n_samples_per_prompt: int = arg(
        8, "Responses per prompt: GRPO's group size.", legal=AT_LEAST_ONE
    )
    rollout_engine: str = arg(
        "local",
        "The rollout engine.",
    )
    rollout_max_response_len: int = arg(128, "Longest response, in tokens.", legal=AT_LEAST_ONE)
    rollout_temperature: float = arg(
        1.0,
        "Sampling temperature; the trainer's log-probs use the same.",
        legal=TEMPERATURE,
        excludes="@served_teacher, so it must be 1; or use --opd-type megatron",
    )
    rollout_top_p: float = arg(
        1.0, "Nucleus sampling: smallest set of tokens with this probability.", legal=UNIT_OPEN_LOW
    )
    rollout_top_k: int = arg(
        -1, "Sample from the k most likely tokens; -1: all.", legal=ALL_OR_SOME
    )
    renormalize_sampled_log_probs: bool = arg(
        False,
        "With --rollout-top-k or --rollout-top-p: normalise log-probs and entropy of rollout "
        "engine, policy, reference and teacher over the sampling mask (the tokens kept by top-k "
        "and top-p), which the engine returns with each sample. Costs 4 bytes per row and token "
        "of the largest mask in a micro-batch; --rollout-top-k bounds the mask of --rollout-top-p, "
        "and is required with SGLang, which then reports masks from version 0.5.23 on.",
        needs="rollout_top_p<1|rollout_top_k>0",
        excludes=(
            "loss_type=sft_loss",
            "rollout_engine=vllm",
            "@served_teacher",
        ),
    )
    use_rollout_routing_replay: bool = arg(
        False,
        "MoE router replay (R3): route each token to the experts that the rollout engine used, in "
        "the old-log-prob forward pass and in the update; metrics have the fraction of tokens "
        "where the router would choose others. --use-routing-replay has no further effect.",
        needs="@experts",
        excludes="loss_type=sft_loss",
    )
    use_rollout_indexer_replay: bool = arg(
        False,
        "Replay of sparse attention's choice: each query attends to the keys that the rollout "
        "engine's indexers selected, in the old-log-prob forward pass and in the update; metrics "
        "have the share of keys that the trainer would not have selected. Costs 4 bytes per query "
        "with a choice, indexer and key (index_topk).",
        needs="@indexer",
        excludes=("loss_type=sft_loss", "rollout_engine=vllm"),
    )
    rollout_stop: list[str] | None = arg(None, "Strings that end a response.", nargs="+")
    rollout_stop_token_ids: list[int] | None = arg(
        None, "Token ids that end a response, in addition to the model's own.", nargs="+"
    )
    rollout_skip_special_tokens: bool | None = arg(
        None,
        "Special tokens that the text of a response, as rewards and user functions see it, lacks: "
        "all of them; with --no-rollout-skip-special-tokens none (slime's default). Default: only "
        "the one that ended the response, so that a reward sees those inside it.",
        excludes="loss_type=sft_loss",
    )
    rollout_local_batch_size: int | None = arg(
        None,
        "Batch size of the local engine. Default: as many samples as fit into 256 MiB of KV cache, "
        "from 64 to 512.",
        legal=AT_LEAST_ONE,
    )
    sample_buffer_size: int = arg(
        64 * 2**20,
        "Bytes of samples in flight per rank, when samples are sent from the ranks that generated "
        "them to the ranks that train on them.",
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
        "module.function or file.py:function of a custom reward, called as function(args, "
        "sample), sync or async. It takes precedence over --rm-type.",
    )
    reward_key: str | None = arg(
        None, "Key of the reward to train on, if the reward function returns a dict."
    )
    rm_timeout_s: float = arg(
        10.0,
        "Time limit of a reward in seconds; after it the sample has no reward.",
        legal=POSITIVE,
    )
    rm_num_workers: int = arg(
        0,
        "Number of reward processes, which are killed if they hang; 0: a share of the cores, at "
        "most 4.",
        legal=NON_NEGATIVE,
    )
    max_abs_reward: float = arg(1e6, "Largest legal magnitude of a reward.", legal=POSITIVE)
    rm_type_from_metadata: bool = arg(
        False,
        "Let a row's metadata key rm_type select its reward instead of --rm-type. Without this "
        "flag such rows are rejected, because untrusted data would choose which code runs.",
    )
    group_rm: bool = arg(
        False,
        "Call --custom-rm-path with all samples of a group, as function(args, samples); it returns "
        "a list.",
        needs="custom_rm_path",
    )
    sum_token_rewards: bool = arg(
        False,
        "If the reward function returns per-token rewards, train on their sum as one reward of the "
        "response.",
    )
    rm_url: str | None = arg(
        None,
        "Reward server of --rm-type remote_rm: receives prompt, response and label as JSON and "
        "returns a number or an object (--reward-key). Of --rm-type reward_model: SGLang, vLLM or "
        "slime-like reward-server, http://host:port.",
        required_with="rm_type=remote_rm|rm_type=reward_model",
    )
    rm_concurrency: int | None = arg(
        None,
        "Most samples of a rank that are with a server (--rm-type remote_rm, judge, reward_model) "
        "or an async --custom-rm-path at a time. Default: 64 per reward process.",
        legal=AT_LEAST_ONE,
        idle_without="@waiting_rewards",
    )
    rm_cache_size: int = arg(
        100_000,
        "Answers of --rm-type judge and reward_model that a rank keeps: an equal request is not "
        "made again. 0: none.",
        legal=NON_NEGATIVE,
        idle_without="@kept_answers",
    )
