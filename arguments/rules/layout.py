"""Rules about parallel sizes, the split of a rollout into optimizer steps and of a step into
micro-batches, and the length of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arguments.eval_sets import EvalSet, setting_of
from arguments.megatron_configs import resolve_transformer_impl
from arguments.prompt_mix import MixSource
from arguments.rules.base import LayoutSettings, Rule, Settings, field_of, problem, reject
from arguments.rules.pipeline import (
    check_pipeline_split,
    first_layers,
    virtual_stages_of,
)
from slime_like.config import Problem, flag_name
from slime_like.weights.attention_sizes import lending_layers

# --- layout --------------------------------------------------------------------------------------


def check_world_size(s: LayoutSettings) -> list[Problem]:
    parallel = s.parallel
    size = s.parallel.model_parallel_size
    if s.world_size % size == 0:
        return []
    sizes = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
    }
    if parallel.context_parallel_size > 1:
        sizes["context_parallel_size"] = parallel.context_parallel_size
    name = next(name for name, value in sizes.items() if value > 1)
    given = sizes.pop(name)
    others = " ".join(f"x {flag_name(other)} {value}" for other, value in sizes.items())
    message = f"{others} = {size} does not divide the {s.world_size} processes"
    if s.world_size < size:
        message += f", and the model needs at least {size}"
    message += "; change a size or the number of processes"
    return problem(name, given, message)


def check_tensor_parallel(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.tensor_model_parallel_size
    problems = []
    for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        value = s.core.get(name)
        if value and value % size:
            message = f"must divide {flag_name(name)} {value}"
            problems += problem("tensor_model_parallel_size", size, message)
    for name, heads in (("window_heads", "heads"), ("window_groups", "key heads")):
        value = s.core.get(name)
        if value and value % size:
            message = f"must divide the {value} {heads} of layers with a sliding window"
            problems += problem("tensor_model_parallel_size", size, message)
    return problems


def check_delta_net_parallel(s: LayoutSettings) -> list[Problem]:
    """For gated delta nets and Mamba-2, tensor- times context-parallel size must divide the number
    of key heads or groups: each rank computes complete groups of full sequences."""
    if not s.core.get("linear_attention_freq"):
        return []
    heads = s.core["linear_num_key_heads"]
    tensor = s.parallel.tensor_model_parallel_size
    context = s.parallel.context_parallel_size
    if heads % (tensor * context) == 0:
        return []
    name = "linear_num_key_heads"
    if "mamba_smallest_step" in s.core:
        name = "n_groups" if s.core.get("block_pattern") else "mamba_n_groups"
    name = "num_attention_heads" if s.core.get("short_conv") else name
    message = f"x --context-parallel-size {context} must divide {name} {heads}"
    return problem("tensor_model_parallel_size", tensor, message)


def check_output_groups(s: LayoutSettings) -> list[Problem]:
    """Of compressed attention, tensor-parallel ranks have whole groups of the output projection."""
    groups = s.core.get("output_groups")
    size = s.parallel.tensor_model_parallel_size
    if groups is None or groups % size == 0:
        return []
    return problem("tensor_model_parallel_size", size, f"must divide o_groups {groups}")


def check_memory_parallel(s: LayoutSettings) -> list[Problem]:
    """Of a memory of n-grams, tensor-parallel ranks hold equal parts of the tables, and ranks of
    sequence and context parallelism convolve equal numbers of channels."""
    memory = s.core.get("ngram_memory")
    if memory is None:
        return []
    size = s.parallel.tensor_model_parallel_size
    context = s.parallel.context_parallel_size
    streams = s.core["residual_streams"]
    hidden = s.core["hidden_size"]
    problems = []
    for layer in [layer for layer in memory.layers if memory.rows(layer) % size][:1]:
        rows = memory.rows(layer)
        message = f"must divide the {rows} rows of the memory of n-grams of layer {layer}"
        problems += problem("tensor_model_parallel_size", size, message)
    if streams * hidden % (size * context):
        message = (
            f"x --context-parallel-size {context} must divide hc_count {streams} x --hidden-size "
            f"{hidden} with a memory of n-grams"
        )
        problems += problem("tensor_model_parallel_size", size, message)
    return problems


def check_context_parallel(s: Settings) -> list[Problem]:
    """Limits of context parallelism, and legal values of --cp-comm-type."""
    size = s.parallel.context_parallel_size
    comm_type = s.core.get("cp_comm_type")
    if size == 1:
        if comm_type is None or (s.critic.critic_context_parallel_size or 1) > 1:
            return []
        message = "requires --context-parallel-size above 1; remove it"
        return problem("cp_comm_type", comm_type, message)
    problems = []
    for name in ("attention_dropout", "hidden_dropout"):
        if s.core.get(name):
            message = (
                "must be 0 with --context-parallel-size above 1: all ranks would drop the same "
                "positions"
            )
            problems += problem(name, s.core[name], message)
    if comm_type not in (None, "all_gather"):
        if s.core.get("index_topk") or s.core.get("entry_rates"):
            message = "not supported by sparse attention; use all_gather, or remove it"
            problems += problem("cp_comm_type", comm_type, message)
        elif resolve_transformer_impl(s.model, s.machine) == "local":
            message = "requires Transformer Engine layers; use all_gather, or remove it"
            problems += problem("cp_comm_type", comm_type, message)
    heads = s.core.get("num_attention_heads")
    tensor = s.parallel.tensor_model_parallel_size
    groups = s.core.get("num_query_groups") or heads
    if comm_type != "a2a" or not heads or not groups:
        return problems
    if heads // tensor % size or groups // tensor % size:
        message = (
            f"exchanges heads: --context-parallel-size {size} must divide the {heads} heads and "
            f"{groups} query groups over --tensor-model-parallel-size {tensor}; "
            "use p2p or all_gather"
        )
        problems += problem("cp_comm_type", comm_type, message)
    return problems


def check_indexer_stages(s: LayoutSettings) -> list[Problem]:
    """For sparse attention, every pipeline stage must start with a layer that has an indexer, since
    a selection is only shared within a stage."""
    shared = s.core.get("index_shared")
    if not shared:
        return []
    wrong = [first for first in first_layers(s) if shared[first]]
    if not wrong:
        return []
    legal = ", ".join(str(layer) for layer, is_shared in enumerate(shared) if not is_shared)
    message = (
        f"has a stage that begins with layer {wrong[0]} of 0 to {len(shared) - 1}, which reuses "
        f"the indexer of a previous layer; begin stages with one of {legal} "
        "(--pipeline-model-parallel-layout)"
    )
    return problem("pipeline_model_parallel_size", s.parallel.pipeline_model_parallel_size, message)


def check_stages_of_shared_keys(s: LayoutSettings) -> list[Problem]:
    """Layers that share keys and values have to be on one pipeline stage with those that have
    them."""
    sharing = s.core.get("shared_key_layers")
    if not sharing:
        return []
    layers = s.core["num_layers"]
    windows = list(map(bool, s.core.get("window_attn_skip_freq") or [0] * layers))
    lenders = sorted(lending_layers(windows, sharing))
    if not any(first > lenders[0] for first in first_layers(s)):
        return []
    message = (
        f"must leave layers {lenders[0]} to {layers - 1} on one stage: layers {layers - sharing} "
        f"to {layers - 1} share the keys and values of {' and '.join(map(str, lenders))}; use "
        f"--decoder-last-pipeline-num-layers {layers - lenders[0]} or more, or "
        "--pipeline-model-parallel-layout"
    )
    return problem("pipeline_model_parallel_size", s.parallel.pipeline_model_parallel_size, message)


def warn_mla_context_parallel(s: Settings) -> str | None:
    local = resolve_transformer_impl(s.model, s.machine) == "local"
    if s.parallel.context_parallel_size == 1 or local or not s.core.get("multi_latent_attention"):
        return None
    return (
        "--context-parallel-size with multi-latent attention is tested with --transformer-impl "
        "local only; compare log-probs of a step with --context-parallel-size 1"
    )


SINKS_CUDNN = 91800  # the first cuDNN that knows sinks in packed rows, as torch reports it


def warn_attention_sinks(s: Settings) -> str | None:
    """Transformer Engine turns its fast kernels off for sinks in packed rows, and says so in a
    debug log only."""
    impl = resolve_transformer_impl(s.model, s.machine)
    if impl == "local" or s.core.get("softmax_type", "vanilla") == "vanilla":
        return None
    if not s.machine.cuda or s.machine.planned:
        return None
    from torch.backends import cudnn

    version = cudnn.version() or 0
    if version >= SINKS_CUDNN:
        return None
    return (
        "attention sinks in packed rows are fast in Transformer Engine with cuDNN 9.18 or newer "
        f"only (here: {version // 10000}.{version // 100 % 100}): its unfused attention is left, "
        "which holds all scores; use --transformer-impl local"
    )


def check_distributed_backend(s: Settings) -> list[Problem]:
    backend = s.parallel.distributed_backend
    if backend == "nccl" and not s.machine.cuda:
        return problem("distributed_backend", backend, "requires CUDA; use gloo or auto")
    if backend == "gloo" and s.machine.cuda:
        message = (
            "cannot reduce the gradients of a GPU; use nccl or auto, or hide the GPUs by "
            'CUDA_VISIBLE_DEVICES=""'
        )
        return problem("distributed_backend", backend, message)
    return []


PARALLEL_RULES: tuple[Rule, ...] = (
    check_world_size,
    check_tensor_parallel,
    check_context_parallel,
    check_delta_net_parallel,
    check_memory_parallel,
    check_output_groups,
    check_pipeline_split,
    check_indexer_stages,
    check_stages_of_shared_keys,
    check_distributed_backend,
)


# --- batches -------------------------------------------------------------------------------------


BY_TOKENS = ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu")
BY_SAMPLES = ("micro_batch_size", "log_probs_micro_batch_size")
BATCH_FLAGS = frozenset({*BY_TOKENS, *BY_SAMPLES, "use_dynamic_batch_size"})

# Default token budget of a micro-batch: about five times as fast as one sample per micro-batch, and
# no more memory than one long sequence takes.
DEFAULT_TOKENS = 4096


def default_micro_batches(values: Mapping[str, object]) -> dict[str, object]:
    """Default settings for micro-batches if no flag sets them: a token budget.

    Micro-batches of one sample remain the default where a budget is not possible (--qkv-format
    bshd, token_mean_legacy, --true-on-policy-mode), and with pipeline parallelism, which needs many
    micro-batches.
    """
    single_samples = (
        values.get("qkv_format") == "bshd"
        or values.get("true_on_policy_mode")
        or values.get("loss_reduction") == "token_mean_legacy"
        or values.get("pipeline_model_parallel_size", 1) != 1
        or values.get("critic_pipeline_model_parallel_size") not in (None, 1)
    )
    if single_samples or BATCH_FLAGS & values.keys():
        return {}
    return {"use_dynamic_batch_size": True, "max_tokens_per_gpu": DEFAULT_TOKENS}


# --- a rollout and its steps ---------------------------------------------------------------------


def check_run_length(s: Settings) -> list[Problem]:
    if s.rollout.num_rollout is not None:
        return []
    if s.rollout.num_epoch is None:
        message = "required: number of rollouts in the run (or set --num-epoch)"
        return problem("num_rollout", None, message)
    if not (s.data.prompt_data or s.scheduling.data_source_path):
        message = "requires --prompt-data; or set --num-rollout"
        return problem("num_epoch", s.rollout.num_epoch, message)
    return []


def check_supervised_samples(s: Settings) -> list[Problem]:
    count = s.algorithm.samples_together
    if not s.supervised or s.rollout.n_samples_per_prompt == count:
        return []
    row = "a sample" if count == 1 else "a pair of answers"
    if s.algorithm.scores_mismatches:
        row = "an answer and a mismatched one"
    message = f"must be {count} with --loss-type sft_loss: a row is {row}; remove it"
    return problem("n_samples_per_prompt", s.rollout.n_samples_per_prompt, message)


def check_pairs(s: Settings) -> list[Problem]:
    """The two answers of a pair must be in the same optimizer step, rank and micro-batch."""
    size = global_batch_of(s)
    dp = s.data_parallel_size
    if s.algorithm.preference_loss is None or size is None or dp is None:
        return []
    problems = []
    for name in BY_SAMPLES if not s.algorithm.use_dynamic_batch_size else ():
        samples = getattr(s.algorithm, name)
        if samples is not None and samples % 2:
            message = "must be even: both answers of a pair are in one micro-batch"
            problems += problem(name, samples, message)
    if size % 2:
        message = f"an optimizer step has {size} samples, which must be even"
        problems += problem(_batch_field(s), None, message)
    elif size // 2 < dp:
        message = f"an optimizer step's {size // 2} pairs are fewer than {dp} ranks; increase it"
        problems += problem(_batch_field(s), None, message)
    return problems


def _batch_field(s: Settings) -> str:
    """The field that sets the number of samples of an optimizer step."""
    return "global_batch_size" if s.algorithm.global_batch_size else "rollout_batch_size"


def global_batch_of(s: Settings) -> int | None:
    """Samples per optimizer step; None if the flags do not give an integer."""
    steps = s.algorithm.num_steps_per_rollout
    size = s.algorithm.global_batch_size
    quotient, remainder = divmod(s.samples_per_rollout, size or steps or 1)
    if remainder:
        return None
    if size is None:
        return quotient
    return size if steps in (None, quotient) else None


def check_rollout_split(s: Settings) -> list[Problem]:
    if not s.trains or global_batch_of(s) is not None:
        return []
    steps = s.algorithm.num_steps_per_rollout
    size = s.algorithm.global_batch_size
    samples = s.samples_per_rollout
    product = (
        f"--rollout-batch-size {s.rollout.rollout_batch_size} x --n-samples-per-prompt "
        f"{s.rollout.n_samples_per_prompt} = {samples} samples"
    )
    if size is None:
        return problem("num_steps_per_rollout", steps, f"does not divide {product}")
    if samples % size:
        return problem("global_batch_size", size, f"does not divide {product}")
    message = (
        f"conflicts with --global-batch-size {size}: {product} are {samples // size} steps; "
        "set only one of them"
    )
    return problem("num_steps_per_rollout", steps, message)


def check_global_batch(s: Settings) -> list[Problem]:
    """The global batch is divisible by data-parallel and micro-batch size; includes the condition
    of the interleaved schedule on the number of micro-batches."""
    size = global_batch_of(s)
    dp = s.data_parallel_size
    micro = s.algorithm.micro_batch_size
    if size is None or dp is None or not s.trains or s.algorithm.use_dynamic_batch_size:
        return []
    if size % (dp * micro):
        if s.algorithm.loss_reduction == "token_mean_legacy":
            return []  # reported by the reduction's own rule
        message = (
            f"an optimizer step's {size} samples are not divisible by {dp} data-parallel ranks x "
            f"--micro-batch-size {micro} = {dp * micro}; change one of them, or use "
            "--use-dynamic-batch-size"
        )
        return problem(_batch_field(s), None, message)
    micro_batches = size // (dp * micro)
    pipeline = s.parallel.pipeline_model_parallel_size
    if virtual_stages_of(s.parallel, s.core) and micro_batches % pipeline:
        message = (
            f"the interleaved schedule requires a multiple of --pipeline-model-parallel-size "
            f"{pipeline} micro-batches per step, not {micro_batches}"
        )
        return problem(_batch_field(s), None, message)
    return []


def check_log_prob_micro_batches(s: Settings) -> list[Problem]:
    """The condition of the interleaved schedule for forward-only passes over a rollout."""
    size = s.algorithm.log_probs_micro_batch_size
    dp = s.data_parallel_size
    pipeline = s.parallel.pipeline_model_parallel_size
    if size is None or dp is None or not virtual_stages_of(s.parallel, s.core):
        return []
    if s.samples_per_rollout % (dp * size * pipeline) == 0:
        return []
    message = (
        f"the interleaved schedule requires the {s.samples_per_rollout} samples of a rollout to be "
        f"divisible by {dp} data-parallel ranks x {size} x --pipeline-model-parallel-size "
        f"{pipeline}"
    )
    return problem("log_probs_micro_batch_size", size, message)


def check_sequence_lengths(s: Settings) -> list[Problem]:
    """Sequences must not exceed the model's positions, which are undefined or untrained beyond."""
    limit = s.gpt.max_position_embeddings
    prompt = s.data.rollout_max_prompt_len or 1
    if limit is None:
        return []
    eval_sets = s.eval_sets if s.evaluates else ()
    shared = [each for each in eval_sets if each.max_prompt_len is None]
    responses = {}
    if s.generates or any(each.max_response_len is None for each in shared):
        responses["rollout_max_response_len"] = s.rollout.rollout_max_response_len
    for each in shared:
        if each.max_response_len is not None:
            from_file = setting_of(each, s.eval) == "eval_config"
            name = "eval_config" if from_file else "eval_max_response_len"
            responses[name] = max(responses.get(name, 0), each.max_response_len)
    message = f"exceeds the {limit} positions of the network (--max-position-embeddings)"
    if prompt > 1:
        message = f"with --rollout-max-prompt-len {prompt} it {message}"
    problems = reject({name: n for name, n in responses.items() if n + prompt > limit}, message)
    sources = s.prompt_sources if s.generates else ()
    return [*problems, *_own_prompt_limits([*sources, *eval_sets], limit, s)]


