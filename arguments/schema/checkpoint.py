"""Saving, resuming, exporting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class CheckpointConfig(CheckedSettings):
    save: str | None = arg(
        None,
        "Folder for checkpoints (model, optimizer, scheduler, random state, data position).",
        excludes="debug_rollout_only, which trains nothing",
    )
    save_interval: int | None = arg(
        None,
        "Save every N rollouts; with --save the last rollout is always saved.",
        legal=POSITIVE,
        needs="save",
    )
    save_retain_last: int | None = arg(
        None,
        "Keep the N newest checkpoints and remove older ones; default: all.",
        legal=AT_LEAST_ONE,
        aliases=("--save-retain-count", "--max-checkpoint-count", "--max-actor-ckpt-to-keep"),
        needs="save",
    )
    save_retain_interval: int | None = arg(
        None,
        "Keep the checkpoint of every N-th rollout, and the newest ones (see --save-retain-last); "
        "remove the others.",
        legal=AT_LEAST_ONE,
        needs="save",
    )
    async_save: bool = arg(
        False,
        "Write checkpoints in the background; training only blocks while the state is copied.",
        needs="save",
    )
    checkpoint_replicas: int = arg(
        0,
        "After rollouts without a save, keep a checkpoint in host memory, with N replicas of each "
        "node's part on the following nodes. A restart resumes from the newest complete one.",
        choices=(0, 1),
        needs="save",
    )
    checkpoint_replica_dir: str | None = arg(
        None,
        "Folder on each node for --checkpoint-replicas; default: one in /dev/shm.",
        needs="checkpoint_replicas",
    )
    on_save_failure: str = arg(
        "stop",
        "If a checkpoint cannot be written, e.g. on a full disk: stop the run, or warn and "
        "continue until the next save.",
        choices=("stop", "continue"),
        idle_without="save",
    )
    load: str | None = arg(
        None,
        "Folder of checkpoints to resume from. A Hugging Face folder starts a fresh run from its "
        "weights.",
    )
    ckpt_step: int | None = arg(None, "Resume from this step instead of the newest.", needs="load")
    exit_on_missing_checkpoint: bool = arg(
        False,
        "With --load: fail instead of starting a fresh run if the folder has no checkpoint.",
        needs="load",
    )
    no_verify_checkpoint: bool = arg(
        False, "With --load: do not verify the checksums of the files.", needs="load"
    )
    finetune: bool = arg(
        False, "With --load: load only the weights and start at step 0.", needs="load"
    )
    no_load_optim: bool = arg(
        False,
        "With --load: do not load the optimizer.",
        idle_without="load",
    )
    no_load_rng: bool = arg(
        False,
        "With --load: do not load the random state.",
        idle_without="load",
    )
    no_save_optim: bool = arg(
        False,
        "Do not save the optimizer.",
        idle_without="save",
    )
    no_save_rng: bool = arg(
        False,
        "Do not save the random state.",
        idle_without="save",
    )
    save_hf: str | None = arg(
        None,
        "Folder for a Hugging Face copy of the final weights; {rollout_id} becomes the number of "
        "the last rollout.",
        needs="hf_checkpoint, for its config.json and tokenizer",
    )
    exit_interval: int | None = arg(
        None,
        "Save and end the run after the next rollout that is a multiple of N.",
        legal=AT_LEAST_ONE,
    )
    exit_duration_in_mins: float | None = arg(
        None,
        "Save and end the run after the first rollout that ends later than this many minutes.",
        legal=POSITIVE,
    )

    @property
    def load_is_save(self) -> bool:
        """Whether --load and --save are the same folder, under whatever names, or neither is
        given: a run that continues itself."""
        if self.load is None or self.save is None:
            return self.load == self.save
        return Path(self.load).resolve() == Path(self.save).resolve()
