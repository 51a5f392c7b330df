"""What rounding leaves of an adapter's updates, where engines get merged weights.

An engine that gets merged weights holds S_t = round(W + D_t), with the base weight W and the
adapter's update D_t = scale * lora_B lora_A after weight version t. Of a step U_t = D_t - D_{t-1}
the engine sees S_t - S_{t-1}. In bfloat16 the neighbours of a weight are 2^-8 to 2^-7 of it away,
so a step that is smaller than that mostly changes nothing, and else changes too much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.lora.layers import ColumnLora, Lora, ReplicatedLora
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.megatron.model.policy import base_head_weight
from slime_like.weights.parameter_map import expert_number, global_parameters

# Elements of a weight at a time: memory for a dozen float32 tensors of this size is all it takes.
BLOCK = 2**20


class MergeRounding:
    """Compares a version with the one before: the second and then every `interval`-th. Keeps a copy
    of the factors of the one before, which are small. Replicas of a weight share the work."""

    def __init__(self, network: LoraNetwork, interval: int = 1) -> None:
        assert interval > 0
        self._network = network
        self._interval = interval
        self._unmeasured = 0  # versions to come that neither are measured nor precede one that is
        self._before: list[dict[str, Lora]] | None = None

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Call it once for each version. Collective. Returns {} for those that are not measured,
        and while the adapter does not change; otherwise

        - `lora/merged_changed_frac`: the share of elements with U_t != 0 that change in the engine,
          S_t != S_{t-1};
        - `lora/merged_update_error`: ||(S_t - S_{t-1}) - U_t|| / ||U_t|| over all adapted weights,
          0 if nothing is lost; 1 is what an engine that gets no update has, and rounding can exceed
          it;
        - `lora/merged_adapter_error`: ||S_t - (W + D_t)|| / ||D_t||, of the whole adapter. It is at
          most 1, where the engine has the base model.
        """
        network = self._network
        adapters = [adapter.layers for adapter in network.adapters]
        before = self._before
        if before is None and self._unmeasured:
            self._unmeasured -= 1
            return {}
        if before is not None and not self._is_new(before):
            return {}
        self._before = None
        if before is None or self._interval == 1:
            self._before = [
                {name: _copy_of(layer) for name, layer in layers.items()} for layers in adapters
            ]
        if before is None:
            return {}
        self._unmeasured = max(0, self._interval - 2)
        # stepped elements, those of them that changed, squared norms of the error, of the step, of
        # the adapter's error and of the adapter
        sums = torch.zeros(6, dtype=torch.float64, device=network.device)
        blocks = 0  # so far; replicas of a weight take turns
        for index, layers in enumerate(adapters):
            weights = dict(global_parameters([network.chunks[index]]))
            for name, layer in layers.items():
                replica, replicas = self._replica(name, layer)
                weight = weights.get(name)
                if weight is None:  # the output layer of a tied model
                    weight = base_head_weight(network.chunks[index])
                for block in _blocks(weight.detach(), before[index][name], layer):
                    if blocks % replicas == replica:
                        sums += _sums(*block)
                    blocks += 1
        dist.all_reduce(sums)
        stepped, changed, error, norm, adapter_error, adapter_norm = sums.tolist()
        if not stepped:
            return {}
        return {
            "lora/merged_changed_frac": changed / stepped,
            "lora/merged_update_error": (error / norm) ** 0.5,
            "lora/merged_adapter_error": (adapter_error / (adapter_norm or 1.0)) ** 0.5,
        }

    def _is_new(self, before: Sequence[Mapping[str, Lora]]) -> bool:
        """Whether any factor differs on any rank from those of the version before."""
        network = self._network
        same = all(
            torch.equal(old, new)
            for old_layers, adapter in zip(before, network.adapters, strict=True)
            for name, layer in adapter.layers.items()
            for old, new in zip(_factors(old_layers[name]), _factors(layer), strict=True)
        )
        changed = torch.tensor(not same, dtype=torch.int32, device=network.device)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX)
        return bool(changed)

    def _replica(self, name: str, layer: Lora) -> tuple[int, int]:
        """The number of this rank among those that hold the same shard of a weight, and theirs."""
        layout = self._network.layout
        if expert_number(name) is not None:
            shards = layout.pp_size * layout.ep_size * layout.etp_size
            return layout.expert_dp_rank, layout.world_size // shards
        rank = layout.dp_rank * layout.cp_size + layout.cp_rank
        ranks = layout.dp_size * layout.cp_size
        if isinstance(layer, ReplicatedLora):
            return rank * layout.tp_size + layout.tp_rank, ranks * layout.tp_size
        return rank, ranks


def _copy_of(layer: Lora) -> Lora:
    if isinstance(layer, ColumnLora):
        return dataclasses.replace(layer, first=_copies(layer.first), second=_copies(layer.second))
    return dataclasses.replace(
        layer, first=layer.first.detach().clone(), second=layer.second.detach().clone()
    )


def _copies(factors: Sequence[Tensor]) -> list[Tensor]:
    return [factor.detach().clone() for factor in factors]


def _factors(layer: Lora) -> list[Tensor]:
    if isinstance(layer, ColumnLora):
        return [*layer.first, *layer.second]
    return [layer.first, layer.second]


def _products(layer: Lora) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The pieces of a weight that have adapters: first row, lora_A [rank, in] and lora_B [rows,
    rank]."""
    if not isinstance(layer, ColumnLora):
        yield 0, layer.first, layer.second
        return
    row = 0
    for piece in layer.order:
        if piece.module is not None:
            yield (
                row,
                layer.first[piece.module],
                layer.second[piece.module][piece.start : piece.stop],
            )
        row += piece.stop - piece.start


def _blocks(
    weight: Tensor, old: Lora, new: Lora
) -> Iterator[tuple[Tensor, Sequence[Tensor], Sequence[Tensor], float]]:
    """Rows of a weight, their factors in D_{t-1} and D_t, and the scale."""
    for (start, *before), (_, *after) in zip(_products(old), _products(new), strict=True):
        rows = max(1, BLOCK // weight.size(1))
        for row in range(0, after[1].size(0), rows):
            block = slice(row, row + rows)
            yield (
                weight[start + row : start + row + after[1][block].size(0)],
                (before[0], before[1][block]),
                (after[0], after[1][block]),
                new.scale,
            )


def _sums(weight: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], scale: float) -> Tensor:
    """Of rows of a weight; see `measure`. old, new: lora_A and lora_B. Only sums are float64."""
    delta_before = scale * (old[1].float() @ old[0].float())
    delta = scale * (new[1].float() @ new[0].float())
    step = delta - delta_before
    base = weight.float()
    before = (base + delta_before).to(weight.dtype)
    exact = base + delta
    sent = exact.to(weight.dtype)
    seen = sent.float() - before.float()
    return torch.stack(
        [
            torch.count_nonzero(step).double(),
            torch.count_nonzero(sent != before).double(),  # without a step they are equal
            _squares(seen - step),
            _squares(step),
            _squares(sent.float() - exact),
            _squares(delta),
        ]
    )


def _squares(values: Tensor) -> Tensor:
    return values.square().sum(dtype=torch.float64)
