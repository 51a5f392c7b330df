"""Rules between settings, continued: the algorithm, optimizer, data, rewards and evaluation. And the warnings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from arguments.critic_layout import critic_layout_is_possible
from arguments.eval_sets import EvalSet
from arguments.from_dataclass import Flag
from arguments.loss_choice import loss_fields
from arguments.validate import TASK_PREFIX, Rule, Settings, problem
from arguments.validate_algorithm import ADVANTAGE_RULES, CORRECTION_RULES, idle_advantage_settings, idle_correction_settings
from arguments.validate_batches import BATCH_RULES, MICRO_BATCH_RULES, global_batch_of
from arguments.validate_critic import CRITIC_RULES
from arguments.validate_distillation import DISTILLATION_RULES, SLIME_REWARD, nothing_to_learn
from arguments.validate_files import FILE_RULES
from arguments.validate_lora import LORA_RULES, nothing_to_overlap
from arguments.validate_losses import LOSS_RULES, gmpo_needs_one_advantage, wide_gspo_range
from arguments.validate_moe import MOE_RULES, MOE_WARNINGS
from arguments.validate_network import NETWORK_RULES
from arguments.validate_optimizer import OPTIMIZER_RULES, OPTIMIZER_WARNINGS
from arguments.validate_parallel import PARALLEL_RULES
from arguments.validate_scheduling import SCHEDULING_RULES
from arguments.validate_server import only_the_server_has_these
from arguments.validate_sglang import SGLANG_RULES
from arguments.validate_supervised import SUPERVISED_RULES
from slime_like.advantages.registry import advantage_estimators, compares_samples
from slime_like.config import Problem, flag_name
from slime_like.losses.registry import policy_losses
from slime_like.rewards.custom import load_function
from slime_like.rewards.registry import rewards

_ROW_RANGE = re.compile(r"@\[[^\]]*\]$")

# --- algorithm -------------------------------------------------------------------------------------------------------


def kl_in_one_place(s: Settings) -> list[Problem]:
    if s.algorithm.kl_coef and s.algorithm.kl_loss_coef:
        return problem("kl_coef", s.algorithm.kl_coef, f"and --kl-loss-coef {s.algorithm.kl_loss_coef} are both non-zero; choose one")
    return []


def kl_loss_needs_its_switch(s: Settings) -> list[Problem]:
    if s.algorithm.use_kl_loss or s.algorithm.loss_type == "sft_loss":
        return []
    found = []
    if s.algorithm.kl_loss_coef:
        found += problem("kl_loss_coef", s.algorithm.kl_loss_coef, "has no effect without --use-kl-loss; add the switch")
    if s.algorithm.use_unbiased_kl:
        found += problem("use_unbiased_kl", None, "has no effect without --use-kl-loss; add the switch")
    if s.algorithm.kl_loss_type is not None and not s.algorithm.kl_coef:
        found += problem("kl_loss_type", s.algorithm.kl_loss_type, "has no effect without --use-kl-loss or --kl-coef; leave it out")
    return found


def kl_needs_a_reference(s: Settings) -> list[Problem]:
    needs = "--use-kl-loss" if s.algorithm.use_kl_loss else "--kl-coef" if s.algorithm.kl_coef else None
    if needs is None or s.model.ref_load is not None or s.lora.lora_rank or not s.trains or s.algorithm.loss_type == "sft_loss":
        return []
    return problem("ref_load", None, f"is missing; {needs} needs a reference model, usually the same folder as --hf-checkpoint")


def offloading_needs_a_reference(s: Settings) -> list[Problem]:
    if s.model.ref_offload and s.model.ref_load is None:
        return problem("ref_offload", None, "has no effect without --ref-load; give the reference model's folder")
    return []


def reduction_fits_the_loss(s: Settings) -> list[Problem]:
    required = s.loss.required_reductions
    if required and s.algorithm.loss_reduction not in required:
        return problem(
            "loss_reduction", s.algorithm.loss_reduction, f"--policy-loss-type {s.loss.name} needs {' or '.join(sorted(required))}"
        )
    return []


def norm_length(s: Settings) -> list[Problem]:
    wanted = s.algorithm.loss_reduction == "seq_mean_token_sum_norm"
    if wanted and s.algorithm.loss_norm_length is None:
        return problem("loss_norm_length", None, "is missing; --loss-reduction seq_mean_token_sum_norm divides by it")
    if not wanted and s.algorithm.loss_norm_length is not None:
        return problem("loss_norm_length", s.algorithm.loss_norm_length, "goes with --loss-reduction seq_mean_token_sum_norm only")
    return []


# --- optimizer and schedule ------------------------------------------------------------------------------------------


def learning_rate(s: Settings) -> list[Problem]:
    lr, min_lr = s.core.get("lr"), s.core.get("min_lr")
    if lr is None:
        return problem("lr", None, "is missing: the learning rate, > 0") if s.trains else []
    if lr <= 0:
        return problem("lr", lr, "must be > 0")
    if min_lr is not None and not 0 <= min_lr <= lr:
        return problem("min_lr", min_lr, f"must be between 0 and --lr {lr}")
    return []


def optimizer_numbers(s: Settings) -> list[Problem]:
    found = []
    for name in ("weight_decay", "clip_grad"):
        if s.core.get(name, 0.0) < 0:
            found += problem(name, s.core[name], "must be >= 0")
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if not 0 <= s.core.get(name, 0.0) < 1:
            found += problem(name, s.core[name], "must be 0 <= x < 1")
    if s.core.get("adam_eps", 1.0) <= 0:
        found += problem("adam_eps", s.core["adam_eps"], "must be > 0")
    return found


def warmup(s: Settings) -> list[Problem]:
    iters, fraction, decay = s.schedule.lr_warmup_iters, s.schedule.lr_warmup_fraction, s.schedule.lr_decay_iters
    if iters and fraction is not None:
        return problem("lr_warmup_fraction", fraction, "excludes --lr-warmup-iters; give one of them")
    if decay is not None and iters >= decay:
        return problem("lr_warmup_iters", iters, f"must be below --lr-decay-iters {decay}")
    lr = s.core.get("lr")
    if lr is not None and s.schedule.lr_warmup_init > lr:
        return problem("lr_warmup_init", s.schedule.lr_warmup_init, f"must not be above --lr {lr}")
    return []


def wsd(s: Settings) -> list[Problem]:
    if s.schedule.lr_decay_style == "WSD" and s.schedule.lr_wsd_decay_iters is None:
        return problem("lr_wsd_decay_iters", None, "is missing; --lr-decay-style WSD needs the length of its annealing")
    if s.schedule.lr_decay_style != "WSD" and s.schedule.lr_wsd_decay_iters is not None:
        return problem("lr_wsd_decay_iters", s.schedule.lr_wsd_decay_iters, "goes with --lr-decay-style WSD only; leave it out")
    return []


def weight_decay_schedule(s: Settings) -> list[Problem]:
    start, end, style = s.schedule.start_weight_decay, s.schedule.end_weight_decay, s.schedule.weight_decay_incr_style
    if style == "constant" and (start is not None or end is not None):
        name = "start_weight_decay" if start is not None else "end_weight_decay"
        return problem(
            name, getattr(s.schedule, name), "needs --weight-decay-incr-style linear or cosine; for a constant one use --weight-decay"
        )
    if style != "constant" and (start is None or end is None):
        return problem("weight_decay_incr_style", style, "needs --start-weight-decay and --end-weight-decay")
    return []


def overlap(s: Settings) -> list[Problem]:
    found = []
    if s.core.get("overlap_param_gather"):
        for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if not s.core.get(name):
                found += problem("overlap_param_gather", None, f"needs {flag_name(name)}; add it")
    return found


# --- data, rewards, evaluation ---------------------------------------------------------------------------------------


def prompts(s: Settings) -> list[Problem]:
    path = s.data.prompt_data
    if path is None:
        if s.debug.load_debug_rollout_data is not None:
            return []
        return problem("prompt_data", None, f"is missing: a .jsonl or .parquet file, or {TASK_PREFIX}<task>")
    return missing_data("prompt_data", path)


def missing_data(name: str, spec: str) -> list[Problem]:
    """A data source that is not there. Its contents are checked when it is opened."""
    if spec.startswith(TASK_PREFIX):
        library = rewards.get("task").missing_library()
        return [] if library is None else problem(name, spec, f"needs {library}")
    path = Path(_ROW_RANGE.sub("", spec))
    if path.is_file():
        return []
    return problem(name, spec, "is a folder; name a .jsonl or .parquet file in it" if path.is_dir() else "no such file")


WITHOUT_LABEL = ("task", "zero", "code", "remote_rm")  # zero compares with nothing, the others with what is in the metadata


def reward_is_chosen(s: Settings) -> list[Problem]:
    reward = s.reward
    sources = [s.data.prompt_data or ""] if s.generates else []
    graded = [each for each in s.eval_sets if each.rm_type is None and each.custom_rm_path is None] if s.evaluates else []
    if reward.custom_rm_path is not None or all(source.startswith(TASK_PREFIX) for source in [*sources, *[each.path for each in graded]]):
        return []
    if reward.rm_type is None:
        return problem("rm_type", None, f"is missing: give --rm-type, --custom-rm-path, or a {TASK_PREFIX} source, which scores itself")
    if reward.rm_type not in WITHOUT_LABEL and s.data.label_key is None and (sources or any(each.label_key is None for each in graded)):
        return problem("label_key", None, f"is missing: the field with the reference answer, for --rm-type {reward.rm_type}")
    return []


def reward_is_usable(s: Settings) -> list[Problem]:
    name, path = s.reward.rm_type, s.reward.custom_rm_path
    if path is not None and path.startswith(SLIME_REWARD):  # of distillation, which has a rule of its own
        return []
    if name is not None and path is not None:
        return problem("rm_type", name, "excludes --custom-rm-path; give one of them")
    if name is not None and (library := rewards.get(name).missing_library()) is not None:
        return problem("rm_type", name, f"needs {library}")
    if path is not None and (s.generates or s.evaluates):
        try:
            load_function(path)
        except ValueError as error:
            return problem("custom_rm_path", None, str(error).removeprefix("--custom-rm-path "))
    return []


def evaluation(s: Settings) -> list[Problem]:
    words, interval, file = s.eval.eval_prompt_data, s.eval.eval_interval, s.eval.eval_config
    if words is not None and file is not None:
        return problem("eval_config", file, "excludes --eval-prompt-data; give one of them")
    if words is None and file is None:
        return [] if interval is None else problem("eval_interval", interval, "needs --eval-prompt-data name path, or --eval-config")
    name = "eval_prompt_data" if file is None else "eval_config"
    if interval is None:
        return problem("eval_interval", None, f"is missing; {flag_name(name)} is used every this many rollouts")
    if words is not None and len(words) % 2:
        return problem("eval_prompt_data", " ".join(words), "must be pairs: name path [name path ...]")
    if words is not None and len(set(words[::2])) < len(words) // 2:
        return problem("eval_prompt_data", " ".join(words), "names a set twice")
    found = [p for each in s.eval_sets for p in missing_data(name, each.path)]
    return found + [p for each in s.eval_sets for p in _own_reward(each, s.reward.rm_url)]


def _own_reward(each: EvalSet, rm_url: str | None) -> list[Problem]:
    """The reward that a set of --eval-config names."""
    if each.rm_type is not None and each.custom_rm_path is not None:
        return problem("eval_config", None, f"set {each.name}: rm_type excludes custom_rm_path; give one of them")
    if each.rm_type is not None and each.rm_type not in rewards.names():
        return problem("eval_config", None, f"set {each.name}: rm_type is {each.rm_type!r}; legal values: {', '.join(rewards.names())}")
    if each.rm_type is not None and (library := rewards.get(each.rm_type).missing_library()) is not None:
        return problem("eval_config", None, f"set {each.name}: {each.rm_type} needs {library}")
    if each.rm_type == "remote_rm" and rm_url is None:
        return problem("eval_config", None, f"set {each.name}: rm_type remote_rm needs --rm-url")
    if each.custom_rm_path is not None:
        try:
            load_function(each.custom_rm_path)
        except ValueError as error:
            return problem("eval_config", None, f"set {each.name}: {str(error).replace('--custom-rm-path', 'custom_rm_path')}")
    return []


def truncates(s: Settings) -> bool:
    return s.rollout.rollout_top_p < 1 or s.rollout.rollout_top_k != -1


def renormalization_needs_truncation(s: Settings) -> list[Problem]:
    name = "renormalize_sampled_log_probs"
    if not s.rollout.renormalize_sampled_log_probs:
        return []
    if s.algorithm.loss_type == "sft_loss":
        return problem(name, None, "has no effect with --loss-type sft_loss, which samples nothing to train on; leave it out")
    if not truncates(s):
        return problem(name, None, "has no effect: neither --rollout-top-p below 1 nor --rollout-top-k is given; leave it out")
    return []


RULES: tuple[Rule, ...] = (
    *PARALLEL_RULES, *NETWORK_RULES, *MOE_RULES, *BATCH_RULES, *MICRO_BATCH_RULES,
    kl_in_one_place, kl_loss_needs_its_switch, kl_needs_a_reference, offloading_needs_a_reference, reduction_fits_the_loss, norm_length, *SUPERVISED_RULES, *LOSS_RULES,
    *CORRECTION_RULES, *ADVANTAGE_RULES, *CRITIC_RULES, critic_layout_is_possible, *LORA_RULES, *DISTILLATION_RULES,
    learning_rate, optimizer_numbers, *OPTIMIZER_RULES, warmup, wsd, weight_decay_schedule, overlap,
    prompts, renormalization_needs_truncation, reward_is_chosen, reward_is_usable, evaluation, *SCHEDULING_RULES, *SGLANG_RULES, *FILE_RULES, only_the_server_has_these,
)  # fmt: skip


# --- warnings --------------------------------------------------------------------------------------------------------

Warn = Callable[[Settings], str | None]


def reduction_is_recommended(s: Settings) -> str | None:
    recommended = s.loss.recommended_reductions
    if not recommended or s.algorithm.loss_reduction in recommended or s.algorithm.loss_type == "sft_loss":
        return None
    return f"--policy-loss-type {s.loss.name} is meant for --loss-reduction {' or '.join(sorted(recommended))}, not {s.algorithm.loss_reduction}"


def k1_in_the_loss(s: Settings) -> str | None:
    if s.algorithm.use_kl_loss and s.algorithm.kl_loss_type == "k1" and not s.algorithm.use_unbiased_kl:
        return "--kl-loss-type k1 in the loss has an expected gradient of zero, only noise; use low_var_kl, k2 or --use-unbiased-kl"
    return None


def groups_of_one(s: Settings) -> str | None:
    compares = compares_samples(advantage_estimators.get(s.algorithm.advantage_estimator))
    single = s.rollout.n_samples_per_prompt == 1 and s.algorithm.singleton_advantage == "zero"
    if s.algorithm.loss_type == "policy_loss" and compares and single and not s.distillation.use_opd:
        return "--n-samples-per-prompt 1 with --singleton-advantage zero: every advantage is 0 and nothing is learnt"
    return None


def ratios_are_one(s: Settings) -> str | None:
    if s.algorithm.loss_type == "sft_loss" or not s.trains or s.algorithm.use_rollout_logprobs:
        return None
    if global_batch_of(s) == s.samples_per_rollout and "old_log_probs" in s.loss.needs:
        return (
            f"one optimizer step per rollout: every ratio is 1, so {s.loss.name} is the plain policy gradient; see --num-steps-per-rollout"
        )
    return None


def truncated_sampling(s: Settings) -> str | None:
    if not s.generates or not truncates(s) or s.rollout.renormalize_sampled_log_probs:
        return None
    return (
        "--rollout-top-p or --rollout-top-k truncates what is sampled; the trainer's log-probs are over the whole vocabulary, so ratios are off; "
        "see --renormalize-sampled-log-probs"
    )


def a_first_run(s: Settings) -> str | None:
    if s.checkpoint.load is not None and not Path(s.checkpoint.load).is_dir():
        return f"--load {s.checkpoint.load} does not exist yet and is also --save: this run starts from --hf-checkpoint"
    return None


WARNINGS: tuple[Warn, ...] = (
    reduction_is_recommended, k1_in_the_loss, groups_of_one, ratios_are_one, truncated_sampling, a_first_run,
    wide_gspo_range, gmpo_needs_one_advantage, idle_correction_settings, idle_advantage_settings, nothing_to_learn,
    *MOE_WARNINGS, *OPTIMIZER_WARNINGS, nothing_to_overlap,
)  # fmt: skip


def settings_of_other_losses(settings: Settings, table: Mapping[str, Flag]) -> list[str]:
    """Flags of losses that were not chosen: they have no effect."""
    chosen = loss_fields(settings.loss)
    others = {name for _, loss in policy_losses.items() for name in loss_fields(loss)} - chosen
    return [
        f"{table[name].name} has no effect: it is not a setting of the loss {settings.loss.name}"
        for name in sorted(others & settings.given)
    ]
