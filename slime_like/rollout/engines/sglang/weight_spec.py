"""Compare names and shapes of synced weights with the checkpoint that the servers were started
from."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping
from pathlib import Path

from slime_like.errors import RunError

SHOWN = 8  # names in an error message
# Checkpoint entries that are not synced: buffers of old writers, multi-token prediction heads.
OPTIONAL_PARTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, from safetensors headers; empty if there are no such files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
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
    be present on either side."""
    there = checkpoint_shapes(folder)
    if not there:
        return
    tied = {"lm_head.weight"}
    missing = [
        n
        for n in there.keys() - sent.keys() - tied
        if not any(part in n for part in OPTIONAL_PARTS) and not _is_extra_layer(n, sent)
    ]
    problems = {
        "missing": sorted(missing),
        "unknown": sorted(sent.keys() - there.keys() - tied),
        "of another shape": [
            f"{n} {list(sent[n])} (there: {list(there[n])})"
            for n in sorted(sent.keys() & there.keys())
            if sent[n] != there[n]
        ],
    }
    found = [
        f"{kind}: {', '.join(names[:SHOWN])}"
        + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for kind, names in problems.items()
        if names
    ]
    if found:
        raise RunError(
            f"the weights sent to the engines are not those of {folder}: " + "; ".join(found)
        )


def _is_extra_layer(name: str, sent: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `name` is in a layer after the last one that was sent: multi-token prediction."""
    number = _layer(name)
    return number is not None and number > max(
        (n for n in map(_layer, sent) if n is not None), default=-1
    )


def _layer(name: str) -> int | None:
    words = name.split(".")
    return next(
        (
            int(word)
            for before, word in itertools.pairwise(words)
            if before == "layers" and word.isdigit()
        ),
        None,
    )
