"""What rounding leaves of an adapter's updates, where engines get merged weights.

An engine that gets merged weights holds S_t = round(W + D_t), with the base weight W and the
adapter's update D_t = scale * lora_B lora_A after weight version t. Of a step U_t = D_t - D_{t-1}
the engine sees S_t - S_{t-1}. In bfloat16 the neighbours of a weight are 2^-8 to 2^-7 of it away,
so a step that is smaller than that mostly changes nothing, and else changes too much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.lora.layers import ColumnLora, Lora, ReplicatedLora
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.megatron.model.policy import base_head_weight
from slime_like.weights.parameter_map import expert_number, global_parameters


class MergeRounding:
    """Compares each version with the one before. Keeps a copy of the factors, which are small."""

    def __init__(self, network: LoraNetwork) -> None:
        self._network = network
        self._before: list[dict[str, Lora]] | None = None

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Call it once for each version. Collective. Returns {} for the first one, and while the
        adapter does not change; otherwise

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
        self._before = [
            {name: _copy_of(layer) for name, layer in layers.items()} for layers in adapters
        ]
        # stepped elements, those of them that changed, squared norms of the error, of the step, of
        # the adapter's error and of the adapter
        sums = torch.zeros(6, dtype=torch.float64, device=network.device)
        for index, layers in enumerate(adapters if before is not None else ()):
            assert before is not None
            weights = dict(global_parameters([network.chunks[index]]))
            for name, layer in layers.items():
                if self._is_counted(name, layer):
                    old = before[index][name]
                    weight = weights.get(name)
                    if weight is None:  # the output layer of a tied model
                        weight = base_head_weight(network.chunks[index])
                    sums += _sums(weight, old.delta(), layer.delta())
        dist.all_reduce(sums)
        stepped, changed, error, norm, adapter_error, adapter_norm = sums.tolist()
        if not stepped:
            return {}
        return {
            "lora/merged_changed_frac": changed / stepped,
            "lora/merged_update_error": (error / norm) ** 0.5,
            "lora/merged_adapter_error": (adapter_error / (adapter_norm or 1.0)) ** 0.5,
        }

    def _is_counted(self, name: str, layer: Lora) -> bool:
        """Whether this rank's shard is counted here, and not on a replica."""
        layout = self._network.layout
        if expert_number(name) is not None:
            return layout.expert_dp_rank == 0
        first = layout.dp_rank == 0 and layout.cp_rank == 0
        return first and (layout.tp_rank == 0 or not isinstance(layer, ReplicatedLora))


def _copy_of(layer: Lora) -> Lora:
    if isinstance(layer, ColumnLora):
        return dataclasses.replace(layer, first=_copies(layer.first), second=_copies(layer.second))
    return dataclasses.replace(
        layer, first=layer.first.detach().clone(), second=layer.second.detach().clone()
    )


def _copies(factors: Sequence[Tensor]) -> list[Tensor]:
    return [factor.detach().clone() for factor in factors]


def _sums(weight: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Of one weight; see `measure`. old, new: D_{t-1} and D_t, float32."""
    step = new - old
    base = weight.detach().float()
    sent = (base + new).to(weight.dtype).float()
    seen = sent - (base + old).to(weight.dtype).float()
    stepped = step != 0
    return torch.stack(
        [
            stepped.sum(),
            (stepped & (seen != 0)).sum(),
            (seen - step).double().square().sum(),
            step.double().square().sum(),
            (sent - (base + new)).double().square().sum(),
            new.double().square().sum(),
        ]
    ).double()
