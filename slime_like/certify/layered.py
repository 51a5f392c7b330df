"""A model of transformers whose layers can be run on given inputs, and whose states are recorded
under the names of `slime_like.megatron.tracing.StateRecorder`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_like.engines.local.weight_loader import WeightSlots

# by site: [N, C] of the tokens of all sequences, one after the other
States = Mapping[str, Tensor]

# names of the parts of a layer in transformers, of which the first that a layer has is taken
PARTS: Mapping[str, tuple[str, ...]] = {
    "memory": ("ple",),
    "streams": ("attn_hyper_connection",),
    "norm": ("input_layernorm", "norm", "operator_norm"),
    "attention": ("self_attn", "linear_attn", "attention", "attn", "mamba", "conv"),
    "mlp_streams": ("mlp_hyper_connection",),
    "mlp_norm": ("pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm"),
    "mlp": ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp"),
}
FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "hyper_connection_mixer")


@dataclass(slots=True)
class Call:
    """Arguments of a call of a layer."""

    hidden: Tensor  # [1, L, H]
    rest: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(slots=True)
class _Pass:
    """What the hooks of one forward pass need and record."""

    inputs: Mapping[str, Tensor]  # of this sequence, [L, C]
    states: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)


def parts_of(layer: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The parts of a layer by site. A layer that has a norm behind its attention instead of before
    has no "norm", and one that adds experts and a shared MLP itself has no "mlp"."""
    found = {}
    for part, names in PARTS.items():
        # a layer may have None in place of what its kind lacks
        modules = [m for name in names if (m := getattr(layer, name, None)) is not None]
        if modules:
            found[part] = modules[0]
    if "norm" not in found:
        found.pop("mlp_norm", None)  # then it is one behind the attention
    shared = getattr(layer, "shared_mlp", None)
    if shared is not None and found["mlp"] is not shared:
        del found["mlp"]  # the trainer's also has the shared one
    return found


