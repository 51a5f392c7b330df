"""Rules about folders, files and recorded rollouts."""

from __future__ import annotations

import os
from pathlib import Path

from arguments.rules.base import Rule, Settings, problem
from slime_like.checkpoints.folders import complete_steps, is_checkpoint_root
from slime_like.config import Problem

# --- what is read ----------------------------------------------------------------------------------------------------


def folders(s: Settings) -> list[Problem]:
    found = []
    for config, name in ((s.model, "ref_load"), (s.checkpoint, "load")):
        path = getattr(config, name)
        first_of_several_runs = name == "load" and path == s.checkpoint.save
        if path is not None and not Path(path).is_dir() and not first_of_several_runs:
            found += problem(name, path, "no such folder")
    ref = s.model.ref_load
    if (
        ref is not None
        and Path(ref).is_dir()
        and not (is_checkpoint_root(ref) or (Path(ref) / "config.json").is_file())
    ):
        found += problem(
            "ref_load",
            ref,
            "neither a Hugging Face model (config.json) nor a folder of checkpoints",
        )
    return found


def checkpoint_step(s: Settings) -> list[Problem]:
    found = []
    for flag, root, name, step in (
        ("--load", s.checkpoint.load, "ckpt_step", s.checkpoint.ckpt_step),
        ("--ref-load", s.model.ref_load, "ref_ckpt_step", s.model.ref_ckpt_step),
        (
            "--opd-teacher-load",
            s.distillation.opd_teacher_load,
            "opd_teacher_ckpt_step",
            s.distillation.opd_teacher_ckpt_step,
        ),
    ):
        if step is None or root is None or not Path(root).is_dir():
            continue
        steps = complete_steps(root)
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            found += problem(
                name, step, f"no such checkpoint in {flag} {root}; complete steps there: {there}"
            )
    return found


# --- what is written -------------------------------------------------------------------------------------------------


def saving(s: Settings) -> list[Problem]:
    found = []
    if s.checkpoint.save_hf is not None and s.model.hf_checkpoint is None:
        found += problem(
            "save_hf",
            s.checkpoint.save_hf,
            "needs --hf-checkpoint: the copy takes its config.json and tokenizer",
        )
    return found


def sgd_has_no_checkpoints(s: Settings) -> list[Problem]:
    """The optimizer state of SGD cannot be loaded: megatron-core 0.16 can only initialise the state
    of Adam for loading, and its distributed optimizer asserts on SGD."""
    if s.core.get("optimizer") != "sgd":
        return []
    found = []
    if s.core.get("use_distributed_optimizer"):
        found += problem(
            "use_distributed_optimizer",
            None,
            "does not go with --optimizer sgd; leave it out or use adam",
        )
    if s.checkpoint.save is not None and not s.checkpoint.no_save_optim:
        message = (
            "the state of --optimizer sgd cannot be loaded again; add --no-save-optim, or use adam"
        )
        found += problem("save", s.checkpoint.save, message)
    if s.checkpoint.load is not None and not (s.checkpoint.no_load_optim or s.checkpoint.finetune):
        message = "the state of --optimizer sgd cannot be loaded; add --no-load-optim or --finetune, or use adam"
        found += problem("load", s.checkpoint.load, message)
    return found


def output_folders(s: Settings) -> list[Problem]:
    """All output folders exist or can be created, and are writable; checked before the first
    rollout."""
    found = []
    for config, name in (
        (s.checkpoint, "save"),
        (s.checkpoint, "save_hf"),
        (s.lora, "lora_save_path"),
        (s.logging, "output_dir"),
        (s.logging, "tensorboard_dir"),
    ):
        path = getattr(config, name)
        if path is None:
            continue
        there = nearest_existing(Path(path))
        if not there.is_dir():
            found += problem(
                name,
                path,
                "is a file; name a folder"
                if there == Path(path)
                else f"cannot be made: {there} is a file",
            )
        elif not os.access(there, os.W_OK | os.X_OK):
            found += problem(
                name, path, f"cannot be written: {there} is not writable; name another folder"
            )
    return found


def nearest_existing(path: Path) -> Path:
    """The path itself, or its closest existing parent."""
    return next(p for p in (path, *path.absolute().parents) if os.path.exists(p))


# --- recorded rollouts, and runs of one half -------------------------------------------------------------------------


def debugging(s: Settings) -> list[Problem]:
    debug = s.debug
    found = []
    if debug.debug_rollout_only and s.checkpoint.save is not None:
        found += problem(
            "save",
            s.checkpoint.save,
            "contradicts --debug-rollout-only, which trains nothing; leave one of them out",
        )
    if s.algorithm.loss_type == "sft_loss" and (
        debug.debug_rollout_only or debug.debug_train_only or debug.load_debug_rollout_data
    ):
        found += problem(
            "loss_type",
            "sft_loss",
            "makes no rollouts; leave the --debug and --load-debug-rollout-data flags out",
        )
    return found


def debug_files(s: Settings) -> list[Problem]:
    path = s.debug.load_debug_rollout_data
    if path is None:
        return []
    first = (
        path.replace("{rollout_id}", "1").removesuffix(".json").removesuffix(".safetensors")
        + ".json"
    )
    if "{rollout_id}" not in path and not Path(first).is_file():
        return problem("load_debug_rollout_data", path, f"no such file: {first}")
    if not Path(path).parent.is_dir() and "{rollout_id}" not in str(Path(path).parent):
        return problem("load_debug_rollout_data", path, f"no such folder: {Path(path).parent}")
    return []


def each_rollout_has_its_file(s: Settings) -> list[Problem]:
    path = s.debug.save_debug_rollout_data
    if path is None or "{rollout_id}" in path or s.rollout.num_rollout == 1:
        return []
    message = "needs {rollout_id} in it: each rollout would overwrite the one before"
    return problem("save_debug_rollout_data", path, message)


FILE_RULES: tuple[Rule, ...] = (
    folders, checkpoint_step, saving, sgd_has_no_checkpoints, output_folders, debugging, debug_files, each_rollout_has_its_file,
)  # fmt: skip
