"""Rules about micro-batches: by samples or by tokens, balanced over ranks, packed or padded."""

from __future__ import annotations

from arguments.validate import Rule, Settings, global_batch_of, problem
from slime_like.config import Problem

BY_TOKENS = ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu")
BY_SAMPLES = ("micro_batch_size", "log_probs_micro_batch_size")


def token_budgets(s: Settings) -> list[Problem]:
    """Micro-batches are cut in one of two ways, and the settings of the other have no effect."""
    if not s.algorithm.use_dynamic_batch_size:
        given = {name: getattr(s.algorithm, name) for name in BY_TOKENS}
        message = "has no effect without --use-dynamic-batch-size; add the switch"
        return [p for name, value in given.items() if value is not None for p in problem(name, value, message)]
    found = []
    if s.algorithm.max_tokens_per_gpu is None:
        found += problem("max_tokens_per_gpu", None, "is missing: the tokens up to which --use-dynamic-batch-size fills a micro-batch")
    for name in BY_SAMPLES:
        if name in s.given:
            found += problem(name, getattr(s.algorithm, name), "contradicts --use-dynamic-batch-size, which fills by tokens; leave it out")
    if s.algorithm.loss_reduction == "token_mean_legacy":
        message = "needs micro-batches of one size, which --use-dynamic-batch-size does not make; use token_mean"
        found += problem("loss_reduction", "token_mean_legacy", message)
    return found


def every_rank_gets_a_sample(s: Settings) -> list[Problem]:
    size, dp = global_batch_of(s), s.data_parallel_size
    if not s.algorithm.use_dynamic_batch_size or size is None or dp is None or not s.trains or size >= dp:
        return []
    name = "global_batch_size" if s.algorithm.global_batch_size else "rollout_batch_size"
    return problem(name, None, f"an optimizer step's {size} samples are fewer than the {dp} data-parallel ranks; change one of them")


def padded_rows(s: Settings) -> list[Problem]:
    if s.algorithm.qkv_format == "bshd" and s.algorithm.use_dynamic_batch_size:
        return problem("qkv_format", "bshd", "does not go with --use-dynamic-batch-size, whose budget is of packed tokens; use thd")
    return []


MICRO_BATCH_RULES: tuple[Rule, ...] = (token_budgets, every_rank_gets_a_sample, padded_rows)
