"""Records what a network computes inside: hidden states after each layer and after its parts, the
routers' choices and weights, the final norm and the logits, for every token and in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.megatron.model.policy import LogProbHead, logits_of
from slime_like.megatron.moe import decoder_routers
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import MicroBatch, TokenOutput, TrainSample

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

# megatron-core's names of the parts of a layer, in the order of their computation
PARTS = {
    "memory": "ngram_memory",
    "streams": "self_attention_hyper_connection",  # what attention reads of several streams
    "norm": "input_layernorm",
    "attention": "self_attention",
    "mlp_streams": "mlp_hyper_connection",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp": "mlp",
}


class StateRecorder:
    """Records the states of forward passes; the computation of its passes.

    `states` has, by site, one [t, C] tensor per micro-batch, of this rank's rows. A site is
    "embedding", "layers.3" (the hidden states after it), "layers.3.attention" and so on as in
    `PARTS`, "layers.3.router" (each expert's weight, 0 if it is not chosen), "norm" or "logits".
    """

    def __init__(self, head: LogProbHead) -> None:
        self._head = head
        self.states: dict[str, list[Tensor]] = {}

    @contextmanager
    def recording(self, chunks: Sequence[MegatronModule], layout: ParallelLayout) -> Iterator[None]:
        """Record all passes through the chunks."""
        self.states = {}
        handles = []
        for chunk in chunks:
            decoder = chunk.decoder
            for layer in decoder.layers:
                site = f"layers.{layer.layer_number - 1}"
                if layer.layer_number == 1:
                    handles.append(
                        layer.register_forward_pre_hook(self._take_input, with_kwargs=True)
                    )
                handles.append(layer.register_forward_hook(partial(self._take, site)))
                for name, attribute in PARTS.items():
                    part = getattr(layer, attribute, None)
                    if part is not None and any(True for _ in part.parameters()):
                        hook = partial(self._take, f"{site}.{name}")
                        handles.append(part.register_forward_hook(hook))
            norm = getattr(decoder, "final_layernorm", None)
            if norm is not None:
                handles.append(norm.register_forward_hook(partial(self._take, "norm")))
        for router in decoder_routers(chunks):
            hook = partial(self._take, f"layers.{router.layer_number - 1}.router")
            handles.append(router.register_forward_hook(hook))
        self._layout = layout
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take_input(
        self, module: torch.nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]
    ) -> None:
        self._add("embedding", inputs[0] if inputs else keywords["hidden_states"])

    def _take(self, site: str, module: torch.nn.Module, inputs: object, output: object) -> None:
        """Hook of a module that returns a tensor, or one and a bias to add or something else."""
        if isinstance(output, tuple):
            value, second = output[:2]
            if site.endswith((".attention", ".mlp")) and isinstance(second, Tensor):
                value = value + second
        else:
            value = output
        self._add(site, value)

    def _add(self, site: str, value: object) -> None:
        assert isinstance(value, Tensor)
        # copied: the residual is added in place
        rows = value.detach().reshape(value.size(0), -1).clone()
        if self._head.sequence_parallel:
            rows = self._gather_rows(rows)
        self.states.setdefault(site, []).append(rows)

    def _gather_rows(self, rows: Tensor) -> Tensor:
        if self._layout.tp_size == 1:
            return rows
        gathered = rows.new_empty(self._layout.tp_size * rows.size(0), rows.size(1))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=self._layout.tp_group)
        return gathered

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        """`LogProbHead`'s columns; the logits are recorded."""
        rows = self._gather_rows(hidden[0]) if self._head.sequence_parallel else hidden[0]
        own = logits_of(model, rows).detach()
        shards = [torch.empty_like(own) for _ in range(self._layout.tp_size)]
        if self._layout.tp_size > 1:
            dist.all_gather(shards, own.contiguous(), group=self._layout.tp_group)
        else:
            shards = [own]
        logits = torch.cat(shards, dim=1)[:, : self._head.vocab_size]
        self.states.setdefault("logits", []).append(logits)
        return self._head(model, batch, hidden)


def states_of_samples(
    table: Tensor, groups: Sequence[Sequence[TrainSample]], batches: Sequence[MicroBatch]
) -> list[Tensor]:
    """Split a site by sample: [L, C] each, on the host. table: [C, rows of all complete
    micro-batches]."""
    found = []
    sizes = [sum(batch.lengths) for batch in batches]
    for group, batch, rows in zip(groups, batches, table.T.cpu().split(sizes), strict=True):
        starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
        for sample, start in zip(group, starts):
            found.append(rows[start : start + int(sample.tokens.numel())].clone())
    return found
