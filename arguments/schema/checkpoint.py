"""Saving, resuming, exporting."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class CheckpointConfig(CheckedSettings):
    save: str | None = arg(
        None, "Folder for checkpoints (model, optimizer, scheduler, random state, data position)."
    )
    save_interval: int | None = arg(
        None,
        "Save every this many rollouts; with --save the last one is always saved.",
        legal=POSITIVE,
        needs="save",
    )
    save_retain_last: int | None = arg(
        None, "Keep this many of the newest checkpoints and remove older ones; default all.",
        legal=AT_LEAST_ONE, aliases=("--save-retain-count", "--max-checkpoint-count", "--max-actor-ckpt-to-keep"), needs="save",
    )  # fmt: skip
    save_retain_interval: int | None = arg(
        None, "Keep the checkpoints of every this many rollouts, and the newest (see --save-retain-last); remove the others.",
        legal=AT_LEAST_ONE, needs="save",
    )  # fmt: skip
    async_save: bool = arg(
        False,
        "Write checkpoints behind the training, which stops only while their content is copied.",
        needs="save",
    )
    checkpoint_replicas: int = arg(
        0, "After rollouts that are not saved, keep a checkpoint in the memory of the nodes, with this many copies of each node's part "
        "on the next node. A restart takes the newest whole one.",
        choices=(0, 1), needs="save",
    )  # fmt: skip
    checkpoint_replica_dir: str | None = arg(
        None, "Folder of each node for --checkpoint-replicas; default one in /dev/shm.", needs="checkpoint_replicas"
    )  # fmt: skip
    on_save_failure: str = arg(
        "stop", "When a checkpoint cannot be written, as on a full disk: stop the run, or warn and continue to the next save.",
        choices=("stop", "continue"),
    )  # fmt: skip
    load: str | None = arg(
        None,
        "Folder of checkpoints to resume from. A Hugging Face folder starts a fresh run from its weights.",
    )
    ckpt_step: int | None = arg(None, "Resume from this step in place of the newest.", needs="load")
    exit_on_missing_checkpoint: bool = arg(
        False,
        "With --load: an error, not a fresh run, when the folder holds no checkpoint yet.",
        needs="load",
    )
    no_verify_checkpoint: bool = arg(
        False, "With --load: do not compare the files with their checksums first.", needs="load"
    )
    finetune: bool = arg(
        False, "With --load: take the weights only and start at step 0.", needs="load"
    )
    no_load_optim: bool = arg(False, "With --load: do not load the optimizer.", needs="load")
    no_load_rng: bool = arg(False, "With --load: do not load the random state.", needs="load")
    no_save_optim: bool = arg(False, "Do not save the optimizer.", needs="save")
    no_save_rng: bool = arg(False, "Do not save the random state.", needs="save")
    save_hf: str | None = arg(
        None,
        "Folder for a Hugging Face copy of the final weights; {rollout_id} becomes the number of the last rollout.",
    )
    exit_interval: int | None = arg(
        None, "Save and end the run after a rollout whose number this divides.", legal=AT_LEAST_ONE
    )
    exit_duration_in_mins: float | None = arg(
        None, "Save and end the run after the rollout in which this time is over.", legal=POSITIVE
    )
