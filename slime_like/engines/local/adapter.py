"""LoRA adapters beside the weights of a transformers model: one that replaces the one before it
(--lora-sync adapter), or several, of which each row of a batch has its own (the Tinker server)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from arguments.hf.peft_adapter import PEFT_PREFIX
from slime_like.text import list_names

UNNAMED = ""  # the adapter of rows that name none


@dataclass(frozen=True, slots=True)
class Factors:
    """Of one layer."""

    first: Tensor  # lora_A [rank, in]
    second: Tensor  # lora_B [out, rank]
    scale: float  # alpha over rank

    def __call__(self, x: Tensor) -> Tensor:
        """The term of the output, scale * lora_B (lora_A x). x: [..., in]."""
        low = torch.nn.functional.linear(x, self.first)
        if self.scale != 1:  # it is, for the ranks of most clients; a pass is many small operations
            low *= self.scale
        return torch.nn.functional.linear(low, self.second)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a batch with the same adapter."""

    adapter: str
    start: int
    stop: int


class LocalAdapters:
    """Adds the terms of adapters to the outputs of a model's linear layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._linear = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self._adapters: dict[str, dict[torch.nn.Module, Factors]] = {}
        self._hooked: set[torch.nn.Module] = set()
        self._runs: list[Run] = []  # of the batch of the current pass; none: all rows are unnamed
        self._rows = 0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._adapters)

    @torch.no_grad()
    def load(
        self, factors: Iterable[tuple[str, Tensor]], scale: float, name: str = UNNAMED
    ) -> None:
        """Add an adapter, or replace the one of this name. factors: by PEFT's names; cast to the
        layers' dtype. scale: alpha over rank.

        Raises:
            ValueError: Factors of no linear layer, of another shape, or without the other one.
                Raised after all are read, because they may come from collectives that every rank
                has to finish; nothing is changed then.
        """
        found = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in factors}
        modules = sorted({name.rpartition(".lora_")[0] for name in found})
        loaded: dict[torch.nn.Module, Factors] = {}
        wrong = []
        for module in modules:
            layer = self._linear.get(module)
            first = found.get(f"{module}.lora_A.weight")
            second = found.get(f"{module}.lora_B.weight")
            if layer is None or first is None or second is None:
                wrong.append(module)
            elif (second.size(0), first.size(1)) != layer.weight.shape:
                wrong.append(f"{module} {[second.size(0), first.size(1)]}")
            else:
                loaded[layer] = Factors(
                    first.to(layer.weight, copy=True),
                    second.to(layer.weight, copy=True),
                    scale,
                )
        if wrong:
            raise ValueError(
                f"factors sent to the rollout engine are of no linear layer of its model: "
                f"{list_names(wrong)}"
            )
        for adapted in loaded.keys() - self._hooked:
            adapted.register_forward_hook(self._add)
            self._hooked.add(adapted)
        self._adapters[name] = loaded

    def drop(self, name: str) -> None:
        del self._adapters[name]

    @contextmanager
    def of_rows(self, names: Sequence[str]) -> Iterator[None]:
        """For passes over a batch whose rows have these adapters. Those of equal names should be
        next to each other: each run of them is a product of its own."""
        place = 0
        for name, rows in itertools.groupby(names):
            stop = place + len(list(rows))
            self._runs.append(Run(name, place, stop))
            place = stop
        self._rows = place
        try:
            yield
        finally:
            self._runs = []

    def _add(self, layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if len(self._runs) <= 1:
            name = self._runs[0].adapter if self._runs else UNNAMED
            factors = self._adapters.get(name, {}).get(layer)
            return output if factors is None else output.add_(factors(inputs[0]))
        # a layer's input may have the tokens of all rows in one dimension, row by row
        size, remainder = divmod(inputs[0].size(0), self._rows)
        assert not remainder, "every row of a batch is equally long"
        for run in self._runs:
            factors = self._adapters.get(run.adapter, {}).get(layer)
            if factors is not None:
                rows = slice(run.start * size, run.stop * size)
                output[rows] += factors(inputs[0][rows])
        return output
