"""Rules about folders, files and recorded rollouts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from arguments.hf.hub import download_hint
from arguments.hf.peft_adapter import ADAPTER_CONFIG
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.rows import file_of
from slime_like.checkpoints.folders import check_replaceable, complete_steps, has_model
from slime_like.config import Problem, flag_name

NO_MODEL = "has neither checkpoints nor a Hugging Face model (config.json)"


# Folders that a run reads, and that it writes: group and name of their settings
INPUT_FOLDERS = (
    ("model", "hf_checkpoint"),
    ("model", "ref_load"),
    ("critic", "critic_load"),
    ("distillation", "opd_teacher_load"),
    ("checkpoint", "load"),
    ("lora", "lora_adapter_path"),
)
OUTPUT_FOLDERS = (
    ("checkpoint", "save"),
    ("checkpoint", "save_hf"),
    ("checkpoint", "checkpoint_replica_dir"),
    ("lora", "lora_save_path"),
    ("logging", "output_dir"),
    ("logging", "tensorboard_dir"),
    ("logging", "wandb_dir"),
    ("profiling", "memory_snapshot_dir"),
    ("sglang", "update_weight_disk_dir"),
)
# Outputs that replace their folder at the end of the run -> the file that an earlier one has, and
# what that is
REPLACED_FOLDERS = {
    "save_hf": ("config.json", "Hugging Face model"),
    "lora_save_path": (ADAPTER_CONFIG, "adapter"),
}


def folders(s: Settings, settings: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Name and value of those of the settings that are given."""
    for group, name in settings:
        path = getattr(getattr(s, group), name)
        if path is not None:
            yield name, path


# --- input ---------------------------------------------------------------------------------------


def check_input_folders(s: Settings) -> list[Problem]:
    problems = []
    for config, name in ((s.model, "ref_load"), (s.checkpoint, "load")):
        path = getattr(config, name)
        first_of_several_runs = name == "load" and s.checkpoint.load_is_save
        if path is not None and not Path(path).is_dir() and not first_of_several_runs:
            problems += problem(name, path, f"no such folder{download_hint(path)}")
    load = s.checkpoint.load
    may_be_empty = s.checkpoint.load_is_save or s.checkpoint.ckpt_step is not None
    if load is not None and not may_be_empty and Path(load).is_dir() and not has_model(load):
        message = "holds neither checkpoints nor a Hugging Face model (config.json)"
        problems += problem("load", load, message)
    ref = s.model.ref_load
    if ref is not None and Path(ref).is_dir() and not has_model(ref):
        problems += problem("ref_load", ref, NO_MODEL)
    return problems


def check_checkpoint_steps(s: Settings) -> list[Problem]:
    opd = s.distillation
    problems = []
    for flag, root, name, step in (
        ("--load", s.checkpoint.load, "ckpt_step", s.checkpoint.ckpt_step),
        ("--ref-load", s.model.ref_load, "ref_ckpt_step", s.model.ref_ckpt_step),
        (
            "--opd-teacher-load",
            opd.opd_teacher_load,
            "opd_teacher_ckpt_step",
            opd.opd_teacher_ckpt_step,
        ),
    ):
        if step is None or root is None or not Path(root).is_dir():
            continue
        steps = complete_steps(root)
        if step not in steps:
            complete = ", ".join(map(str, steps)) or "none"
            message = f"no such checkpoint in {flag} {root}; complete steps: {complete}"
            problems += problem(name, step, message)
    return problems


# --- output --------------------------------------------------------------------------------------


def check_sgd_checkpoints(s: Settings) -> list[Problem]:
    """The optimizer state of SGD cannot be loaded: megatron-core 0.16 can only initialise the state
    of Adam for loading, and its distributed optimizer asserts on SGD."""
    if s.core.get("optimizer") != "sgd":
        return []
    checkpoint = s.checkpoint
    problems = []
    if checkpoint.save is not None and not checkpoint.no_save_optim:
        message = "the state of --optimizer sgd cannot be loaded again; add --no-save-optim"
        problems += problem("save", checkpoint.save, f"{message}, or use adam")
    if checkpoint.load is not None and not (checkpoint.no_load_optim or checkpoint.finetune):
        message = "the state of --optimizer sgd cannot be loaded; add --no-load-optim or --finetune"
        problems += problem("load", checkpoint.load, f"{message}, or use adam")
    return problems


