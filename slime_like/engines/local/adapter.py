"""A LoRA adapter beside the weights of a transformers model (--lora-sync adapter)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from arguments.hf.peft_adapter import PEFT_PREFIX
from slime_like.text import list_names


class LocalAdapter:
    """Adds scale * lora_B (lora_A x) to the outputs of a model's linear layers. `scale`: alpha over
    rank."""

    def __init__(self, model: torch.nn.Module, scale: float) -> None:
        self._scale = scale
        self._linear = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self._factors: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}  # lora_A, lora_B

    @torch.no_grad()
    def load(self, factors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter. factors: by PEFT's names; cast to the layers' dtype.

        Raises:
            ValueError: Factors of no linear layer, of another shape, or without the other one.
                Raised after all are read, because they may come from collectives that every rank
                has to finish; the adapter is then the one before.
        """
        found = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in factors}
        modules = sorted({name.rpartition(".lora_")[0] for name in found})
        loaded: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}
        wrong = []
        for name in modules:
            layer = self._linear.get(name)
            first = found.get(f"{name}.lora_A.weight")
            second = found.get(f"{name}.lora_B.weight")
            if layer is None or first is None or second is None:
                wrong.append(name)
            elif (second.size(0), first.size(1)) != layer.weight.shape:
                wrong.append(f"{name} {[second.size(0), first.size(1)]}")
            else:
                loaded[layer] = (
                    first.to(layer.weight, copy=True),
                    second.to(layer.weight, copy=True),
                )
        if wrong:
            raise ValueError(
                f"factors sent to the rollout engine are of no linear layer of its model: "
                f"{list_names(wrong)}"
            )
        for module in loaded.keys() - self._factors.keys():
            module.register_forward_hook(self._add)
        self._factors = loaded

    def _add(self, layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if layer not in self._factors:
            return output
        first, second = self._factors[layer]
        low = torch.nn.functional.linear(inputs[0], first)
        return output + torch.nn.functional.linear(low * self._scale, second)
