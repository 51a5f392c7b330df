"""Which prompts are sampled for a rollout, which of the groups are kept, and what becomes of those
that are not finished."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class SchedulingConfig(CheckedSettings):
    over_sampling_batch_size: int | None = arg(
        None,
        "Prompts that are drawn at a time; above --rollout-batch-size, the first groups to end are kept. Default: --rollout-batch-size.",
        legal=AT_LEAST_ONE,
    )
    dynamic_sampling_filter_path: str | None = arg(
        None,
        "module.function or file.py:function that decides whether a graded group is kept, called as function(args, samples); more prompts are "
        "drawn for those that are not. slime's slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std (DAPO) and its "
        "check_reward_nonzero_std_with_fallback are built in.",
    )
    max_num_gen_batches: int = arg(
        20,
        "Draws of prompts for one rollout after which the run stops, because the dynamic filter keeps too few groups.",
        legal=AT_LEAST_ONE,
        needs="dynamic_sampling_filter_path",
    )
    partial_rollout: bool = arg(
        False,
        "Groups that are not finished when a rollout has enough go on in the next one, in place of being lost.",
    )
    mask_offpolicy_in_partial_rollout: bool = arg(
        False,
        "Do not train on the tokens that a partial rollout wrote before this rollout, under older weights.",
        needs="partial_rollout",
    )
    rollout_slice_len: int | None = arg(
        None,
        "Tokens by which all responses grow before it is looked whether enough groups have ended; a response depends on where it was cut. Default: "
        "to the end; local engine, with --partial-rollout: an eighth of --rollout-max-response-len.",
        legal=AT_LEAST_ONE,
    )
    rollout_time_limit_s: float | None = arg(
        None,
        "Servers: seconds after a draw of prompts when responses that still run end where they are, as if they had reached "
        "--rollout-max-response-len. Default: no limit.",
        legal=POSITIVE,
    )
    buffer_filter_path: str | None = arg(
        None,
        "module.function or file.py:function that takes groups out of the buffer of unfinished ones, called as "
        "function(args, rollout_id, buffer, num_samples); default: the oldest first.",
        needs="partial_rollout|rollout_function_path",
    )
    rollout_sample_filter_path: str | None = arg(
        None,
        "module.function or file.py:function called as function(args, groups) with the groups of a rollout; a sample whose remove_sample it "
        "sets counts in its group's advantages and is not trained on.",
    )
    custom_generate_function_path: str | None = arg(
        None,
        "module.function or file.py:function that makes each response, of several turns or with tools: async function(model, episode), or "
        "slime's async function(args, sample, sampling_params).",
    )
    custom_generate_timeout_s: float = arg(
        1800.0,
        "Seconds after which --custom-generate-function-path is given up for a sample, which is then lost.",
        legal=POSITIVE,
    )
    rollout_function_path: str | None = arg(
        None,
        "module.function or file.py:function that makes a whole rollout, as slime calls it: function(args, rollout_id, data_source, "
        "evaluation=False), on rank 0. It draws prompts from data_source and returns --rollout-batch-size groups; over-sampling, filters and "
        "partial rollouts are then its own. slime's slime.rollout.sglang_rollout.generate_rollout is what a run does without it.",
    )
    data_source_path: str | None = arg(
        None,
        "module.Class or file.py:Class of the prompts, in place of those of --prompt-data, as slime makes it on rank 0: Class(args), with "
        "get_samples(num_samples), add_samples(samples), save(rollout_id), load(rollout_id) and len().",
        excludes="load_debug_rollout_data",
    )  # fmt: skip
    eval_function_path: str | None = arg(
        None,
        "As --rollout-function-path, for evaluations, with evaluation=True; default: --rollout-function-path.",
    )
    rollout_function_timeout_s: float = arg(
        3600.0,
        "Seconds after which the run stops because --rollout-function-path or --eval-function-path did not return.",
        legal=POSITIVE,
    )
    async_rollout: bool = arg(
        False,
        "Sample the next rollouts while this one is trained on; new weights reach responses in the middle.",
        excludes="partial_rollout",
    )
    max_staleness: int | None = arg(
        None,
        "With --async-rollout: weight versions that a token may be behind the policy that trains on it, and rollouts that are sampled ahead; "
        "0 samples as without the switch. Default: 1.",
        legal=NON_NEGATIVE,
        needs="async_rollout",
    )
