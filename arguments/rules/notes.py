"""What the launcher says once at the start, though nothing is wrong: where defaults are not
slime's."""

from __future__ import annotations

from collections.abc import Iterator

from arguments.rules.base import Settings
from arguments.rules.batches import BY_SAMPLES, BY_TOKENS


def notes_of(s: Settings) -> Iterator[str]:
    """One line each."""
    if not s.trains:
        return
    if parts := list(_other_defaults(s)):
        yield f"different from slime under the same flags: {'; '.join(parts)}"
    cut = {*BY_SAMPLES, *BY_TOKENS, "use_dynamic_batch_size"}
    if s.algorithm.use_dynamic_batch_size and not cut & s.given:
        yield (
            f"micro-batches of up to {s.algorithm.max_tokens_per_gpu} tokens; "
            "see --max-tokens-per-gpu and --micro-batch-size"
        )


def _other_defaults(s: Settings) -> Iterator[str]:
    if "bf16" not in s.given:
        yield "float32 (slime: bf16; add --bf16)"
    if "use_distributed_optimizer" not in s.given and s.core.get("optimizer", "adam") == "adam":
        yield "optimizer state on every rank (slime: sharded; add --use-distributed-optimizer)"
    if s.generates and calls_users_functions(s):
        yield "sample.response has no special tokens (slime keeps them)"


def calls_users_functions(s: Settings) -> bool:
    """Whether a function of the user's sees samples."""
    return any(
        path is not None
        for path in (
            s.reward.custom_rm_path,
            s.scheduling.custom_generate_function_path,
            s.scheduling.rollout_function_path,
            s.scheduling.dynamic_sampling_filter_path,
            s.scheduling.rollout_sample_filter_path,
        )
    )
