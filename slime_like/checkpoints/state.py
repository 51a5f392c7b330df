"""trainer.json of a checkpoint: everything that is not tensors. Its form is checked here, once, for
all that read it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_like.checkpoints.files import read_json

TRAINER_FILE = "trainer.json"
_NETWORK = re.compile(r"[a-z_]{1,40}")  # also the name of its folder


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 2**63
        and math.isfinite(value)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_network(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("optimizer"), list)
        and all(map(_is_text, value["optimizer"]))
        and _is_number(value.get("optimizer_step"))
        and isinstance(value.get("scheduler"), dict | None)
        and isinstance(value.get("layout", ""), str)
    )


def _are_networks(value: object) -> bool:
    return isinstance(value, dict) and all(
        _NETWORK.fullmatch(name) and _is_network(network) for name, network in value.items()
    )


def _are_fingerprints(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(of_rank, dict) and all(map(_is_texts_by_name, of_rank.values()))
        for of_rank in value
    )


_REQUIRED: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "world_size": lambda value: _is_count(value) and value > 0,
    "layout": _is_text,
    "networks": _are_networks,
    "fingerprints": _are_fingerprints,
}
_OPTIONAL: Mapping[str, Callable[[Any], bool]] = {
    "has_rng": lambda value: isinstance(value, bool),
    "weights_only": lambda value: isinstance(value, bool),
    "model": lambda value: isinstance(value, dict),
    "tokenizer": lambda value: isinstance(value, dict),
    "settings": lambda value: isinstance(value, dict),
    "random_states": _is_texts_by_name,
    "evaluation_due": lambda value: isinstance(value, bool),
}


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint's trainer.

    Args:
        folder: of the checkpoint.

    Returns:
        What was saved; the entries that loading itself uses have the form that it expects.

    Raises:
        ValueError: naming the checkpoint, and what is wrong with the file.
    """
    try:
        state = read_json(folder / TRAINER_FILE, folder)
        if not isinstance(state, dict):
            raise ValueError("it is not the state of a trainer")
        wrong = [name for name, holds in _REQUIRED.items() if not holds(state.get(name))]
        wrong += [n for n, holds in _OPTIONAL.items() if n in state and not holds(state[n])]
        if wrong:
            raise ValueError(f"its {wrong[0]!r} is missing or of another form")
        if len(state["fingerprints"]) != state["world_size"]:
            raise ValueError("its 'fingerprints' are not those of all ranks")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {folder}: {TRAINER_FILE} is missing or damaged ({error})"
        ) from error
    return state
