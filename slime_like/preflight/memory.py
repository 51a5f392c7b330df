"""Memory of a rank in bytes, by component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from arguments.run_config import RunConfig
from slime_like.engines.registry import engine_traits
from slime_like.megatron.factory import frozen_tower
from slime_like.megatron.frozen_parameters import FrozenParameters
from slime_like.megatron.model.gpt import padded_vocab_size
from slime_like.megatron.ops.fused_linear_logprob import (
    BLOCK_ELEMENTS_CPU,
    BLOCK_ELEMENTS_GPU,
    MIN_COLUMNS,
)
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.preflight.batches import PlannedBatches
from slime_like.preflight.fake_world import world_as_rank
from slime_like.preflight.one_rank import (
    OneRank,
    build_rank,
    gradient_bytes,
    optimizer_bytes,
    weight_bytes,
)
from slime_like.preflight.passes import Passes, run_stage
from slime_like.preflight.shape import shape_of
from slime_like.servers.nodes import Node, place_servers
from slime_like.weight_sync.transports.base import transport_traits

RUNTIME = 2 * 10**9  # CUDA context, kernels and libraries on a data-centre GPU: an assumption
# NCCL's buffers per group of more than one rank: an assumption (8 channels with 3 protocols, the
# largest of which has NCCL_BUFFSIZE = 4 MiB for each of 2 directions)
NCCL_GROUP = 64 * 2**20
MEM_FRACTION_STATIC = 0.88  # without --sglang-mem-fraction-static: an assumption
TRAINING = "training"
SYNC = "weight update"
GENERATION = "generation"


@dataclass(frozen=True, slots=True)
class RankReport:
    """Memory and communication of a rank."""

    rank: int
    stage: int
    layers: int
    layout: str
    parameters: int  # number on this rank, with embeddings
    phases: Mapping[str, Mapping[str, int]]  # device memory in bytes, by phase and component
    host: Mapping[str, int]  # bytes in host memory
    in_flight: float  # maximum number of micro-batches held at once by the schedule
    passes: Passes  # of one micro-batch
    state: Mapping[str, int] = field(default_factory=dict)
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    # bytes of gradients, and of the weights in such buffers, by the dimension over which they are
    # reduced
    reduced: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def largest(self) -> str:
        """The largest component that flags can reduce."""
        terms = {k: v for k, v in self.phases[self.peak_phase].items() if k != "runtime"}
        return max(terms, key=lambda name: terms[name])


def report_rank(config: RunConfig, rank: int, batches: PlannedBatches) -> RankReport:
    """Build the networks of one rank and measure them. Requires that no process group exists."""
    gpu = config.preflight.preflight_machine == "gpu"
    frozen_base = bool(config.lora.lora_rank)
    stages = config.virtual_stages
    world = config.world_size
    with world_as_rank(
        config.parallel, virtual_stages=stages, rank=rank, world_size=world
    ) as layout:
        tied = not config.gpt.untie_embeddings_and_output_weights
        built = build_rank(
            config.megatron,
            config.gpt,
            layout,
            gpu=gpu,
            trained=not frozen_base,
            frozen=FrozenParameters.of(config.model, tied=tied),
        )
        passes = run_stage(built, batches.tokens, gpu=gpu)
        weights = weight_bytes(built)
        optimizer = optimizer_bytes(built, gpu=gpu)
        state = {
            "weights": weights,
            "gradients": gradient_bytes(built),
            "optimizer: fp32 parameters": optimizer.main,
            "optimizer: moments": optimizer.moments,
        }
        host = {"optimizer": optimizer.host} if optimizer.host else {}
        if frozen_base:
            state |= _adapters(config, built)
        state |= _other_models(config, layout, weights, host, gpu=gpu)
        in_flight = micro_batches_in_flight(layout, batches.number)
        layers = sum(len(chunk.decoder.layers) for chunk in built.chunks)
        groups = group_sizes(layout)
        reduced = buffers_by_group(built)
        number = sum(parameter.numel() for parameter in built.parameters)
        head = head_bytes(config, batches.tokens // layout.cp_size, gpu=gpu)
    if config.critic_model is not None:
        state["critic"] = _critic(config, rank, gpu=gpu)
    fixed = {"collectives": _collectives(groups, gpu=gpu), "runtime": RUNTIME if gpu else 0}
    training = {
        **state,
        "activations": round(in_flight * passes.kept),
        "working set": passes.peak - passes.kept + optimizer.step,
        **({"head": head} if layout.is_last_stage else {}),
        **fixed,
    }
    return RankReport(
        rank=rank,
        stage=layout.pp_rank,
        layers=layers,
        layout=layout.describe(),
        parameters=number,
        phases={TRAINING: training, **_other_phases(config, rank, {**state, **fixed})},
        host=host,
        in_flight=in_flight,
        passes=passes,
        state=state,
        group_sizes=groups,
        reduced=reduced,
    )


def micro_batches_in_flight(layout: ParallelLayout, number: int) -> float:
    """Maximum number of micro-batches that a stage holds at once, in units of all its layers.

    1F1B: stage p of P holds P - p (arXiv 2006.09503, section 3.2). Interleaved: its warm-up of 2 (P
    - p - 1) + (V - 1) P micro-batches of one chunk, plus one (arXiv 2104.04473, section 2.2;
    `schedules.get_pp_rank_microbatches`).
    """
    pipeline = layout.pp_size
    after = layout.pp_size - layout.pp_rank - 1
    if layout.vp_size == 1:
        return min(number, after + 1)
    warm_up = 2 * after + (layout.vp_size - 1) * pipeline + 1
    return min(number * layout.vp_size, warm_up) / layout.vp_size


def head_bytes(config: RunConfig, rows: int, *, gpu: bool) -> int:
    """Memory of the fused head over `rows` active rows, forward and backward.

    As allocated by `ops/fused_linear_logprob.py`: the hidden states of the rows, a workspace of two
    blocks in fp32 and a third for the slope of a cap of logits, gradients of the hidden states in
    fp32 and of the weight in its dtype, one fp32 slice of the weight's gradient, and statistics per
    row.
    """
    transformer = config.megatron.transformer
    size = transformer.params_dtype.itemsize
    hidden = transformer.hidden_size
    columns = padded_vocab_size(config.gpt, config.parallel.tensor_model_parallel_size)
    columns //= config.parallel.tensor_model_parallel_size
    chunk = config.algorithm.log_probs_chunk_size
    block = rows if chunk == -1 else min(chunk, rows)
    elements = BLOCK_ELEMENTS_GPU if gpu else BLOCK_ELEMENTS_CPU
    width = max(1, min(columns, max(MIN_COLUMNS, elements // max(1, block))))
    own = rows * hidden * (size + 4 + (size if size < 4 else 0)) + columns * hidden * size
    slices = width * hidden * 4 if size < 4 and rows > block else 0
    blocks = 2 if getattr(transformer, "logit_softcap", None) is None else 3
    return own + slices + blocks * 4 * block * width + rows * 12 * 4


def _adapters(config: RunConfig, built: OneRank) -> dict[str, int]:
    """LoRA on every matrix of a layer: r (in + out) parameters, fp32 gradients and Adam moments."""
    parameters = chain.from_iterable(chunk.decoder.parameters() for chunk in built.chunks)
    number = config.lora.lora_rank * sum(sum(p.shape) for p in parameters if p.dim() == 2)
    size = built.config.params_dtype.itemsize
    return {"adapters": number * (size + 4 + (4 if size < 4 else 0) + 8)}


def _other_models(
    config: RunConfig, layout: ParallelLayout, weights: int, host: dict[str, int], *, gpu: bool
) -> dict[str, int]:
    """Networks that are not trained: reference, teacher, and the full model of the local engine."""
    sizes = {}
    if config.algorithm.needs_reference and not (
        config.lora.lora_rank and config.reference_is_base
    ):
        if config.model.ref_offload:
            host["reference"] = weights
        else:
            sizes["reference"] = weights
    if config.teacher is not None:
        megatron = replace(config.megatron, transformer=config.teacher.transformer)
        teacher = build_rank(megatron, config.teacher.gpt, layout, gpu=gpu, trained=False)
        sizes["teacher"] = weight_bytes(teacher)
    if config.distillation.own_teacher and not config.lora.lora_rank:
        size = config.megatron.transformer.params_dtype.itemsize
        averages = size < 4 and config.distillation.opd_self_teacher == "ema"
        sizes["teacher"] = weights + (weights // size * 4 if averages else 0)
    generates = config.algorithm.loss_type != "sft_loss" and not config.debug.debug_train_only
    if not engine_traits(config.rollout.rollout_engine).has_servers and generates:
        size = config.megatron.transformer.params_dtype.itemsize
        sizes["local engine"] = shape_of(config.megatron.transformer, config.gpt).total * size
    return sizes


def _critic(config: RunConfig, rank: int, *, gpu: bool) -> int:
    """Weights, gradients and optimizer of the critic, in its own layout."""
    model = config.critic_model
    assert model is not None
    with world_as_rank(
        model.parallel,
        virtual_stages=model.parallel.num_virtual_stages_per_pipeline_rank,
        rank=rank,
        world_size=config.world_size,
    ) as layout:
        gpt = replace(config.gpt, vision=frozen_tower(config.gpt.vision))
        frozen = FrozenParameters.of_critic(config.critic)
        built = build_rank(model.megatron, gpt, layout, gpu=gpu, value_head=True, frozen=frozen)
        optimizer = optimizer_bytes(built, gpu=gpu)
        return weight_bytes(built) + gradient_bytes(built) + optimizer.device


def _collectives(groups: Mapping[str, int], *, gpu: bool) -> int:
    return NCCL_GROUP * sum(size > 1 for size in groups.values()) if gpu else 0


def _offloaded(config: RunConfig) -> tuple[str, ...]:
    """Components that --offload-train moves to host memory; the frozen base of adapters stays."""
    if config.lora.lora_rank:
        return ("adapters", "critic")
    return ("weights", "gradients", "optimizer: fp32 parameters", "optimizer: moments", "critic")


def _other_phases(
    config: RunConfig, rank: int, resident: dict[str, int]
) -> dict[str, dict[str, int]]:
    """The phases of the weight update, and of generation by servers on the same GPU. In an update a
    rank has a bucket and the shards that it is made of, and another bucket that is being sent."""
    phases = {}
    if engine_traits(config.rollout.rollout_engine).has_servers:
        overlaps = transport_traits(config.sglang.update_weight_transport).overlaps
        buckets = (3 if overlaps else 2) * config.sglang.update_weight_buffer_size
        phases[SYNC] = {**resident, "messages with weights": buckets}
    if config.sglang.colocate and rank in ranks_with_servers(config):
        server = round(server_fraction(config) * config.preflight.preflight_memory_gb * 10**9)
        offloaded = _offloaded(config) if config.sglang.offload_train else ()
        remaining = {name: size for name, size in resident.items() if name not in offloaded}
        phases[GENERATION] = {**remaining, "server": server}
    return phases


def buffers_by_group(built: OneRank) -> dict[str, tuple[int, int]]:
    """Bytes of megatron-core's buffers, see `RankReport.reduced`."""
    sizes = {}
    modules = built.modules if built.trained else []
    for name, kind in (("data", "buffers"), ("expert data", "expert_parallel_buffers")):
        buffers = list(chain.from_iterable(getattr(module, kind) for module in modules))
        weights = sum(b.param_data.nbytes for b in buffers if b.param_data is not None)
        if buffers:
            sizes[name] = (sum(b.grad_data.nbytes for b in buffers), weights)
    return sizes


