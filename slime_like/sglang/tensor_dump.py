"""What an SGLang server computes inside: the files of `--debug-tensor-dump-output-folder`, under
the names of `slime_like.megatron.tracing.StateRecorder`.

A server writes one file per forward pass with the outputs of all modules that have no others
inside. A norm that also adds the residual gives both, so that the hidden states between the layers
are there."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

FOLDER_SETTING = "debug_tensor_dump_output_folder"
IDS = "model.forward_batch_info.input_ids"
LENGTHS = "model.forward_batch_info.seq_lens"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# modules whose output is that of a part, if tensor parallelism leaves them whole
ATTENTION = ("self_attn.o_proj", "linear_attn.out_proj")
MLP = "mlp.down_proj"


def dump_files(folder: Path) -> set[Path]:
    """The files of all passes so far, of all processes that write into the folder."""
    return set(folder.glob("*/Pass*.pt"))


def dumped_states(files: Iterable[Path], sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """The states of all tokens by site [N, C], of the passes in which these sequences were prompts;
    none if one of them is in no pass.

    Args:
        files: Of one server.
        sequences: Of tokens, [L] each; sent without a cached prefix.

    Raises:
        ValueError: Names a file that cannot be read.
    """
    files = sorted(files, key=lambda path: path.name)
    shards = {path.parent.name.split("_")[0] for path in files}
    found: list[dict[str, Tensor]] = [{} for _ in sequences]
    for path in files:
        if not path.parent.name.startswith("TP0_"):
            continue
        dumped = read_pass(path)
        rows = None
        for i, tokens in enumerate(sequences):
            start = start_of(tokens, dumped)
            if start is None:
                continue
            rows = sites(dumped, whole=len(shards) == 1) if rows is None else rows
            end = start + tokens.numel()
            found[i] |= {site: value[start:end] for site, value in rows.items()}
    shared = set(found[0]).intersection(*found[1:])
    return {site: torch.cat([own[site] for own in found]) for site in found[0] if site in shared}


def read_pass(path: Path) -> Mapping[str, Any]:
    """The outputs of a pass, by module. Raises ValueError."""
    try:
        dumped = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(dumped, Mapping):
        raise ValueError(f"{path} cannot be read: it is no table of tensors")
    return dumped


def start_of(tokens: Tensor, dumped: Mapping[str, Any]) -> int | None:
    """The first row of a prompt in a pass, or None if it is not in it."""
    ids = dumped.get(IDS)
    lengths = dumped.get(LENGTHS)
    if not isinstance(ids, Tensor) or not isinstance(lengths, Tensor):
        return None
    start = 0
    for length in lengths.tolist():
        if torch.equal(ids[start : start + length].long(), tokens.long()):
            return start
        start += length
    return None


def sites(dumped: Mapping[str, Any], *, whole: bool) -> dict[str, Tensor]:
    """The rows of a pass by site. whole: whether a rank has the outputs of whole parts."""
    found: dict[str, Tensor] = {}
    last = max((int(m.group(1)) for name in dumped if (m := LAYER.match(name))), default=-1)
    if isinstance(embedded := dumped.get("model.embed_tokens"), Tensor):
        found["embedding"] = embedded
    final = dumped.get("model.norm")
    if is_pair(final):
        found["norm"] = final[0]
        found[f"layers.{last}"] = final[1]
    for name, value in dumped.items():
        if (match := LAYER.match(name)) is None:
            continue
        index = int(match.group(1))
        site = f"layers.{index}"
        module = match.group(2)
        if module == "input_layernorm":
            found[f"{site}.norm"] = value[0] if is_pair(value) else value
            if is_pair(value) and index:
                found[f"layers.{index - 1}"] = value[1]
        elif module == "post_attention_layernorm" and is_pair(value):
            found[f"{site}.mlp_norm"] = value[0]
        elif whole and module in ATTENTION:
            found[f"{site}.attention"] = value
        elif whole and module == MLP:
            found[f"{site}.mlp"] = value
    return {site: value for site, value in found.items() if isinstance(value, Tensor)}


def is_pair(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a norm gave its output and the residual."""
    return isinstance(value, list | tuple) and len(value) == 2
