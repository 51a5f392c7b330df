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
# modules whose output is that of a part, or with tensor parallelism a rank's share of it
ATTENTION = ("self_attn.o_proj", "linear_attn.out_proj")
MLP = "mlp.down_proj"
# modules that give the weights and numbers of the chosen experts, and the logits of all
ROUTERS = ("mlp.topk", "block_sparse_moe.topk")


def dump_files(folder: Path) -> set[Path]:
    """The files of all passes so far, of all processes that write into the folder."""
    return set(folder.glob("*/Pass*.pt"))


def dumped_states(
    files: Iterable[Path], sequences: Sequence[Tensor], *, routes: bool = True
) -> dict[str, Tensor]:
    """The states of all tokens by site [N, C], of the passes in which these sequences were prompts;
    none if one of them is in no pass.

    Args:
        files: Of one server.
        sequences: Of tokens, [L] each; sent without a cached prefix.
        routes: Routers give the weights that experts have in the end.

    Raises:
        ValueError: Names a file that cannot be read.
    """
    files = sorted(files, key=lambda path: path.name)
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
            if rows is None:
                rows = sites(dumped, passes_of_others(path, files, dumped), routes=routes)
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


def passes_of_others(
    path: Path, files: Sequence[Path], dumped: Mapping[str, Any]
) -> list[Mapping[str, Any]] | None:
    """The same pass on the other tensor-parallel ranks; None if one of them has not written it. Of
    each rank of the server there is some file."""
    tensor_rank, stage = path.parent.name.split("_")[:2]
    ranks = {name.parent.name.split("_")[0] for name in files} - {tensor_rank}
    found: dict[str, Mapping[str, Any]] = {}
    for other in files:
        rank, its_stage = other.parent.name.split("_")[:2]
        if rank in ranks and (its_stage, other.name) == (stage, path.name):
            theirs = read_pass(other)
            if torch.equal(theirs.get(IDS, dumped[IDS][:0]), dumped[IDS]):
                found[rank] = theirs
    return list(found.values()) if found.keys() == ranks else None


def sites(
    dumped: Mapping[str, Any], others: Sequence[Mapping[str, Any]] | None, *, routes: bool
) -> dict[str, Tensor]:
    """The rows of a pass by site. others, routes: see `passes_of_others` and `dumped_states`."""
    found: dict[str, Any] = {}
    last = max((int(m.group(1)) for name in dumped if (m := LAYER.match(name))), default=-1)
    found["embedding"] = dumped.get("model.embed_tokens")
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
        elif module in ATTENTION:
            found[f"{site}.attention"] = whole(name, dumped, others)
        elif module == MLP:
            found[f"{site}.mlp"] = whole(name, dumped, others)
        elif routes and module in ROUTERS:
            found[f"{site}.router"] = chosen_weights(value)
    return {site: value for site, value in found.items() if isinstance(value, Tensor)}


def whole(
    name: str, dumped: Mapping[str, Any], others: Sequence[Mapping[str, Any]] | None
) -> Tensor | None:
    """The output of a module over all tensor-parallel ranks: their sum, unless the module has
    reduced it, so that all have the same; None if it is not known."""
    if others is None:
        return None
    parts = [own.get(name) for own in (dumped, *others)]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    first = tensors[0]
    if len(tensors) < len(parts) or any(part.shape != first.shape for part in tensors):
        return None
    if all(torch.equal(part, first) for part in tensors):
        return first
    return torch.stack([part.double() for part in tensors]).sum(0).to(first.dtype)


def chosen_weights(value: Any) -> Tensor | None:
    """The weight of every expert for every token [N, E], 0 if it is not chosen; None where the
    choice is not among E experts, e.g. because one stands for shared ones."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        return None
    weights, chosen, logits = value
    if weights.shape != chosen.shape or logits.dim() != 2 or len(logits) != len(weights):
        return None
    if weights.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < logits.size(1):
        return None
    rows = weights.new_zeros(len(weights), logits.size(1))
    return rows.scatter(1, chosen.long(), weights)


def is_pair(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a norm gave its output and the residual."""
    return isinstance(value, list | tuple) and len(value) == 2