def check_output_folders(s: Settings) -> list[Problem]:
    """All output folders exist or can be created, and are writable; checked before the first
    rollout."""
    problems = []
    for name, path in folders(s, OUTPUT_FOLDERS):
        existing = nearest_existing(Path(path))
        if existing == Path(path) and not existing.is_dir():
            problems += problem(name, path, "is a file; must be a folder")
        elif not existing.is_dir():
            problems += problem(name, path, f"cannot be created: {existing} is a file")
        elif not os.access(existing, os.W_OK | os.X_OK):
            problems += problem(name, path, f"{existing} is not writable; name another folder")
        elif (reason := _refuses_folders(existing)) is not None:
            message = f"{existing} takes no folders ({reason}); name another one"
            problems += problem(name, path, message)
    return problems


def check_overwritten_folders(s: Settings) -> list[Problem]:
    """No output takes the place of a model or an adapter that the run reads, or of other files."""
    problems = []
    for name, path in folders(s, OUTPUT_FOLDERS):
        if "{rollout_id}" in path and s.rollout.num_rollout is None:
            continue  # the number of the last rollout is in the data
        target = Path(path.replace("{rollout_id}", str(s.rollout.num_rollout)))
        if (taken := _input_in(target, s, replaced=name in REPLACED_FOLDERS)) is not None:
            flag, folder = taken
            problems += problem(name, path, f"would overwrite {flag} {folder}; name another folder")
        elif name in REPLACED_FOLDERS and target.is_dir():
            try:
                check_replaceable(target, *REPLACED_FOLDERS[name])
            except ValueError as error:
                problems += problem(name, path, str(error))
    return problems


def _input_in(target: Path, s: Settings, *, replaced: bool) -> tuple[str, str] | None:
    """Flag and path of an input that an output to the folder `target` would damage. Outputs that
    replace no folder damage only a model's own: checkpoints may share theirs."""
    place = target.resolve()
    for name, path in folders(s, INPUT_FOLDERS):
        folder = Path(path).resolve()
        has_weights = any((folder / file).is_file() for file, _ in REPLACED_FOLDERS.values())
        if replaced and folder.is_relative_to(place):
            return flag_name(name), path
        if not replaced and folder == place and has_weights:
            return flag_name(name), path
    if replaced:
        for data in s.data_configs:
            file = file_of(data.prompt_data or "")
            if file.is_file() and file.resolve().is_relative_to(place):
                return "--prompt-data", str(data.prompt_data)
    return None


def _refuses_folders(existing: Path) -> str | None:
    """Why no folder can be made in `existing`, e.g. in /proc or on a full disk: permissions do not
    tell it."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".slime_like-", dir=existing))
    except OSError as error:
        return str(error.strerror)
    return None


def nearest_existing(path: Path) -> Path:
    """The path itself, or its closest existing parent."""
    return next(p for p in (path, *path.absolute().parents) if os.path.exists(p))


# --- recorded rollouts ---------------------------------------------------------------------------


def check_debug_files(s: Settings) -> list[Problem]:
    path = s.debug.load_debug_rollout_data
    if path is None:
        return []
    first = path.replace("{rollout_id}", "1")
    first = first.removesuffix(".json").removesuffix(".safetensors") + ".json"
    if "{rollout_id}" not in path and not Path(first).is_file():
        return problem("load_debug_rollout_data", path, f"no such file: {first}")
    parent = Path(path).parent
    if not parent.is_dir() and "{rollout_id}" not in str(parent):
        return problem("load_debug_rollout_data", path, f"no such folder: {parent}")
    return []


def check_debug_path(s: Settings) -> list[Problem]:
    path = s.debug.save_debug_rollout_data
    if path is None:
        return []
    existing = nearest_existing(Path(path).parent)
    if existing.is_dir() and (reason := _refuses_folders(existing)) is not None:
        message = f"{existing} takes no files ({reason}); name another folder"
        return problem("save_debug_rollout_data", path, message)
    if "{rollout_id}" in path or s.rollout.num_rollout == 1:
        return []
    message = "must contain {rollout_id}: each rollout would overwrite the previous one"
    return problem("save_debug_rollout_data", path, message)


FILE_RULES: tuple[Rule, ...] = (
    check_input_folders,
    check_checkpoint_steps,
    check_sgd_checkpoints,
    check_output_folders,
    check_overwritten_folders,
    check_debug_files,
    check_debug_path,
)
