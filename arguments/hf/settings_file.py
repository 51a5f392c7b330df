"""Read small settings files in a model folder that someone else may have written:
generation_config.json, adapter_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arguments.hf.config_keys import LARGEST
from slime_like.checkpoints.files import read_json
from slime_like.text import clean

MOST_BYTES = 2**26
GENERATION_CONFIG = "generation_config.json"


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FileNotFoundError, or ValueError naming the file if it is not an
    object, is damaged, too large or nested too deeply."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{size} bytes, at most {MOST_BYTES} are allowed")
        settings = read_json(path)
        repr(settings)  # messages need it; fails here if nested too deeply
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {clean(error)}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must be a JSON object")
    return settings


def generation_end_ids(folder: str) -> tuple[int, ...]:
    """The ``eos_token_id`` of generation_config.json: none, one or several. Raises ValueError
    naming the file."""
    path = Path(folder) / GENERATION_CONFIG
    try:
        value = read_settings(path).get("eos_token_id")
    except FileNotFoundError:
        return ()
    if value is None:
        return ()
    tokens = value if isinstance(value, list) else [value]
    if any(type(token) is not int or not 0 <= token < LARGEST for token in tokens):
        shown = clean(repr(value), 200)
        raise ValueError(f"{path}: eos_token_id must be a token or a list of them, not {shown}")
    return tuple(tokens)
