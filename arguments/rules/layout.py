"""Rules about parallel sizes, the split of a rollout into optimizer steps and of a step into
micro-batches, and the length of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import LayoutSettings, Rule, Settings, problem
from arguments.rules.pipeline import (
    first_layers,
    interleaved_flags,
    pipeline_divides_the_layers,
    virtual_stages_of,
)
from slime_like.config import Problem, flag_name

# --- layout --------------------------------------------------------------------------------------


def world_is_divisible(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.model_parallel_size
    if s.world_size % size == 0:
        return []
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = " x ".join(
        f"{flag_name(n)} {getattr(s.parallel, n)}"
        for n in names
        if n != "context_parallel_size" or s.parallel.context_parallel_size > 1
    )
    words = f"{sizes} = {size} does not divide the {s.world_size} processes"
    if s.world_size < size:
        words += f", and the model needs {size} at least"
    return problem(
        "tensor_model_parallel_size",
        None,
        f"{words}; change a size or the number of processes",
    )


def sequence_parallel_needs_tensor_parallel(s: Settings) -> list[Problem]:
    if s.parallel.sequence_parallel and s.parallel.tensor_model_parallel_size == 1:
        return problem(
            "sequence_parallel",
            None,
            "needs --tensor-model-parallel-size above 1; leave it out or raise that",
        )
    return []


def tensor_parallel_divides_the_network(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.tensor_model_parallel_size
    found = []
    for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        whole = s.core.get(name)
        if whole and whole % size:
            found += problem(
                "tensor_model_parallel_size",
                size,
                f"does not divide {flag_name(name)} {whole}; choose a divisor of it",
            )
    return found


def delta_nets_share_their_groups(s: LayoutSettings) -> list[Problem]:
    """For gated delta nets, tensor- times context-parallel size must divide the number of key
    heads: each rank computes complete groups of full sequences."""
    if not s.core.get("linear_attention_freq"):
        return []
    groups = s.core["linear_num_key_heads"]
    tensor, context = s.parallel.tensor_model_parallel_size, s.parallel.context_parallel_size
    if groups % (tensor * context) == 0:
        return []
    words = f"times --context-parallel-size {context} does not divide config.json's linear_num_key_heads {groups}; choose sizes whose product does"
    return problem("tensor_model_parallel_size", tensor, words)


def context_parallel_has_limits(s: Settings) -> list[Problem]:
    """Limits of context parallelism, and legal values of --cp-comm-type."""
    size, how = s.parallel.context_parallel_size, s.core.get("cp_comm_type")
    if size == 1:
        used = how is None or (s.critic.critic_context_parallel_size or 1) > 1
        return (
            []
            if used
            else problem("cp_comm_type", how, "needs --context-parallel-size above 1; leave it out")
        )
    found = []
    for name in ("attention_dropout", "hidden_dropout"):
        if s.core.get(name):
            found += problem(
                name,
                s.core[name],
                "must be 0 with --context-parallel-size above 1, whose ranks would all drop the same positions",
            )
    local, sparse = (
        resolve_transformer_impl(s.model, s.machine) == "local",
        s.core.get("index_topk"),
    )
    if (local or sparse) and how not in (None, "all_gather"):
        attention = (
            "sparse attention does not have"
            if sparse
            else "needs Transformer Engine layers, which are not used here"
        )
        words = f"{attention}; use all_gather, or leave it out"
        found += problem("cp_comm_type", how, words)
    heads, tensor = s.core.get("num_attention_heads"), s.parallel.tensor_model_parallel_size
    groups = s.core.get("num_query_groups") or heads
    if how == "a2a" and heads and groups and (heads // tensor % size or groups // tensor % size):
        have = f"the {heads} heads and {groups} query groups, over --tensor-model-parallel-size {tensor}"
        found += problem(
            "cp_comm_type",
            how,
            f"exchanges heads, so --context-parallel-size {size} must divide {have}; use p2p or all_gather",
        )
    return found


def stages_begin_with_an_indexer(s: LayoutSettings) -> list[Problem]:
    """For sparse attention, every pipeline stage must start with a layer that has an indexer, since
    a selection is only shared within a stage."""
    shared = s.core.get("index_shared")
    if not shared:
        return []
    wrong = [first for first in first_layers(s) if shared[first]]
    if not wrong:
        return []
    own = ", ".join(str(layer) for layer, takes in enumerate(shared) if not takes)
    words = (
        f"has a stage that begins with layer {wrong[0]} of 0 to {len(shared) - 1}, which takes the keys that a layer before it "
        f"chose; begin stages with one of {own} (--pipeline-model-parallel-layout)"
    )
    return problem("pipeline_model_parallel_size", s.parallel.pipeline_model_parallel_size, words)


def latent_attention_with_context_parallel(s: Settings) -> str | None:
    local = resolve_transformer_impl(s.model, s.machine) == "local"
    if s.parallel.context_parallel_size == 1 or local or not s.core.get("multi_latent_attention"):
        return None
    return (
        "--context-parallel-size with multi-latent attention is proved with --transformer-impl local only; compare a step's "
        "log-probs with those of --context-parallel-size 1"
    )


def backend_is_there(s: Settings) -> list[Problem]:
    if s.parallel.distributed_backend == "nccl" and not s.machine.cuda:
        return problem(
            "distributed_backend",
            "nccl",
            "needs CUDA, which is not available here; use gloo or auto",
        )
    return []


PARALLEL_RULES: tuple[Rule, ...] = (
    world_is_divisible, sequence_parallel_needs_tensor_parallel, tensor_parallel_divides_the_network,
    context_parallel_has_limits, delta_nets_share_their_groups, interleaved_flags, pipeline_divides_the_layers, stages_begin_with_an_indexer,
    backend_is_there,
)  # fmt: skip


# --- batches -------------------------------------------------------------------------------------


BY_TOKENS = ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu")
BY_SAMPLES = ("micro_batch_size", "log_probs_micro_batch_size")

# Default token budget of a micro-batch: about five times as fast as one sample per micro-batch, and
# no more memory than one long sequence takes.
DEFAULT_TOKENS = 4096


def default_micro_batches(values: Mapping[str, Any]) -> dict[str, object]:
    """Default settings for micro-batches if no flag sets them: a token budget.

    Micro-batches of one sample remain the default where a budget is not possible (--qkv-format
    bshd, token_mean_legacy), and with pipeline parallelism, which needs many micro-batches.
    """
    cut = {*BY_TOKENS, *BY_SAMPLES, "use_dynamic_batch_size"}
    one_by_one = (
        values.get("qkv_format") == "bshd"
        or values.get("loss_reduction") == "token_mean_legacy"
        or values.get("pipeline_model_parallel_size", 1) > 1
        or (values.get("critic_pipeline_model_parallel_size") or 1) > 1
    )
    if one_by_one or any(name in values for name in cut):
        return {}
    return {"use_dynamic_batch_size": True, "max_tokens_per_gpu": DEFAULT_TOKENS}


# --- a rollout and its steps ------------------------------------------------------------------------------------------


def run_length(s: Settings) -> list[Problem]:
    if s.rollout.num_rollout is None and s.rollout.num_epoch is None:
        return problem(
            "num_rollout",
            None,
            "is missing: the number of rollouts in the run (or give --num-epoch)",
        )
    if s.rollout.num_rollout is None and not (s.data.prompt_data or s.scheduling.data_source_path):
        return problem(
            "num_epoch",
            s.rollout.num_epoch,
            "counts passes over --prompt-data, which is missing; use --num-rollout",
        )
    return []


def supervised_samples(s: Settings) -> list[Problem]:
    count = s.algorithm.samples_together
    if s.algorithm.loss_type == "sft_loss" and s.rollout.n_samples_per_prompt != count:
        what = "a row is a sample" if count == 1 else "a row is a pair of answers"
        return problem(
            "n_samples_per_prompt",
            s.rollout.n_samples_per_prompt,
            f"must be {count} with --loss-type sft_loss: {what}; leave it out",
        )
    return []


def pairs_are_whole(s: Settings) -> list[Problem]:
    """The two answers of a pair must be in the same optimizer step, rank and micro-batch."""
    size, dp = global_batch_of(s), s.data_parallel_size
    if s.algorithm.pair_loss is None or size is None or dp is None:
        return []
    found = [
        p
        for name in BY_SAMPLES
        if (samples := getattr(s.algorithm, name)) is not None
        and samples % 2
        and not s.algorithm.use_dynamic_batch_size
        for p in problem(name, samples, "must be even: both answers of a pair are together")
    ]
    name = "global_batch_size" if s.algorithm.global_batch_size else "rollout_batch_size"
    if size % 2:
        found += problem(
            name, None, f"an optimizer step's {size} samples are not whole pairs; change it"
        )
    elif size // 2 < dp:
        found += problem(
            name, None, f"an optimizer step's {size // 2} pairs are fewer than {dp} ranks; raise it"
        )
    return found


def global_batch_of(s: Settings) -> int | None:
    """Samples per optimizer step; None if the flags do not give an integer."""
    steps, size = s.algorithm.num_steps_per_rollout, s.algorithm.global_batch_size
    if size is not None:
        return (
            size
            if s.samples_per_rollout % size == 0 and steps in (None, s.samples_per_rollout // size)
            else None
        )
    whole, rest = divmod(s.samples_per_rollout, steps or 1)
    return None if rest else whole


def rollout_is_divisible(s: Settings) -> list[Problem]:
    if not s.trains or global_batch_of(s) is not None:
        return []
    steps, size, samples = (
        s.algorithm.num_steps_per_rollout,
        s.algorithm.global_batch_size,
        s.samples_per_rollout,
    )
    have = f"--rollout-batch-size {s.rollout.rollout_batch_size} x --n-samples-per-prompt {s.rollout.n_samples_per_prompt} = {samples} samples"
    if size is not None and samples % size:
        return problem("global_batch_size", size, f"does not divide {have}")
    if size is not None:
        return problem(
            "num_steps_per_rollout",
            steps,
            f"contradicts --global-batch-size {size}: {have} are {samples // size} steps; give one of them",
        )
    return problem("num_steps_per_rollout", steps, f"does not divide {have}")


def global_batch_is_divisible(s: Settings) -> list[Problem]:
    """The global batch is divisible by data-parallel and micro-batch size; includes the condition
    of the interleaved schedule on the number of micro-batches."""
    size, dp, micro = global_batch_of(s), s.data_parallel_size, s.algorithm.micro_batch_size
    if size is None or dp is None or not s.trains or s.algorithm.use_dynamic_batch_size:
        return []
    if s.algorithm.loss_reduction == "token_mean_legacy" and size % (dp * micro):
        return []  # reported by the reduction's own rule
    name = "global_batch_size" if s.algorithm.global_batch_size else "rollout_batch_size"
    if size % (dp * micro):
        parts = f"{dp} data-parallel ranks x --micro-batch-size {micro}"
        return problem(
            name,
            None,
            f"an optimizer step's {size} samples are not divisible by {parts} = {dp * micro}; change one of them, or give "
            "--use-dynamic-batch-size, which takes any number of ranks",
        )
    micro_batches, pipeline = size // (dp * micro), s.parallel.pipeline_model_parallel_size
    if virtual_stages_of(s.parallel, s.core) and micro_batches % pipeline:
        return problem(
            name, None,
            f"the interleaved schedule needs a multiple of --pipeline-model-parallel-size {pipeline} micro-batches in a step; there are {micro_batches}",
        )  # fmt: skip
    return []


def log_prob_micro_batches(s: Settings) -> list[Problem]:
    """The condition of the interleaved schedule for forward-only passes over a rollout."""
    size, dp, pipeline = (
        s.algorithm.log_probs_micro_batch_size,
        s.data_parallel_size,
        s.parallel.pipeline_model_parallel_size,
    )
    if size is None or dp is None or not virtual_stages_of(s.parallel, s.core):
        return []
    if s.samples_per_rollout % (dp * size * pipeline):
        need = f"{dp} data-parallel ranks x {size} x --pipeline-model-parallel-size {pipeline}"
        message = f"the interleaved schedule needs the {s.samples_per_rollout} samples of a rollout to be divisible by {need}"
        return problem("log_probs_micro_batch_size", size, message)
    return []


def sequences_fit(s: Settings) -> list[Problem]:
    """Sequences must not exceed the model's positions, which are undefined or untrained beyond."""
    limit, prompt = s.gpt.max_position_embeddings, s.data.rollout_max_prompt_len or 1
    responses = {}
    if s.generates or (s.evaluates and any(each.max_response_len is None for each in s.eval_sets)):
        responses["rollout_max_response_len"] = s.rollout.rollout_max_response_len
    if s.evaluates and (
        own := [each.max_response_len for each in s.eval_sets if each.max_response_len is not None]
    ):
        responses["eval_config" if s.eval.eval_config is not None else "eval_max_response_len"] = (
            max(own)
        )
    have = f"with --rollout-max-prompt-len {prompt} it " if prompt > 1 else ""
    message = f"{have}exceeds the {limit} positions of the network (--max-position-embeddings)"
    too_long = {
        name: response
        for name, response in responses.items()
        if limit is not None and response + prompt > limit
    }
    return [p for name, response in too_long.items() for p in problem(name, response, message)]