def ranks_with_servers(config: RunConfig) -> set[int]:
    """The ranks whose GPUs --colocate shares with servers. Raises RunError if they do not fit."""
    each = config.preflight.preflight_gpus_per_node
    nodes = [
        Node(first, min(each, config.world_size - first), None, "", ())
        for first in range(0, config.world_size, each)
    ]
    gpus = config.sglang.rollout_num_gpus or config.world_size
    placed = place_servers(nodes, gpus, config.sglang.rollout_num_gpus_per_engine, colocate=True)
    shares = [share for shares in placed for share in shares]
    return {
        share.node.rank + gpu
        for share in shares
        for gpu in range(share.first_gpu, share.first_gpu + share.gpus)
    }


def server_fraction(config: RunConfig) -> float:
    """Share of the GPU's memory that a colocated server uses for weights and KV cache."""
    fraction = (config.sglang.sglang_server_flags or {}).get("mem_fraction_static")
    return MEM_FRACTION_STATIC if fraction is None else float(str(fraction))


def group_sizes(layout: ParallelLayout) -> dict[str, int]:
    return {
        "tensor": layout.tp_size,
        "context": layout.cp_size,
        "pipeline": layout.pp_size,
        "data": layout.dp_cp_group.size(),
        "expert": layout.ep_size,
        "expert-tensor": layout.etp_size,
        "expert data": layout.world_size // (layout.ep_size * layout.etp_size * layout.pp_size),
    }
