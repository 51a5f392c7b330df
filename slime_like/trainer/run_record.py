"""run.json in the output folder: configuration and environment, for the report and trackers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import slime_like
from arguments.config_groups import ConfigGroups
from arguments.run_config import RunConfig
from slime_like.config import flag_name
from slime_like.metrics.trackers.background import TrackerSet
from slime_like.metrics.trackers.base import TrackerContext
from slime_like.text import SECRETS, mask_argv, mask_settings

FILE_NAME = "run.json"
FORMAT = "slime_like run 1"
GIT_S = 10.0  # seconds that git may take
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "sglang")
# parts of the configuration that only repeat flags of other parts
_LEFT_OUT = ("eval_sets", "model_args", "preflight", "prompt_sources", "server", "slime")


def settings_by_flag(config: RunConfig) -> tuple[dict[str, object], list[str]]:
    """All settings as plain JSON without secrets, and the flags that differ from their defaults.
    Settings derived from others count as changed."""
    values: dict[str, object] = {}
    changed = []
    for field in dataclasses.fields(ConfigGroups):
        group = getattr(config, field.name)
        if field.name in _LEFT_OUT or not dataclasses.is_dataclass(group):
            continue
        for setting in dataclasses.fields(group):
            flag = flag_name(setting.name)
            value = getattr(group, setting.name)
            if flag in SECRETS and value is not None:
                value = "***"
            values[flag] = _plain(value)
            if value != _default(setting):
                changed.append(flag)
    return values, sorted(changed)


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not representable in JSON
    if isinstance(value, float | int | str | bool) or value is None:
        return mask_settings(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return mask_settings(str(value))


def commit() -> str | None:
    """The git commit of the clone that this code is in, with `-dirty` after it if files differ from
    it; None outside a clone, or without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    root = Path(slime_like.__file__).parents[1]
    if not (root / ".git").exists():
        return None  # not the commit of a repository in which this package is only installed
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def environment() -> dict[str, object]:
    """Versions, host and device of this process."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "slime_like": slime_like.__version__,
        "commit": commit(),
        "python": sys.version.split()[0],
        **versions,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "processors": os.cpu_count(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "cuda": torch.version.cuda if cuda else None,
        "threads": torch.get_num_threads(),
    }


def write_run_record(
    config: RunConfig, output_dir: Path, *, layout: str, patches: str
) -> dict[str, object]:
    """Write run.json; a resumed run overwrites it. Returns the settings by flag.

    Args:
        layout: Parallel layout, as printed at startup.
        patches: Report of `megatron_patches.apply`.
    """
    settings, changed = settings_by_flag(config)
    record = {
        "format": FORMAT,
        "started": round(time.time(), 3),
        "argv": mask_argv(config.argv),
        "layout": layout,
        "world_size": config.world_size,
        "config": settings,
        "changed": changed,
        "prompt_sources": [_plain(dataclasses.asdict(each)) for each in config.prompt_sources],
        "environment": environment(),
        "patches": patches,
        "warnings": mask_settings(list(config.warnings)),
        "notes": mask_settings(list(config.notes)),
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / FILE_NAME
    temporary = path.with_name(FILE_NAME + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return settings


def start_trackers(config: RunConfig, output_dir: Path, *, resumed: bool) -> TrackerSet:
    """Start the trackers of --tracker, on rank 0. resumed: append to the run in `output_dir`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    settings, _ = settings_by_flag(config)
    context = TrackerContext(config.logging, output_dir, settings, resumed)
    return TrackerSet(config.logging.trackers, context)