class LayeredModel:
    """A causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.body = model.get_decoder()
        self.layers: Sequence[torch.nn.Module] = list(self.body.layers)
        self.head = model.get_output_embeddings()
        name = next((name for name in FINAL_NORMS if hasattr(self.body, name)), None)
        self.final_norm = None if name is None else getattr(self.body, name)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.device: torch.device = next(model.parameters()).device

    def weights(self) -> dict[str, Tensor]:
        """Its weights and buffers by the names of files."""
        return WeightSlots(self.model).tensors

    @torch.no_grad()
    def run(self, sequences: Sequence[Tensor], inputs: States | None = None) -> dict[str, Tensor]:
        """The states of all tokens.

        Args:
            sequences: Of tokens, [L] each.
            inputs: What the layers, the final norm and the head take in place of the output before
                them, of those sites that they have.
        """
        passes = self._passes(sequences, inputs or {})
        return {
            site: torch.cat([p.states[site] for p in passes]) for site in passes[0].states
        }  # every sequence has every site

    def without_scaled_embedding(self, sequences: Sequence[Tensor], states: States) -> States:
        """The states of another implementation, without the embedding if this model scales it
        outside of the module: then others may do so elsewhere, too."""
        rows = self.model.get_input_embeddings().weight[sequences[0].to(self.device)]
        own = self.run(sequences[:1])["embedding"]
        if own.shape == rows.shape and torch.equal(own.to(rows), rows):
            return states
        return {site: value for site, value in states.items() if site != "embedding"}

    @torch.no_grad()
    def calls(self, sequences: Sequence[Tensor], inputs: States, layer: int) -> list[Call]:
        """With which arguments the layer is called, for each sequence."""
        return [p.calls[layer] for p in self._passes(sequences, inputs)]

    def _passes(self, sequences: Sequence[Tensor], inputs: States) -> list[_Pass]:
        done = []
        start = 0
        for tokens in sequences:
            end = start + tokens.numel()
            own = _Pass({site: rows[start:end] for site, rows in inputs.items()})
            with self._hooks(own):
                out = self.model(
                    input_ids=tokens[None].to(self.device),
                    position_ids=torch.arange(tokens.numel(), device=self.device)[None],
                    use_cache=False,
                )
            own.states["logits"] = out.logits[0].cpu()
            done.append(own)
            start = end
        return done

    @contextmanager
    def _hooks(self, own: _Pass) -> Iterator[None]:
        handles = []
        for index, layer in enumerate(self.layers):
            before = "embedding" if index == 0 else f"layers.{index - 1}"
            pre = partial(self._enter, own, index, before)
            handles.append(layer.register_forward_pre_hook(pre, with_kwargs=True))
            handles += layer_hooks(layer, own.states, f"layers.{index}")
        if self.final_norm is not None:
            replace = partial(self._replace, own, f"layers.{len(self.layers) - 1}")
            handles.append(self.final_norm.register_forward_pre_hook(replace))
            handles.append(self.final_norm.register_forward_hook(partial(keep, own.states, "norm")))
            handles.append(self.head.register_forward_pre_hook(partial(self._replace, own, "norm")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(
        self,
        own: _Pass,
        index: int,
        before: str,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before a layer: note its call, and give it the input."""
        rest = args[1:]
        keywords = dict(keywords)
        hidden = args[0] if args else keywords.pop("hidden_states")
        if index == 0:
            own.states["embedding"] = hidden[0].flatten(1).cpu()
        hidden = self._given(own, before, hidden)
        own.calls[index] = Call(hidden, rest, keywords)
        return (hidden, *rest), keywords

    def _replace(
        self, own: _Pass, before: str, module: torch.nn.Module, args: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return (self._given(own, before, args[0]), *args[1:])

    def _given(self, own: _Pass, site: str, value: Tensor) -> Tensor:
        rows = own.inputs.get(site)
        if rows is None or rows.numel() != value.numel():
            return value  # a model of which the trainer has other hidden states
        return rows.to(value).reshape(value.shape)


# transformers' blocks that multiply by routed_scaling_factor what the experts have added up
SCALING_OUTPUT = ("Step3p7SparseMoeBlock",)


def layer_hooks(layer: torch.nn.Module, states: dict[str, Tensor], site: str) -> list[Any]:
    """Hooks that keep what a layer and its parts compute; to remove afterwards."""
    handles = [layer.register_forward_hook(partial(keep, states, site))]
    for part, module in parts_of(layer).items():
        handles.append(module.register_forward_hook(partial(keep, states, f"{site}.{part}")))
    for name, module in layer.named_modules():
        if name.endswith("experts"):
            block = layer.get_submodule(name.rpartition(".")[0])
            scaled_later = type(block).__name__ in SCALING_OUTPUT
            scale = float(block.routed_scaling_factor) if scaled_later else 1.0  # type: ignore[arg-type]
            hook = partial(keep_routes, states, f"{site}.router", scale)
            handles.append(module.register_forward_pre_hook(hook))
    return handles


def keep(
    states: dict[str, Tensor], site: str, module: torch.nn.Module, inputs: object, output: object
) -> None:
    """Hook: keep the output [1, L, ...] of a module, or the first of several."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, Tensor)
    states[site] = value.reshape(-1, *value.shape[2:]).flatten(1).cpu()


def keep_routes(
    states: dict[str, Tensor], site: str, scale: float, module: Any, inputs: tuple[Tensor, ...]
) -> None:
    """Hook before experts, which take hidden states [n, H], chosen experts and weights [n, k]: keep
    each expert's weight [n, E], 0 if it is not chosen.

    Args:
        scale: Of the experts' output, which the trainer has in the weights.
    """
    if len(inputs) < 3 or not isinstance(count := getattr(module, "num_experts", None), int):
        return
    weights = inputs[2].float() if inputs[2].dtype.itemsize < 4 else inputs[2]
    weights = weights * scale
    states[site] = weights.new_zeros(weights.size(0), count).scatter(1, inputs[1], weights).cpu()


@torch.no_grad()
def run_layer(layer: torch.nn.Module, calls: Sequence[Call], site: str) -> dict[str, Tensor]:
    """The states of one layer, for each of its calls."""
    found: list[dict[str, Tensor]] = []
    for call in calls:
        states: dict[str, Tensor] = {}
        handles = layer_hooks(layer, states, site)
        try:
            layer(call.hidden, *call.rest, **call.keywords)
        finally:
            for handle in handles:
                handle.remove()
        found.append(states)
    return {name: torch.cat([states[name] for states in found]) for name in found[0]}
