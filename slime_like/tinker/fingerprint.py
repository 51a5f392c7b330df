"""Fingerprint of a server's settings: API process and workers must have the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from arguments.config_groups import ConfigGroups
from arguments.run_config import RunConfig


def fingerprint_of(config: RunConfig) -> str:
    """Digest of all settings, including those of a --config file, and of the model's
    config.json."""
    assert config.model.hf_checkpoint is not None, "checked on the command line"
    folder = Path(config.model.hf_checkpoint).resolve()
    settings = {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(ConfigGroups)
    }
    model = [str(folder), (folder / "config.json").read_text(encoding="utf-8")]
    text = json.dumps([settings, list(config.argv), model], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
