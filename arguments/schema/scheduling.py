"""Which prompts are sampled for a rollout, which groups are kept, and what happens to unfinished
groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class SchedulingConfig(CheckedSettings):
    over_sampling_batch_size: int | None = arg(
        None,
        "Prompts per draw; above --rollout-batch-size, the groups that finish first are kept. "
        "Default: --rollout-batch-size.",
        legal=AT_LEAST_ONE,
        at_least="rollout_batch_size",
    )
    dynamic_sampling_filter_path: str | None = arg(
        None,
        "module.function or file.py:function that decides whether a graded group is kept, called "
        "as function(args, samples); more prompts are drawn to replace dropped groups. slime's "
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std (DAPO) and "
        "its check_reward_nonzero_std_with_fallback are built in.",
    )
    max_num_gen_batches: int = arg(
        20,
        "Maximum number of draws of prompts per rollout; the run then stops, because the dynamic "
        "filter keeps too few groups.",
        legal=AT_LEAST_ONE,
        needs="dynamic_sampling_filter_path",
    )
    partial_rollout: bool = arg(
        False,
        "Continue unfinished groups in the next rollout instead of dropping them, once a rollout "
        "has enough groups.",
    )
    mask_offpolicy_in_partial_rollout: bool = arg(
        False,
        "Mask out tokens that a partial rollout generated in earlier rollouts, with older weights.",
        needs="partial_rollout",
    )
    rollout_slice_len: int | None = arg(
        None,
        "Tokens generated per round, after which finished groups are counted; responses depend on "
        "this value. Default: generate to the end; with --partial-rollout or --fully-async on the "
        "local engine, an eighth of --rollout-max-response-len.",
        legal=AT_LEAST_ONE,
        needs="partial_rollout|@over_samples|dynamic_sampling_filter_path|fully_async",
    )
    rollout_time_limit_s: float | None = arg(
        None,
        "Servers: seconds after a draw of prompts when unfinished responses are truncated, as if "
        "they had reached --rollout-max-response-len. Default: no limit.",
        legal=POSITIVE,
    )
    buffer_filter_path: str | None = arg(
        None,
        "module.function or file.py:function that selects groups from the buffer of unfinished "
        "ones, called as function(args, rollout_id, buffer, num_samples); default: the oldest "
        "first.",
        needs="partial_rollout|rollout_function_path",
    )
    rollout_sample_filter_path: str | None = arg(
        None,
        "module.function or file.py:function called as function(args, groups) with the groups of "
        "a rollout; a sample for which it sets remove_sample counts in its group's advantages but "
        "is not trained on.",
    )
    custom_generate_function_path: str | None = arg(
        None,
        "module.function or file.py:function that generates each response, e.g. with several "
        "turns or tools: async function(model, episode), or slime's async function(args, sample, "
        "sampling_params).",
    )
    custom_generate_timeout_s: float = arg(
        1800.0,
        "Time limit of --custom-generate-function-path per sample in seconds; after it the sample "
        "is dropped.",
        legal=POSITIVE,
        idle_without="custom_generate_function_path",
    )
    rollout_function_path: str | None = arg(
        None,
        "module.function or file.py:function that generates a rollout, with slime's signature: "
        "function(args, rollout_id, data_source, evaluation=False), on rank 0. It draws prompts "
        "from data_source and returns --rollout-batch-size groups; it is then responsible for "
        "over-sampling, filters and partial rollouts. "
        "slime.rollout.sglang_rollout.generate_rollout stands for the default.",
    )
    data_source_path: str | None = arg(
        None,
        "module.Class or file.py:Class of a data source in place of --prompt-data, with slime's "
        "interface, on rank 0: Class(args), with get_samples(num_samples), add_samples(samples), "
        "save(rollout_id), load(rollout_id) and len().",
        excludes=("load_debug_rollout_data", "@self_teacher, which reads rows of --prompt-data"),
    )
    eval_function_path: str | None = arg(
        None,
        "As --rollout-function-path, for evaluations, with evaluation=True; default: "
        "--rollout-function-path.",
        needs="eval_interval",
    )
    rollout_function_timeout_s: float = arg(
        3600.0,
        "Time limit of --rollout-function-path and --eval-function-path in seconds; after it the "
        "run stops.",
        legal=POSITIVE,
    )
    async_rollout: bool = arg(
        False,
        "Sample the next rollouts while training on this one; weights are updated in the middle of "
        "responses.",
        excludes="partial_rollout",
    )
    max_staleness: int | None = arg(
        None,
        "With --async-rollout: maximum staleness of a token in weight versions, and number of "
        "rollouts sampled ahead; 0 is equivalent to synchronous sampling. Default: 1; with "
        "--fully-async 4.",
        legal=NON_NEGATIVE,
        needs="async_rollout",
    )
    fully_async: bool = arg(
        False,
        "With --async-rollout: episodes go on across rollouts, and each rollout takes the groups "
        "that have ended. New groups start only if they can be trained on within --max-staleness.",
        needs="async_rollout",
        excludes=("rollout_function_path", "data_source_path", "rollout_time_limit_s"),
    )
    fully_async_single_samples: bool = arg(
        False,
        "With --fully-async: each sample is taken when it has ended, whatever the others of its "
        "prompt do, for estimators that compare no samples of a prompt. Pool and rollouts have as "
        "many samples as with groups.",
        needs="fully_async",
        excludes=(
            "group_rm",
            "dynamic_sampling_filter_path",
            "rollout_sample_filter_path",
            "custom_reward_post_process_path",
            "opd_success_reward, which needs another sample of the prompt",
        ),
    )
    num_parallel_generation_workers: int | None = arg(
        None,
        "With --fully-async: groups in flight at a time. Default: as many as --max-staleness "
        "allows, (--max-staleness + 1) * --rollout-batch-size.",
        legal=AT_LEAST_ONE,
        needs="fully_async",
    )
    stale_tokens: Literal["wait", "mask"] = arg(
        "wait",
        "With --fully-async, for groups that reach --max-staleness unfinished: 'wait' lets "
        "training wait for them; 'mask' does not, and masks out tokens that became too old, while "
        "their samples count in the baseline of their group.",
        needs="fully_async",
    )

    @property
    def staleness(self) -> int:
        """Weight versions that a token may lag behind the policy that trains on it, by
        --async-rollout; 0 without."""
        if not self.async_rollout:
            return 0
        if self.max_staleness is None:
            return 4 if self.fully_async else 1
        return self.max_staleness

    @property
    def renders_prompts(self) -> bool:
        """Whether a user function makes the responses, and may render the prompts itself."""
        paths = (self.custom_generate_function_path, self.rollout_function_path)
        return any(path is not None for path in paths)
