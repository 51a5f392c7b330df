"""Rules between settings, one small function each. A rule returns what is wrong; all rules run, and everything is told together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from arguments.eval_sets import EvalSet
from arguments.groups import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    DebugConfig,
    DistillationConfig,
    EvalConfig,
    GateConfig,
    GPTModelConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
    SchedulingConfig,
    ServerConfig,
    SglangConfig,
)
from arguments.megatron import required_without_checkpoint
from arguments.megatron_configs import Machine, resolve_transformer_impl
from slime_like.config import Problem, flag_name
from slime_like.losses.off_policy import OffPolicyConfig
from slime_like.losses.registry import PolicyLoss
from slime_like.losses.value_loss import ValueLossConfig

TASK_PREFIX = "reasoning_gym:"  # of a source that makes its rows, answers and scores itself


@dataclass(frozen=True, slots=True)
class Settings:
    """What the rules look at. core: megatron-core's fields, from flags and checkpoint. loss: as its settings,
    policy_loss, make it. given: names of the fields that the user set."""

    model: ModelConfig
    lora: LoraConfig
    gpt: GPTModelConfig
    parallel: ParallelConfig
    data: DataConfig
    eval: EvalConfig
    eval_sets: tuple[EvalSet, ...]
    rollout: RolloutConfig
    scheduling: SchedulingConfig
    sglang: SglangConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    distillation: DistillationConfig
    off_policy: OffPolicyConfig
    loss: PolicyLoss
    policy_loss: Any
    critic: CriticConfig
    value_loss: ValueLossConfig
    gates: GateConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    debug: DebugConfig
    server: ServerConfig
    core: Mapping[str, Any]
    given: frozenset[str]
    world_size: int
    machine: Machine

    @property
    def trains(self) -> bool:
        return not self.debug.debug_rollout_only

    @property
    def generates(self) -> bool:
        """Whether an engine makes responses: not in supervised fine-tuning, nor from saved rollouts."""
        return self.algorithm.loss_type == "policy_loss" and not self.debug.debug_train_only and self.debug.load_debug_rollout_data is None

    @property
    def evaluates(self) -> bool:
        """Whether an engine answers --eval-prompt-data, in whatever way the run trains."""
        return self.eval.eval_interval is not None and not self.debug.debug_train_only

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def data_parallel_size(self) -> int | None:
        """None when the world cannot be cut as asked, which has its own rule."""
        whole, rest = divmod(self.world_size, self.parallel.model_parallel_size)
        return None if rest else whole


class LayoutSettings(Protocol):
    """What the rules about parallel sizes look at: of a run, or of a conversion between formats."""

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def core(self) -> Mapping[str, Any]: ...

    @property
    def world_size(self) -> int: ...


Rule = Callable[[Settings], list[Problem]]


def problem(field: str, value: Any, message: str) -> list[Problem]:
    """One problem with a flag, as a list."""
    return [Problem(flag_name(field), value, message)]


# --- parallel layout -------------------------------------------------------------------------------------------------


def world_is_divisible(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.model_parallel_size
    if s.world_size % size == 0:
        return []
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = " x ".join(
        f"{flag_name(n)} {getattr(s.parallel, n)}" for n in names if n != "context_parallel_size" or s.parallel.context_parallel_size > 1
    )
    return problem(
        "tensor_model_parallel_size",
        None,
        f"{sizes} = {size} does not divide the {s.world_size} processes; change a size or the number of processes",
    )


def sequence_parallel_needs_tensor_parallel(s: Settings) -> list[Problem]:
    if s.parallel.sequence_parallel and s.parallel.tensor_model_parallel_size == 1:
        return problem("sequence_parallel", None, "needs --tensor-model-parallel-size above 1; leave it out or raise that")
    return []


def tensor_parallel_divides_the_network(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.tensor_model_parallel_size
    found = []
    for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        whole = s.core.get(name)
        if whole and whole % size:
            found += problem("tensor_model_parallel_size", size, f"does not divide {flag_name(name)} {whole}; choose a divisor of it")
    return found


def context_parallel_has_limits(s: Settings) -> list[Problem]:
    """What ranks that share sequences cannot do, and which of them exchanges keys and values how."""
    size, how = s.parallel.context_parallel_size, s.core.get("cp_comm_type")
    if size == 1:
        used = how is None or (s.critic.critic_context_parallel_size or 1) > 1
        return [] if used else problem("cp_comm_type", how, "needs --context-parallel-size above 1; leave it out")
    found = []
    for name in ("attention_dropout", "hidden_dropout"):
        if s.core.get(name):
            found += problem(
                name, s.core[name], "must be 0 with --context-parallel-size above 1, whose ranks would all drop the same positions"
            )
    if s.core.get("multi_latent_attention"):
        found += problem("context_parallel_size", size, "does not go with multi-latent attention yet; the only legal value is 1")
    if resolve_transformer_impl(s.model, s.machine) == "local" and how not in (None, "all_gather"):
        found += problem("cp_comm_type", how, "needs Transformer Engine layers, which are not used here; use all_gather, or leave it out")
    heads, tensor = s.core.get("num_attention_heads"), s.parallel.tensor_model_parallel_size
    groups = s.core.get("num_query_groups") or heads
    if how == "a2a" and heads and groups and (heads // tensor % size or groups // tensor % size):
        have = f"the {heads} heads and {groups} query groups, over --tensor-model-parallel-size {tensor}"
        found += problem(
            "cp_comm_type", how, f"exchanges heads, so --context-parallel-size {size} must divide {have}; use p2p or all_gather"
        )
    return found


def virtual_stages_of(parallel: ParallelConfig, num_layers: int | None) -> int | None:
    """Model chunks on each pipeline rank, by either of the two flags; None without the interleaved schedule."""
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None or not num_layers:
        return None
    return num_layers // parallel.pipeline_model_parallel_size // per_chunk


def interleaved_flags(s: Settings) -> list[Problem]:
    parallel = s.parallel
    stages, layers = parallel.num_virtual_stages_per_pipeline_rank, parallel.num_layers_per_virtual_pipeline_stage
    if stages is None and layers is None:
        return []
    name = "num_layers_per_virtual_pipeline_stage" if stages is None else "num_virtual_stages_per_pipeline_rank"
    if stages is not None and layers is not None:
        return problem("num_layers_per_virtual_pipeline_stage", layers, "excludes --num-virtual-stages-per-pipeline-rank; give one of them")
    if parallel.pipeline_model_parallel_size == 1:
        return problem(name, getattr(parallel, name), "needs --pipeline-model-parallel-size above 1")
    if stages == 1:
        return problem(name, 1, "must be above 1; leave it out for the plain schedule")
    return []


def pipeline_divides_the_layers(s: LayoutSettings) -> list[Problem]:
    pipeline, layers = s.parallel.pipeline_model_parallel_size, s.core.get("num_layers")
    if not layers:
        return []
    if layers % pipeline:
        return problem("pipeline_model_parallel_size", pipeline, f"does not divide the {layers} layers; choose a divisor of {layers}")
    per_rank = layers // pipeline
    stages, per_chunk = s.parallel.num_virtual_stages_per_pipeline_rank, s.parallel.num_layers_per_virtual_pipeline_stage
    if stages and per_rank % stages:
        return problem("num_virtual_stages_per_pipeline_rank", stages, f"does not divide the {per_rank} layers of a pipeline rank")
    if per_chunk and (per_rank % per_chunk or per_rank == per_chunk):
        return problem(
            "num_layers_per_virtual_pipeline_stage", per_chunk, f"must be a proper divisor of the {per_rank} layers of a pipeline rank"
        )
    return []


def backend_is_there(s: Settings) -> list[Problem]:
    if s.parallel.distributed_backend == "nccl" and not s.machine.cuda:
        return problem("distributed_backend", "nccl", "needs CUDA, which is not available here; use gloo or auto")
    return []


# --- network and its checkpoint --------------------------------------------------------------------------------------


def network_is_complete(s: Settings) -> list[Problem]:
    described = s.gpt.vocab_size is not None or any(s.core.get(n) for n in ("num_layers", "hidden_size", "num_attention_heads"))
    if s.model.hf_checkpoint is not None or not (described or s.debug.debug_train_only):
        return []
    remedy = "is missing; without --hf-checkpoint the network is described by flags"
    return [Problem(name, None, remedy) for name in required_without_checkpoint(s.core, s.gpt)]


def checkpoint_is_needed(s: Settings) -> list[Problem]:
    if s.model.hf_checkpoint is None and not s.debug.debug_train_only:
        return problem("hf_checkpoint", None, "is missing: a folder with a Hugging Face model, for its weights and its tokenizer")
    return []


def transformer_engine_is_there(s: Settings) -> list[Problem]:
    if s.model.transformer_impl != "transformer_engine" or (s.machine.transformer_engine and s.machine.cuda):
        return []
    missing = "Transformer Engine, which is not installed" if not s.machine.transformer_engine else "CUDA, which is not available here"
    return problem("transformer_impl", "transformer_engine", f"needs {missing}; use local or auto")


def local_layers_have_limits(s: Settings) -> list[Problem]:
    if resolve_transformer_impl(s.model, s.machine) == "transformer_engine":
        return []
    found = []
    backend = s.core.get("attention_backend", "auto")
    if backend not in ("auto", "local"):
        found += problem("attention_backend", backend, "needs Transformer Engine layers, which are not used here; use auto or local")
    if s.core.get("layernorm_zero_centered_gamma"):
        found.append(Problem("--apply-layernorm-1p", None, "needs Transformer Engine layers, which are not used here; leave it out"))
    return found


def attention_backend_is_there(s: Settings) -> list[Problem]:
    """With Transformer Engine layers: one of its kernels. megatron-core chooses by environment variables, and asserts on those it finds."""
    if resolve_transformer_impl(s.model, s.machine) != "transformer_engine":
        return []
    backend = s.core.get("attention_backend", "auto")
    if backend == "local":
        words = "is the attention of layers without Transformer Engine; use auto, flash, fused or unfused, or --transformer-impl local"
        return problem("attention_backend", backend, words)
    wanted = {f"NVTE_{kernel.upper()}_ATTN": str(int(backend in (kernel, "auto"))) for kernel in ("flash", "fused", "unfused")}
    set_otherwise = [f"{name}={os.environ[name]}" for name, value in wanted.items() if os.environ.get(name, value) != value]
    if set_otherwise:
        words = f"contradicts the environment's {', '.join(set_otherwise)}; unset what NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN say"
        return problem("attention_backend", backend, words)
    return []


def recompute_is_complete(s: Settings) -> list[Problem]:
    granularity = s.core.get("recompute_granularity")
    if granularity is None:
        extra = [n for n in ("recompute_method", "recompute_num_layers", "recompute_modules") if s.core.get(n) is not None]
        return [Problem(flag_name(n), s.core[n], "needs --recompute-granularity") for n in extra]
    found = []
    for name in ("recompute_method", "recompute_num_layers"):
        value = s.core.get(name)
        if granularity == "full" and value is None:
            found += problem(name, None, "is missing; --recompute-granularity full needs it")
        if granularity == "selective" and value is not None:
            found += problem(name, value, "goes with --recompute-granularity full only; leave it out")
    return found


def network_numbers(s: Settings) -> list[Problem]:
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels")
    found = [p for n in names if s.core.get(n) is not None and s.core[n] < 1 for p in problem(n, s.core[n], "must be >= 1")]
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= s.core.get(name, 0.0) < 1:
            found += problem(name, s.core[name], "must be 0 <= x < 1")
    heads, query_groups, hidden = s.core.get("num_attention_heads"), s.core.get("num_query_groups"), s.core.get("hidden_size")
    if heads and query_groups and not found and heads % query_groups:
        found += problem("num_query_groups", query_groups, f"does not divide --num-attention-heads {heads}")
    if heads and hidden and not found and s.core.get("kv_channels") is None and hidden % heads:
        found += problem("num_attention_heads", heads, f"does not divide --hidden-size {hidden}, and there is no --kv-channels")
    return found


# --- sizes of a rollout and its steps --------------------------------------------------------------------------------


def run_length(s: Settings) -> list[Problem]:
    if s.rollout.num_rollout is not None and s.rollout.num_epoch is not None:
        return problem("num_epoch", s.rollout.num_epoch, "excludes --num-rollout; give one of them")
    if s.rollout.num_rollout is None and s.rollout.num_epoch is None:
        return problem("num_rollout", None, "is missing: the number of rollouts in the run (or give --num-epoch)")
    if s.rollout.num_rollout is None and s.data.prompt_data is None:
        return problem("num_epoch", s.rollout.num_epoch, "counts passes over --prompt-data, which is missing; use --num-rollout")
    return []


def supervised_samples(s: Settings) -> list[Problem]:
    if s.algorithm.loss_type == "sft_loss" and s.rollout.n_samples_per_prompt != 1:
        return problem(
            "n_samples_per_prompt", s.rollout.n_samples_per_prompt, "must be 1 with --loss-type sft_loss: a row is a sample; leave it out"
        )
    return []


def global_batch_of(s: Settings) -> int | None:
    """Samples in each optimizer step; None when the flags do not give a whole number."""
    steps, size = s.algorithm.num_steps_per_rollout, s.algorithm.global_batch_size
    if size is not None:
        return size if s.samples_per_rollout % size == 0 and steps in (None, s.samples_per_rollout // size) else None
    whole, rest = divmod(s.samples_per_rollout, steps or 1)
    return None if rest else whole


def rollout_is_divisible(s: Settings) -> list[Problem]:
    if not s.trains or global_batch_of(s) is not None:
        return []
    steps, size, samples = s.algorithm.num_steps_per_rollout, s.algorithm.global_batch_size, s.samples_per_rollout
    have = (
        f"--rollout-batch-size {s.rollout.rollout_batch_size} x --n-samples-per-prompt {s.rollout.n_samples_per_prompt} = {samples} samples"
    )
    if size is not None and samples % size:
        return problem("global_batch_size", size, f"does not divide {have}")
    if size is not None:
        return problem(
            "num_steps_per_rollout", steps, f"contradicts --global-batch-size {size}: {have} are {samples // size} steps; give one of them"
        )
    return problem("num_steps_per_rollout", steps, f"does not divide {have}")


def global_batch_is_divisible(s: Settings) -> list[Problem]:
    """Also the interleaved schedule's condition on the number of micro-batches."""
    size, dp, micro = global_batch_of(s), s.data_parallel_size, s.algorithm.micro_batch_size
    if size is None or dp is None or not s.trains or s.algorithm.use_dynamic_batch_size:
        return []
    if s.algorithm.loss_reduction == "token_mean_legacy" and size % (dp * micro):
        return []  # the reduction's own rule tells it
    name = "global_batch_size" if s.algorithm.global_batch_size else "rollout_batch_size"
    if size % (dp * micro):
        parts = f"{dp} data-parallel ranks x --micro-batch-size {micro}"
        return problem(name, None, f"an optimizer step's {size} samples are not divisible by {parts} = {dp * micro}; change one of them")
    micro_batches, pipeline = size // (dp * micro), s.parallel.pipeline_model_parallel_size
    if virtual_stages_of(s.parallel, s.core.get("num_layers")) and micro_batches % pipeline:
        return problem(
            name, None,
            f"the interleaved schedule needs a multiple of --pipeline-model-parallel-size {pipeline} micro-batches in a step; there are {micro_batches}",
        )  # fmt: skip
    return []


