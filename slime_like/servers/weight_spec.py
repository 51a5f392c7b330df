"""Compare names and shapes of synced weights with the checkpoint that the servers were started
from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from arguments.hf.model import read_hf_model
from slime_like.errors import RunError
from slime_like.text import list_names
from slime_like.weights.families import LM_HEAD, head_name
from slime_like.weights.safetensors_reader import stored_tensors

# Checkpoint entries that are not synced: buffers of old writers, multi-token prediction heads.
OPTIONAL_PARTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, from safetensors headers; empty if there are no such files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            stored = stored_tensors(file.fileno())
        shapes |= {name: tensor.shape for name, tensor in stored.items()}
    return shapes


def vocabulary_size(folder: str) -> int:
    """Vocabulary size in the folder's config.json, the bound of sampled token ids; the largest
    int32 if the file has none."""
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
        sizes = [config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")]
    except (OSError, ValueError, AttributeError):
        sizes = []
    return next((size for size in sizes if isinstance(size, int) and size > 0), 2**31)


def compare_with_checkpoint(sent: Mapping[str, tuple[int, ...]], folder: str) -> None:
    """Raise RunError naming missing and unknown weights and wrong shapes. A tied output layer may
    be present on either side, and of what no run or not this one trains, as a vision tower, all may
    be missing."""
    expected = checkpoint_shapes(folder)
    if not expected:
        return
    hf = read_hf_model(folder)
    tied = {LM_HEAD, head_name(hf.architecture)}
    left_out = tuple(
        prefix for prefix in hf.untrained_prefixes if not any(n.startswith(prefix) for n in sent)
    )
    missing = [
        n
        for n in expected.keys() - sent.keys() - tied
        if not n.startswith(left_out)
        and not any(part in n for part in OPTIONAL_PARTS)
        and not _is_extra_layer(n, sent)
    ]
    problems = {
        "missing": sorted(missing),
        "unknown": sorted(sent.keys() - expected.keys() - tied),
        "of another shape": [
            f"{n} {list(sent[n])} (checkpoint: {list(expected[n])})"
            for n in sorted(sent.keys() & expected.keys())
            if sent[n] != expected[n]
        ],
    }
    messages = [f"{kind}: {list_names(names)}" for kind, names in problems.items() if names]
    if messages:
        raise RunError(f"the synced weights differ from {folder}: " + "; ".join(messages))


def _is_extra_layer(name: str, sent: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `name` is in a layer after the last one that was sent: multi-token prediction."""
    number = _layer(name)
    sent_layers = [n for n in map(_layer, sent) if n is not None]
    return number is not None and number > max(sent_layers, default=-1)


def _layer(name: str) -> int | None:
    """The number after "layers" in a weight's name."""
    for before, part in itertools.pairwise(name.split(".")):
        if before == "layers" and part.isdigit():
            return int(part)
    return None
