"""MoE support: micro-batch information and router replay for the routers, their recorded choices
and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch import Tensor

from arguments.hf.moe import moe_layers
from megatron_patches.patch import release
from slime_like.megatron.ops.router import PackedRouter, RoutedRows
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


# auxiliary losses are recorded in dicts; later in objects of another module
RECORDS_IN_DICT = release() < (0, 18)
# megatron-core's name of an auxiliary loss -> metric
AUX_LOSSES = {
    "load_balancing_loss": "moe_aux_loss",
    "seq_load_balancing_loss": "moe_seq_aux_loss",
    "global_load_balancing_loss": "moe_global_aux_loss",
    "z_loss": "moe_z_loss",
}


def make_length_sync(
    config: TransformerConfig, layout: ParallelLayout
) -> Callable[[list[int]], list[int]] | None:
    """Collective that sets micro-batch lengths to their maximum over the ranks that share experts;
    None if lengths may differ. The allgather dispatcher needs equal numbers of tokens on all ranks;
    alltoall exchanges the numbers."""
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "allgather":
        return None
    if layout.ep_size * layout.etp_size == 1:
        return None

    def longest(totals: list[int]) -> list[int]:
        lengths = torch.tensor(totals, dtype=torch.int64)  # on the host, over gloo
        for group in (layout.etp_group, layout.ep_group):
            dist.all_reduce(lengths, dist.ReduceOp.MAX, group=group)
        return [int(length) for length in lengths]

    return longest


def all_routers(chunks: Iterable[torch.nn.Module]) -> list[PackedRouter]:
    """All routers of a rank's model chunks in layer order, those of multi-token prediction last."""
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in chunks)
    return [module for module in modules if isinstance(module, PackedRouter)]


def decoder_routers(chunks: Iterable[torch.nn.Module]) -> list[PackedRouter]:
    """The routers of decoder layers, which are recorded and replayed."""
    return [
        router
        for router in all_routers(chunks)
        if router.layer_number is None or router.layer_number <= router.config.num_layers
    ]


def begin_routing(
    chunks: Sequence[MegatronModule],
    batches: Sequence[MicroBatch],
    layout: ParallelLayout,
    *,
    record: bool = False,
) -> None:
    """Pass the next micro-batches, and the experts to replay if any, to the routers of `chunks`.
    record: Record the selected experts for `gather_recorded_experts`."""
    clear_aux_losses()
    routers = all_routers(chunks)
    if not routers:
        return
    share = layout.tp_size if routers[0].config.sequence_parallel else 1
    rows = [_routed_rows(batch, layout.tp_rank if share > 1 else 0, share) for batch in batches]
    recorded_routers = decoder_routers(chunks)
    for slot, router in enumerate(recorded_routers):
        router.begin(rows, slot=slot, record=record)
    if len(recorded_routers) < len(routers):  # MTP routers are never recorded or replayed
        rows = [replace(row, routed_experts=None) for row in rows]
        for router in routers[len(recorded_routers) :]:
            router.begin(rows, slot=0, record=False)


def end_routing(chunks: Iterable[torch.nn.Module]) -> None:
    """Forget the routing probabilities that token dispatchers keep of their last pass.

    With them they keep its graph, whose hooks on the parameters hold the model: a cycle that goes
    through C++, so that Python never frees a model with experts that was let go, nor its process
    groups and their threads.
    """
    for module in itertools.chain.from_iterable(chunk.modules() for chunk in chunks):
        if isinstance(module, MoELayer):
            module.token_dispatcher.probs = None


def clear_aux_losses() -> None:
    """Clear megatron-core's record, which is global to the process, while networks have different
    layers."""
    _aux_loss_record().clear()


def _aux_loss_record() -> dict[str, Any]:
    """megatron-core's entries by its name of the loss."""
    if RECORDS_IN_DICT:
        return get_moe_layer_wise_logging_tracker()
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return get_moe_metrics_tracker().metrics