# --- micro-batches ---------------------------------------------------------------------------------------------------


def token_budgets(s: Settings) -> list[Problem]:
    """Micro-batches are made by number of samples or by token budget; settings of the other way
    have no effect."""
    if not s.algorithm.use_dynamic_batch_size:
        return []
    found = []
    if s.algorithm.max_tokens_per_gpu is None:
        found += problem(
            "max_tokens_per_gpu",
            None,
            "is missing: the tokens up to which --use-dynamic-batch-size fills a micro-batch",
        )
    for name in BY_SAMPLES:
        if name in s.given:
            found += problem(
                name,
                getattr(s.algorithm, name),
                "contradicts --use-dynamic-batch-size, which fills by tokens; leave it out",
            )
    if s.algorithm.loss_reduction == "token_mean_legacy":
        message = "needs micro-batches of one size, which --use-dynamic-batch-size does not make; use token_mean"
        found += problem("loss_reduction", "token_mean_legacy", message)
    return found


def every_rank_gets_a_sample(s: Settings) -> list[Problem]:
    size, dp = global_batch_of(s), s.data_parallel_size
    if (
        not s.algorithm.use_dynamic_batch_size
        or size is None
        or dp is None
        or not s.trains
        or size >= dp
    ):
        return []
    name = "global_batch_size" if s.algorithm.global_batch_size else "rollout_batch_size"
    return problem(
        name,
        None,
        f"an optimizer step's {size} samples are fewer than the {dp} data-parallel ranks; change one of them",
    )


BATCH_RULES: tuple[Rule, ...] = (
    run_length,
    supervised_samples,
    pairs_are_whole,
    rollout_is_divisible,
    global_batch_is_divisible,
    log_prob_micro_batches,
    sequences_fit,
)
MICRO_BATCH_RULES: tuple[Rule, ...] = (token_budgets, every_rank_gets_a_sample)
