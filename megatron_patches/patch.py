"""The parts of a patch (condition, check of its targets, installation), and the report of which
patches were applied.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ENGINE_EXTENSION = "transformer_engine_torch"
VERSIONS = "megatron-core>=0.16.1,<0.20"


@dataclass(frozen=True, slots=True)
class Condition:
    """When a patch applies."""

    reason: str  # reported if it holds
    skip_reason: str  # reported if it does not
    holds: Callable[[], bool]


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def has_compiler() -> bool:
    """Whether Triton finds a C compiler, which it needs at run time."""
    return bool(os.environ.get("CC")) or any(map(shutil.which, ("clang", "gcc")))


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed with its extension for torch."""
    return _is_installed("transformer_engine") and _has_engine_extension()


def has_engine_without_extension() -> bool:
    """Whether only a part of Transformer Engine is installed, as by
    `pip install transformer-engine` without its extra [pytorch]. Importing it raises what
    megatron-core does not expect."""
    return _is_installed("transformer_engine") and not _has_engine_extension()


def _has_engine_extension() -> bool:
    if _is_installed(ENGINE_EXTENSION):
        return True
    spec = importlib.util.find_spec("transformer_engine")
    folders = list(map(Path, (spec.submodule_search_locations or []) if spec is not None else []))
    # where Transformer Engine itself looks for it
    places = [*folders, *(folder.parent for folder in folders), *(f / "wheel_lib" for f in folders)]
    return any(any(place.glob(f"{ENGINE_EXTENSION}*.so")) for place in places)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def has_apex() -> bool:
    """Whether NVIDIA's Apex is installed. The package of this name on package indexes is another
    project, without optimizers."""
    spec = importlib.util.find_spec("apex")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return any(Path(folder, "optimizers").is_dir() for folder in folders)


ALWAYS = Condition("always", "", lambda: True)
NO_CUDA = Condition("no CUDA device", "CUDA is available", lambda: not cuda_available())
NO_COMPILE = Condition(
    "no CUDA device, or no C compiler for Triton",
    "CUDA and a C compiler are there",
    lambda: not (cuda_available() and has_compiler()),
)
NO_TE = Condition(
    "no Transformer Engine", "Transformer Engine is installed", lambda: not has_transformer_engine()
)
TORCH_ADAM = Condition(
    "neither Transformer Engine nor Apex: Adam is torch's",
    "Adam comes from Transformer Engine or Apex",
    lambda: not (has_transformer_engine() or has_apex()),
)


@dataclass(frozen=True, slots=True)
class Patch:
    """One change to megatron-core."""

    name: str
    condition: Condition
    check: Callable[[], None]  # raises RuntimeError if a target is missing; changes nothing
    install: Callable[[], None]  # makes the change; called once
    # first megatron-core release that needs the patch, e.g. "0.19"; None: the oldest supported one
    since: str | None = None
    fixed_in: str | None = None  # first release that no longer needs it; None: none so far

    def skip_reason(self) -> str:
        """Why the patch is not needed here; empty if it is."""
        if not self.condition.holds():
            return self.condition.skip_reason
        if self.since is not None and release() < _numbers(self.since):
            return f"needed since megatron-core {self.since}"
        if self.fixed_in is not None and release() >= _numbers(self.fixed_in):
            return f"fixed in megatron-core {self.fixed_in}"
        return ""


class Entry(NamedTuple):
    """A patch and why it was applied or skipped."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `apply()`; prints as a table."""

    applied: list[Entry]
    skipped: list[Entry]

    def __str__(self) -> str:
        rows = [("patch", "state", "reason")]
        rows += [(name, "applied", reason) for name, reason in self.applied]
        rows += [(name, "skipped", reason) for name, reason in self.skipped]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {state:<7}  {reason}" for name, state, reason in rows)


def megatron_version() -> str:
    try:
        return ".".join(map(str, _version()))
    except metadata.PackageNotFoundError:
        return "of unknown version"


def release() -> tuple[int, ...]:
    """Release of the megatron-core that is imported: (0, 19) for 0.19.2. Raises
    PackageNotFoundError if there is none."""
    return _version()[:2]


@functools.cache
def _version() -> tuple[int, ...]:
    """Version of the megatron-core that is imported, which may be a checkout on PYTHONPATH in place
    of the installed distribution."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        info = Path(folder, "package_info.py")
        if info.is_file():
            text = info.read_text(encoding="utf-8")
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", text, re.MULTILINE))
            if len(numbers) == 3:
                return tuple(int(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return tuple(map(int, re.findall(r"\d+", metadata.version("megatron-core"))[:3]))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def missing(patch: str, what: str) -> RuntimeError:
    """The error of a failed check. what: the missing target, as a clause."""
    return RuntimeError(
        f"megatron_patches/{patch}.py: {what} in megatron-core {megatron_version()}. "
        f"The patch is written for {VERSIONS}: install such a version, or adapt the patch."
    )


def find(patch: str, target: str) -> Any:
    """Look up ``"module:attribute.path"`` inside megatron.core; RuntimeError if it is missing.

    Class attributes are returned as stored (a classmethod object, not a bound method).
    """
    module_name, _, path = target.partition(":")
    try:
        with warnings.catch_warnings():
            # The report already lists what is not installed; five warnings would add nothing.
            warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex)")
            value: Any = importlib.import_module(f"megatron.core.{module_name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise missing(patch, f"module megatron.core.{module_name} not found") from error
    for part in path.split(".") if path else ():
        if part not in vars(value):
            raise missing(patch, f"megatron.core.{module_name} has no {path}")
        value = vars(value)[part]
    return value
