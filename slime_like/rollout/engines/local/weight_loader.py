"""Where each weight of a Hugging Face checkpoint lives in a transformers model in memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

MAX_NAMES = 8  # listed in an error message


class WeightSlots:
    """Writes (checkpoint name, tensor) pairs into a model's weights, each exactly once.

    transformers keeps some weights otherwise than a checkpoint names them, e.g. all experts of a
    layer in one tensor; a slot is then a view of the part that the checkpoint name stands for. Tied
    weights are several names of one slot.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        has_conversions = bool(get_model_conversion_mapping(model, add_legacy=False))
        self._slots: dict[str, Tensor] = {}
        for name, weight in model.state_dict().items():
            self._slots.update(
                _checkpoint_views(model, name, weight) if has_conversions else {name: weight}
            )
        names_at: dict[int, list[str]] = {}
        for name, slot in self._slots.items():
            names_at.setdefault(slot.data_ptr(), []).append(name)
        self._same_slot = {name: frozenset(names) for names in names_at.values() for name in names}

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all pairs into the model, casting to its dtype; one name is enough for tied weights.
        Raises ValueError that names unknown, repeated, misshapen and missing weights, after reading
        all pairs: they may come from collectives, which every rank has to finish. The model is then
        half updated."""
        seen: set[str] = set()
        problems: dict[str, list[str]] = {}
        for name, tensor in weights:
            if name not in self._slots:  # of a file that has a vision tower too
                name = name.replace("model.language_model.", "model.", 1)
            slot = self._slots.get(name)
            if slot is None:
                problems.setdefault("unknown", []).append(name)
            elif name in seen:
                problems.setdefault("received twice", []).append(name)
            elif slot.shape != tensor.shape:
                problems.setdefault("of another shape", []).append(
                    f"{name} {list(tensor.shape)} (the model's: {list(slot.shape)})"
                )
            elif seen.isdisjoint(self._same_slot[name]):
                slot.copy_(tensor)
            elif not torch.equal(slot, tensor.to(slot)):
                problems.setdefault("different from the weight they are tied to", []).append(name)
            seen.add(name)
        missing = [name for name in self._slots if seen.isdisjoint(self._same_slot[name])]
        if missing:
            problems["missing"] = missing
        if problems:
            raise ValueError(
                "weights sent to the rollout engine are "
                + "; ".join(f"{kind}: {_list(names)}" for kind, names in problems.items())
            )


def _checkpoint_views(model: PreTrainedModel, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Views of `weight`, the entry `name` of the model's state, by the checkpoint names of its
    parts.

    transformers' own rule for saving is applied to the flat index of every element; the indices of
    each part that comes out tell the offset and strides of the view. Raises ValueError for a model
    whose rule does more than rearrange one weight.
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
                f"the local engine cannot hold {type(model).__name__}: its weight {name!r} is no rearrangement of checkpoint weights"
            )
        views[part_name] = weight.as_strided(part.shape, strides, weight.storage_offset() + offset)
    return views


def _list(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