def log_prob_micro_batches(s: Settings) -> list[Problem]:
    """The interleaved schedule's condition, for the forward passes over a whole rollout."""
    size, dp, pipeline = s.algorithm.log_probs_micro_batch_size, s.data_parallel_size, s.parallel.pipeline_model_parallel_size
    if size is None or dp is None or not virtual_stages_of(s.parallel, s.core.get("num_layers")):
        return []
    if s.samples_per_rollout % (dp * size * pipeline):
        need = f"{dp} data-parallel ranks x {size} x --pipeline-model-parallel-size {pipeline}"
        message = f"the interleaved schedule needs the {s.samples_per_rollout} samples of a rollout to be divisible by {need}"
        return problem("log_probs_micro_batch_size", size, message)
    return []


def sequences_fit(s: Settings) -> list[Problem]:
    """Positions beyond the network's are not defined, or not trained."""
    limit, prompt = s.gpt.max_position_embeddings, s.data.rollout_max_prompt_len or 1
    responses = {}
    if s.generates or (s.evaluates and any(each.max_response_len is None for each in s.eval_sets)):
        responses["rollout_max_response_len"] = s.rollout.rollout_max_response_len
    if s.evaluates and (own := [each.max_response_len for each in s.eval_sets if each.max_response_len is not None]):
        responses["eval_config" if s.eval.eval_config is not None else "eval_max_response_len"] = max(own)
    have = f"with --rollout-max-prompt-len {prompt} it " if prompt > 1 else ""
    message = f"{have}exceeds the {limit} positions of the network (--max-position-embeddings)"
    too_long = {name: response for name, response in responses.items() if limit is not None and response + prompt > limit}
    return [p for name, response in too_long.items() for p in problem(name, response, message)]


PARALLEL_RULES: tuple[Rule, ...] = (
    world_is_divisible, sequence_parallel_needs_tensor_parallel, tensor_parallel_divides_the_network,
    context_parallel_has_limits, interleaved_flags, pipeline_divides_the_layers, backend_is_there,
)  # fmt: skip
NETWORK_RULES: tuple[Rule, ...] = (
    network_is_complete, checkpoint_is_needed, transformer_engine_is_there, local_layers_have_limits, attention_backend_is_there,
    recompute_is_complete, network_numbers,
)  # fmt: skip
BATCH_RULES: tuple[Rule, ...] = (
    run_length,
    supervised_samples,
    rollout_is_divisible,
    global_batch_is_divisible,
    log_prob_micro_batches,
    sequences_fit,
)
