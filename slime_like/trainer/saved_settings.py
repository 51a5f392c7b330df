"""Settings stored in a checkpoint, and how a resuming run differs from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from arguments.run_config import RunConfig
from slime_like.config import flag_name
from slime_like.text import mask_settings

# Settings that define what is learned. Learning rate and weight decay are compared with the
# schedule; layouts and folders may change.
GROUPS = [
    "data",
    "rollout",
    "scheduling",
    "reward",
    "algorithm",
    "distillation",
    "off_policy",
    "policy_loss",
    "value_loss",
    "critic",
    "guards",
]
# run length and performance settings, and settings that are compared elsewhere
LEFT_OUT = frozenset(
    [
        "num_rollout",
        "num_epoch",
        "prompt_data",
        "critic_load",
        "rm_num_workers",
        "rm_timeout_s",
        "micro_batch_size",
        "max_tokens_per_gpu",
        "log_probs_chunk_size",
    ]
)
# of a source of a mix; its data are compared elsewhere
LEFT_OUT_OF_SOURCES = frozenset(["name", "path", "eval_path"])


def settings_of(config: RunConfig) -> dict[str, object]:
    """Settings that a resumed run should keep, by flag, as plain JSON. Includes the digests of
    files with user functions; credentials in addresses are masked."""
    settings: dict[str, object] = {}
    for group in GROUPS:
        group_settings = getattr(config, group)
        for field in (
            dataclasses.fields(group_settings) if dataclasses.is_dataclass(group_settings) else ()
        ):
            if field.name in LEFT_OUT or field.name.startswith("critic_"):
                continue
            value = getattr(group_settings, field.name)
            flag = flag_name(field.name)
            if isinstance(value, str):
                if (digest := _file_digest(value)) is not None:
                    settings[f"{flag} (the file)"] = digest
                value = _without_credentials(value)
            settings[flag] = mask_settings(value)
    for source in config.prompt_sources:
        values = dataclasses.asdict(source)
        given = {key: value for key, value in values.items() if value is not None}
        for key in LEFT_OUT_OF_SOURCES & given.keys():
            del given[key]
        settings[f"--prompt-data, source {source.name}"] = mask_settings(given)
    return json.loads(json.dumps(settings, default=str))


def changes(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Describe changed settings, among those that both have: ``--rollout-temperature 1.0 ->
    0.8``."""
    return [
        f"{flag} {saved[flag]} -> {value}"
        for flag, value in current.items()
        if flag in saved and saved[flag] != value
    ]


def _file_digest(value: str) -> str | None:
    path = Path(value.split(":")[0])
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else None
    except OSError:
        return None


def _without_credentials(value: str) -> str:
    if "://" not in value:
        return value
    try:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"
    except ValueError:
        return "an address"
