"""Which experts the tokens of the local engine went to, seen on transformers' expert layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RouteRecorder:
    """Sees what the routers of a transformers model choose. layers: expert layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        # every family hands its experts (hidden states [n, H], experts of each token [n, topk],
        # their weights)
        experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self.layers = len(experts)
        self._records = False
        self._seen: list[Tensor] = []  # of the last forward pass: [n, topk] int16 of each layer
        for module in experts:
            module.register_forward_pre_hook(self._see)

    def _see(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if self._records:
            self._seen.append(given[1].to(torch.int16).cpu())

    @contextmanager
    def recording(self, wanted: bool) -> Iterator[None]:
        """One forward pass."""
        self._records, self._seen = wanted, []
        yield
        self._records = False

    def last(self, batch: int) -> Tensor:
        """Of the last pass, over `batch` rows of one length: [batch, length, layers, topk]."""
        assert len(self._seen) == self.layers, "every expert layer is called once in a pass"
        return torch.stack(self._seen, dim=1).unflatten(0, (batch, -1))

    def of_prompts(self, prompts: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Of a pass over the distinct ones of `prompts`, padded on the left: [P, layers, topk] of
        each of them."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        routes = self.last(len(distinct))
        return [routes[distinct[prompt], routes.size(1) - len(prompt) :] for prompt in prompts]


def whole_routes(parts: Sequence[Tensor], length: int) -> Tensor:
    """[length, layers, topk] of what is known from the first token on, -1 beyond."""
    known = torch.cat(list(parts))[:length]
    return torch.cat([known, known.new_full((length - known.size(0), *known.shape[1:]), -1)])