def _routed_rows(batch: MicroBatch, rank: int, size: int) -> RoutedRows:
    total = batch.tokens.numel()
    local = slice(total * rank // size, total * (rank + 1) // size)
    assert batch.is_padding is not None
    routed_experts = None if batch.routed_experts is None else batch.routed_experts[local]
    return RoutedRows(
        batch.seq_ids[local],
        batch.num_seqs,
        batch.is_padding[local],
        batch.tokens[0][local],
        routed_experts,
    )


def gather_recorded_experts(routers: Sequence[PackedRouter], layout: ParallelLayout) -> Tensor:
    """Recorded experts of a forward pass, [MoE layers of this stage * topk, rows of all
    micro-batches] int32; under sequence parallelism gathered over the tensor-parallel ranks."""
    parts = []
    # per micro-batch: [t, topk] of each router
    for experts in zip(*(router.recorded for router in routers), strict=True):
        rows = torch.stack(experts, dim=1).flatten(1).to(torch.int32)  # [t, layers * topk]
        if routers[0].config.sequence_parallel and layout.tp_size > 1:
            gathered = rows.new_empty(layout.tp_size * rows.size(0), rows.size(1))
            dist.all_gather_into_tensor(gathered, rows.contiguous(), group=layout.tp_group)
            rows = gathered
        parts.append(rows)
    return torch.cat(parts).T


def routed_experts_of_samples(
    table: Tensor,
    groups: Sequence[Sequence[TrainSample]],
    batches: Sequence[MicroBatch],
    *,
    topk: int,
) -> list[Tensor]:
    """Split recorded experts by sample: [L, MoE layers of this stage, topk] int16 each, on the
    host. table: `gather_recorded_experts` of complete micro-batches."""
    routed_experts = []
    sizes = [sum(batch.lengths) for batch in batches]
    by_batch = table.T.cpu().to(torch.int16).split(sizes)
    for group, batch, rows in zip(groups, batches, by_batch, strict=True):
        for sample, start in zip(group, itertools.accumulate(batch.lengths, initial=0)):
            length = int(sample.tokens.numel())
            sample_rows = rows[start : start + length]
            routed_experts.append(sample_rows.reshape(length, rows.size(1) // topk, topk).clone())
    return routed_experts


def select_stage_experts(
    routed_experts: Tensor, chunks: Sequence[MegatronModule], config: TransformerConfig
) -> Tensor:
    """Select this stage's layers, in the order of this rank's routers, from routed experts of all
    MoE layers."""
    sparse = moe_layers(config.moe_layer_freq, config.num_layers)
    return routed_experts[
        :, [sum(sparse[: router.layer_number - 1]) for router in decoder_routers(chunks)]
    ]


def replay_disagreement(chunks: Sequence[MegatronModule]) -> float:
    """Fraction of (token, layer) pairs of the last forward pass for which the router would have
    chosen other experts than the replayed ones; NaN without replay. Collective over all ranks."""
    counts = torch.zeros(2, dtype=torch.float64, device=next(chunks[0].parameters()).device)
    for router in decoder_routers(chunks):
        counts += router.disagreement
    dist.all_reduce(counts)
    differing, compared = counts.tolist()
    return differing / compared if compared else float("nan")


def routing_metrics(
    chunks: Sequence[MegatronModule],
    config: TransformerConfig,
    layout: ParallelLayout,
    num_microbatches: int,
) -> dict[str, float]:
    """MoE metrics of the last training pass, equal on all ranks; none for a dense model. Collective
    over all ranks.

    Each auxiliary loss without its coefficient, averaged over MoE layers, micro-batches and
    data-parallel ranks. `moe_load_max`: tokens of the busiest expert over the mean, averaged over
    layers. `moe_replay_disagreement`: see `replay_disagreement`.
    """
    if config.num_moe_experts is None:
        return {}
    routers = decoder_routers(chunks)
    sparse = moe_layers(config.moe_layer_freq, config.num_layers)
    device = next(chunks[0].parameters()).device
    # one row per layer: auxiliary losses, disagreement, load of each expert
    columns = (len(AUX_LOSSES), 2, config.num_moe_experts)
    table = torch.zeros(config.num_layers, sum(columns), dtype=torch.float64, device=device)
    losses, disagreements, loads = table.split(columns, dim=1)
    record = _aux_loss_record()
    for column, name in enumerate(AUX_LOSSES):
        if name in record:
            entry = record[name]
            losses[:, column] = entry["values"] if RECORDS_IN_DICT else entry.values
    for router in routers:
        layer = router.layer_number - 1
        disagreements[layer] = router.disagreement
        loads[layer] = router.load
    dist.all_reduce(table)
    losses, disagreements, loads = table.cpu().split(columns, dim=1)  # the only wait
    # each rank has a partial sum of a loss; the global loss is also summed over data-parallel ranks
    num_terms = {"global_load_balancing_loss": 1}
    metrics = {}
    for (name, metric), total in zip(AUX_LOSSES.items(), losses.sum(dim=0).tolist(), strict=True):
        if name in _enabled_aux_losses(config):
            mean = total / num_terms.get(name, layout.dp_size)
            metrics[metric] = mean / sum(sparse) / num_microbatches
    loads = loads[torch.tensor(sparse)]  # [MoE layers, experts]
    metrics["moe_load_max"] = float((loads.amax(dim=1) / loads.mean(dim=1)).mean())
    differing, compared = disagreements.sum(dim=0).tolist()
    if compared:
        metrics["moe_replay_disagreement"] = differing / compared
    return metrics


def _enabled_aux_losses(config: TransformerConfig) -> set[str]:
    """megatron-core's names of the auxiliary losses that have a coefficient."""
    kinds = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    names = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    enabled = {
        names[kind]
        for kind, coefficient in zip(kinds, coefficients)
        if coefficient and kind in names
    }
    if config.moe_z_loss_coeff:
        enabled.add("z_loss")
    return enabled


def expert_biases(chunks: Sequence[MegatronModule]) -> list[Tensor]:
    """Copies of the expert biases of aux-loss-free balancing, for `restore_expert_biases`.

    megatron-core updates them when gradients are finalised, before it is known whether the
    optimizer step will be skipped.
    """
    return [bias.clone() for bias in _expert_biases(chunks)]


def restore_expert_biases(chunks: Sequence[MegatronModule], biases: Sequence[Tensor]) -> None:
    for bias, saved in zip(_expert_biases(chunks), biases, strict=True):
        bias.copy_(saved)


def _expert_biases(chunks: Sequence[MegatronModule]) -> list[Tensor]:
    # routers by token have none
    biases = [getattr(router, "expert_bias", None) for router in all_routers(chunks)]
    return [bias for bias in biases if bias is not None]
