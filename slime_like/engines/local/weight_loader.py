"""Loads a stream of Hugging Face tensors into the parameters of a transformers model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from slime_like.text import list_names
from slime_like.weights.published import as_published


class WeightSlots:
    """Writes (checkpoint name, tensor) pairs into a model's weights, each exactly once.

    transformers stores some weights differently from the checkpoint, e.g. all experts of a layer in
    one tensor; a slot is then a view of the part with that checkpoint name. Tied weights are
    several names of one slot.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        has_conversions = bool(get_model_conversion_mapping(model, add_legacy=False))
        self._slots: dict[str, Tensor] = {}
        self._tables: dict[str, Tensor] = {}
        for name, weight in model.state_dict().items():
            views = {name: weight}
            if has_conversions:
                views = _checkpoint_views(model, name, weight)
            if weight.is_floating_point():
                self._slots |= views
            else:  # no weight: it is in the files, or follows from config.json
                self._tables |= views
        tied_names: dict[int, set[str]] = {}  # by address
        for name, slot in self._slots.items():
            tied_names.setdefault(slot.data_ptr(), set()).add(name)
        self._same_slot = {name: tied_names[s.data_ptr()] for name, s in self._slots.items()}
        self._kept: set[str] = set()  # names that updates may leave out

    @property
    def has_tables(self) -> bool:
        """Whether the model has tables of integers."""
        return bool(self._tables)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by checkpoint name; views of the model's."""
        return dict(self._slots)

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights that updates may leave out because they do not change, e.g. of a frozen
        vision tower, and tables of integers. Names that the model does not have are ignored."""
        for name, tensor in weights:
            if name in self._tables:
                self._tables[name].copy_(tensor)
            elif name in self._slots:
                self._slots[name].copy_(tensor)
                self._kept.add(name)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all pairs into the model, cast to its dtype; one name is enough for tied weights.

        Raises:
            ValueError: Names unknown, repeated, misshapen and missing weights. Raised after all
                pairs are read, because they may come from collectives that every rank has to
                finish; the model is then partially updated.
        """
        seen: set[str] = set()
        problems: dict[str, list[str]] = {}
        for name, tensor in weights:
            if name not in self._slots:  # from a checkpoint with a vision tower
                name = name.replace("model.language_model.", "model.", 1)
            slot = self._slots.get(name)
            if slot is None:
                problems.setdefault("unknown", []).append(name)
            elif name in seen:
                problems.setdefault("received twice", []).append(name)
            elif slot.shape != tensor.shape:
                shapes = f"{name} {list(tensor.shape)} (the model's: {list(slot.shape)})"
                problems.setdefault("of another shape", []).append(shapes)
            elif seen.isdisjoint(self._same_slot[name]):
                slot.copy_(tensor)
            elif not torch.equal(slot, tensor.to(slot)):
                problems.setdefault("different from the weight they are tied to", []).append(name)
            seen.add(name)
        present = seen | self._kept
        missing = [name for name in self._slots if present.isdisjoint(self._same_slot[name])]
        if missing:
            problems["missing"] = missing
        if problems:
            texts = [f"{kind}: {list_names(names)}" for kind, names in problems.items()]
            raise ValueError("weights sent to the rollout engine are " + "; ".join(texts))


def _checkpoint_views(model: PreTrainedModel, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Views of `weight`, entry `name` of the model's state dict, keyed by checkpoint name.

    Applies transformers' own save conversion to the flat index of every element; the resulting
    indices give offset and strides of each view. Raises ValueError for a model with a conversion
    that does more than rearrange one weight.
    """
    index = torch.arange(weight.numel()).view(weight.shape)
    views = {}
    for part_name, part in revert_weight_conversion(model, {name: index}).items():
        offset = int(part.flatten()[0])
        strides = [
            int(part.select(d, 1).flatten()[0]) - offset if part.size(d) > 1 else 1
            for d in range(part.dim())
        ]
        if not torch.equal(index.as_strided(part.shape, strides, offset), part):
            raise ValueError(
                f"the local engine does not support {type(model).__name__}: its weight {name!r} "
                "does not rearrange checkpoint weights"
            )
        view = weight.as_strided(part.shape, strides, weight.storage_offset() + offset)
        published, slot = as_published(type(model).__name__, part_name, view)
        views[published] = slot
    return views
