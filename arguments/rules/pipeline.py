"""Rules about the layers of pipeline stages: equal numbers, other numbers in the first and last
stage, embedding and loss counted as layers, or an explicit layout."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from arguments.megatron_fields import FIELDS
from arguments.rules.base import LayoutSettings, problem
from arguments.schema import ParallelConfig
from slime_like.config import Problem, flag_name

LAYOUT = "pipeline_model_parallel_layout"
ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
INTERLEAVED = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")


def virtual_stages_of(parallel: ParallelConfig, core: Mapping[str, Any]) -> int | None:
    """Model chunks per pipeline rank, from whichever flag sets it; None without the interleaved
    schedule. core: megatron-core's fields of the network."""
    pipeline = parallel.pipeline_model_parallel_size
    if layout := core.get(LAYOUT):
        chunks = len(stages_of_layout(layout)) // pipeline
        return chunks if chunks > 1 else None
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None or not core.get("num_layers"):
        return None
    return int(_layers_to_split(core) // pipeline // per_chunk)


def stages_of_layout(layout: str) -> list[str]:
    """Parse the stages of --pipeline-model-parallel-layout as Megatron-LM does: `Et*3|(tt|)*2tL` is
    `Ettt`, `tt`, `tt`, `tL`. Commas are ignored."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    return text.split("|")


def first_layers(s: LayoutSettings) -> list[int]:
    """Index from 0 of the first layer of every stage except the first; empty if the layers cannot
    be divided, which another rule reports."""
    pipeline = s.parallel.pipeline_model_parallel_size
    core = s.core
    if pipeline == 1 or check_pipeline_split(s):
        return []
    stages = pipeline * (virtual_stages_of(s.parallel, core) or 1)
    if layout := core.get(LAYOUT):
        sizes = [stage.count("t") for stage in stages_of_layout(layout)]
    elif any(core.get(name) for name in ENDS):
        first, last = (core.get(name) for name in ENDS)
        others = stages - sum(size is not None for size in (first, last))
        rest = (core["num_layers"] - (first or 0) - (last or 0)) // max(others, 1)
        sizes = [*([first] if first else []), *[rest] * others, *([last] if last else [])]
    else:
        sizes = [_layers_to_split(core) // stages] * stages
        sizes[0] -= bool(core.get(COUNTED[0]))
    starts = list(itertools.accumulate(sizes))[:-1]
    return [start for start in starts if start < core["num_layers"]]


def check_pipeline_split(s: LayoutSettings) -> list[Problem]:
    if not s.core.get("num_layers"):
        return []
    given = {name: s.core[name] for name in (LAYOUT, *ENDS, *COUNTED) if s.core.get(name)}
    if given and s.parallel.pipeline_model_parallel_size == 1:
        name, value = next(iter(given.items()))
        return problem(name, value, "requires --pipeline-model-parallel-size above 1")
    if LAYOUT in given:
        return _check_explicit_layout(s, given)
    if any(name in given for name in ENDS):
        return _check_unequal_ends(s, given)
    return _check_equal_stages(s)


def _check_explicit_layout(s: LayoutSettings, given: Mapping[str, Any]) -> list[Problem]:
    """--pipeline-model-parallel-layout names all layers once, in a number of stages that the
    pipeline size divides."""
    pipeline = s.parallel.pipeline_model_parallel_size
    layers = s.core["num_layers"]
    others = [_flag(name) for name in (*ENDS, *COUNTED) if name in given]
    others += [flag_name(n) for n in INTERLEAVED if getattr(s.parallel, n) is not None]
    stages = stages_of_layout(given[LAYOUT])
    cells = "".join(stages)
    if others:
        message = f"conflicts with {others[0]}; remove one of them"
    elif "m" in cells:
        message = "has m, a multi-token prediction layer, which is not supported; remove it"
    elif unknown := sorted(set(cells) - set("EtL")):
        message = (
            f"has {unknown[0]!r}; a stage consists of E (embedding), t (layer) and L (loss), | "
            "separates stages, x*n repeats"
        )
    elif not all(stages):
        message = "has an empty stage; remove a | or add a t"
    elif cells != "E" + "t" * layers + "L":
        message = (
            f"has {cells.count('t')} layers t; it must have E first, the {layers} layers of the "
            "model, and L last"
        )
    elif len(stages) % pipeline:
        message = (
            f"has {len(stages)} stages, not divisible by --pipeline-model-parallel-size {pipeline}"
        )
    else:
        return []
    return problem(LAYOUT, given[LAYOUT], message)


def _check_unequal_ends(s: LayoutSettings, given: Mapping[str, Any]) -> list[Problem]:
    """With --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, the other
    stages must have equal numbers of the remaining layers."""
    pipeline = s.parallel.pipeline_model_parallel_size
    layers = s.core["num_layers"]
    ends = {name: value for name, value in given.items() if name in ENDS}
    name, value = next(iter(ends.items()))
    if any(counted in given for counted in COUNTED):
        message = (
            "cannot be combined with --account-for-embedding-in-pipeline-split or "
            "--account-for-loss-in-pipeline-split"
        )
        return problem(name, value, message)
    if any(getattr(s.parallel, interleaved) for interleaved in INTERLEAVED):
        message = (
            "not supported with the interleaved schedule; use --pipeline-model-parallel-layout"
        )
        return problem(name, value, message)
    rest = layers - sum(ends.values())
    others = pipeline - len(ends)
    even = rest % others == 0 if others else rest == 0
    if min(ends.values()) < 1 or rest < others or not even:
        message = f"leaves {rest} of the {layers} layers, which {others} stages cannot share evenly"
        return problem(name, value, message)
    return []


def _check_equal_stages(s: LayoutSettings) -> list[Problem]:
    pipeline = s.parallel.pipeline_model_parallel_size
    layers = _layers_to_split(s.core)
    counted = "".join(f", with {flag_name(name)}" for name in COUNTED if s.core.get(name))
    if layers % pipeline:
        message = (
            f"must be a divisor of {layers}, the number of layers{counted}; or use "
            "--decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout"
        )
        return problem("pipeline_model_parallel_size", pipeline, message)
    per_rank = layers // pipeline
    stages, per_chunk = (getattr(s.parallel, name) for name in INTERLEAVED)
    if stages and per_rank % stages:
        message = f"must divide the {per_rank} layers of a pipeline rank{counted}"
        return problem(INTERLEAVED[0], stages, message)
    if per_chunk and (per_rank % per_chunk or per_rank == per_chunk):
        message = f"must be a proper divisor of the {per_rank} layers of a pipeline rank{counted}"
        return problem(INTERLEAVED[1], per_chunk, message)
    return []


def _flag(name: str) -> str:
    spellings = FIELDS[name].on if name in FIELDS else ()
    return spellings[0] if spellings else flag_name(name)


def _layers_to_split(core: Mapping[str, Any]) -> int:
    """Number of layers to divide over stages, including embedding and loss if they count."""
    return int(core["num_layers"]) + sum(bool(core.get(name)) for name in COUNTED)
