"""--allow-untested: settings of megatron-core that this project knows and rejects only because no
test covers them, most of them because no machine here can run them. They are passed on as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache

from arguments.flags import Shape, shape_of
from arguments.megatron import DERIVED, megatron_fields
from arguments.megatron_fields import FIELDS
from arguments.rules.base import Settings
from slime_like.config import Problem

FLAG = "--allow-untested"
# fp8 and fp4; fp16; CUDA graphs; offloaded activations; overlapped communication; fused kernels
KINDS = re.compile(
    "fp8|fp4|^fp16$|loss_scale|^hysteresis$|first_last_layers_bf16|num_layers_at_.*_in_bf16|tp_only_amax|cuda_graph"
    "|^cpu_offloading|^tp_comm_|delay_wgrad|overlap_moe_expert|_fusion$|^fused_"
)
# of other settings, or made by this project
NOT = re.compile("meta_device|fsdp|fp8_param_gather|div_fusion|cross_entropy")
SWITCH = {"true": True, "false": False}


@cache
def untested_fields() -> dict[str, Shape | None]:
    """Shape of each field that may be given; None: passed on as a string."""
    return {
        name: shape_of(places[0][1].annotation)
        for name, places in megatron_fields().items()
        if KINDS.search(name)
        and not NOT.search(name)
        and name not in FIELDS
        and name not in DERIVED
        and "Callable" not in str(places[0][1].annotation)
    }


def read_untested(words: Sequence[str]) -> tuple[dict[str, object], list[Problem]]:
    """Values by field of NAME:VALUE words, and what is wrong with them."""
    values: dict[str, object] = {}
    problems = []
    for word in words:
        name, given, text = word.partition(":")
        name = name.replace("-", "_")
        if not given or name not in untested_fields():
            legal = ", ".join(sorted(untested_fields()))
            message = f"must be NAME:VALUE with a NAME of {legal}"
            if name in FIELDS:
                message = f"--{name.replace('_', '-')} is tested: give it as a flag of its own"
            problems.append(Problem(FLAG, word, message))
            continue
        if name in values:
            problems.append(Problem(FLAG, word, f"gives {name} a second value; remove one"))
            continue
        try:
            values[name] = _value(untested_fields()[name], text)
        except ValueError as error:
            problems.append(Problem(FLAG, word, str(error)))
    return values, problems


def _value(shape: Shape | None, text: str) -> object:
    if shape is None:
        return text
    if shape.kind == "switch":
        if text.lower() not in SWITCH:
            raise ValueError("must be true or false")
        return SWITCH[text.lower()]
    if shape.kind == "json":
        return json.loads(text)
    items = [_item(shape, part) for part in (text.split(",") if shape.kind == "list" else [text])]
    return items if shape.kind == "list" else items[0]


def _item(shape: Shape, text: str) -> object:
    value = shape.item(text)
    if shape.choices is not None and value not in shape.choices:
        raise ValueError(f"must be one of {', '.join(map(str, shape.choices))}")
    return value


def warn_untested(s: Settings) -> str | None:
    words = s.model.allow_untested
    if not words:
        return None
    return (
        f"{FLAG}: no test covers {', '.join(words)}; megatron-core gets these settings as they "
        "are, and every promise about numbers, checkpoints and memory ends here"
    )
