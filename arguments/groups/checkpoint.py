"""Saving, resuming, exporting."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, arg


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    save: str | None = arg(None, "Folder for checkpoints (model, optimizer, scheduler, random state, data position).")
    save_interval: int | None = arg(None, "Save every this many rollouts; with --save the last one is always saved.", legal=POSITIVE)
    load: str | None = arg(None, "Folder of checkpoints to resume from. A Hugging Face folder starts a fresh run from its weights.")
    ckpt_step: int | None = arg(None, "Resume from this step in place of the newest.")
    finetune: bool = arg(False, "With --load: take the weights only and start at step 0.")
    no_load_optim: bool = arg(False, "With --load: do not load the optimizer.")
    no_load_rng: bool = arg(False, "With --load: do not load the random state.")
    no_save_optim: bool = arg(False, "Do not save the optimizer.")
    no_save_rng: bool = arg(False, "Do not save the random state.")
    save_hf: str | None = arg(None, "Folder for a Hugging Face copy of the final weights; {rollout_id} is replaced.")