def _own_prompt_limits(
    rows: Sequence[MixSource | EvalSet], limit: int, s: Settings
) -> list[Problem]:
    """Of the sources and evaluation sets with a max_prompt_len, those whose prompts may leave too
    few of the model's `limit` positions."""
    found = {}
    for row in rows:
        response = row.max_response_len or s.rollout.rollout_max_response_len
        if row.max_prompt_len is None or row.max_prompt_len + response <= limit:
            continue
        what, field = f"source {row.name}", "prompt_data"
        if isinstance(row, EvalSet) and (field := field_of(row, s)) != "prompt_data":
            what = f"set {row.name}"
        message = (
            f"{what}: max_prompt_len {row.max_prompt_len} and a response of {response} exceed the "
            f"{limit} positions of the network (--max-position-embeddings)"
        )
        found[message] = Problem(flag_name(field), None, message)
    return list(found.values())


# --- micro-batches -------------------------------------------------------------------------------


def check_token_budget(s: Settings) -> list[Problem]:
    """Micro-batches are made by number of samples or by token budget; settings of the other way
    have no effect."""
    if not s.algorithm.use_dynamic_batch_size:
        return []
    problems = []
    for name in BY_SAMPLES:
        if name in s.given:
            message = "conflicts with --use-dynamic-batch-size, which fills by tokens; remove it"
            problems += problem(name, getattr(s.algorithm, name), message)
    if s.algorithm.loss_reduction == "token_mean_legacy":
        message = "cannot be combined with --use-dynamic-batch-size; use token_mean"
        problems += problem("loss_reduction", "token_mean_legacy", message)
    return problems


def check_samples_per_rank(s: Settings) -> list[Problem]:
    size = global_batch_of(s)
    dp = s.data_parallel_size
    if not s.algorithm.use_dynamic_batch_size or not s.trains:
        return []
    if size is None or dp is None or size >= dp:
        return []
    message = (
        f"an optimizer step's {size} samples are fewer than the {dp} data-parallel ranks; "
        "change one of them"
    )
    return problem(_batch_field(s), None, message)


BATCH_RULES: tuple[Rule, ...] = (
    check_run_length,
    check_supervised_samples,
    check_pairs,
    check_rollout_split,
    check_global_batch,
    check_log_prob_micro_batches,
    check_sequence_lengths,
)
MICRO_BATCH_RULES: tuple[Rule, ...] = (check_token_budget, check_samples_per_rank)
