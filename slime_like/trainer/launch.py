"""From a checked configuration to a finished run: patches, process groups, the trainer, and the report at the end."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_patches
from arguments.run_config import RunConfig
from slime_like.checkpoints.lock import hold_folders
from slime_like.distributed.activity import Activity
from slime_like.distributed.failure_report import default_store, explain, leave_address, say_failed
from slime_like.distributed.signals import STATUS_FILE, end_at_once_on_sigterm, leave_status
from slime_like.distributed.watchdog import Watchdog, write_stacks_on_request
from slime_like.errors import RunError

if TYPE_CHECKING:
    from slime_like.megatron.parallel_layout import ParallelLayout

FAILED, INTERRUPTED = 1, 130


def run(config: RunConfig, rank: int) -> int:
    """Returns the exit status: 0, 1 for an error, 75 when SIGTERM ended the run and it may go on, 130 when interrupted. An error that has
    a user's remedy is printed once, without a traceback."""
    end_at_once_on_sigterm(rank, resumable=config.checkpoint.save is not None)
    status = run_ranks(config, rank)
    leave_status(status, rank)
    return status


def run_ranks(config: RunConfig, rank: int) -> int:
    """The run without what it leaves for a script that started it."""
    write_stacks_on_request()
    cautions = list(config.warnings)
    if os.environ.get(STATUS_FILE) and config.checkpoint.load != config.checkpoint.save:
        cautions.append(
            "this job may be requeued, and would start over: give --load the folder of --save"
        )
    prepare(config, rank, cautions)
    # megatron-core reads its globals on import, so this comes after the patches
    from slime_like.megatron.init import process_groups

    try:
        with (
            locked_folders(config, rank),
            process_groups(
                config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed
            ) as layout,
        ):
            return train(config, layout)
    except (RunError, OSError) as error:  # a folder in use; ranks that could not meet
        print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED


def locked_folders(config: RunConfig, rank: int) -> AbstractContextManager[None]:
    """On rank 0: the folders that two runs at once would destroy, held for this run."""
    folders = [
        (flag, folder)
        for flag, folder in (
            ("--save", config.checkpoint.save),
            ("--output-dir", config.logging.output_dir),
        )
        if folder is not None
    ]
    if rank != 0:
        return nullcontext()
    return hold_folders(folders, lambda text: print(f"warning: {text}", flush=True))


def prepare(config: RunConfig, rank: int, cautions: Sequence[str]) -> None:
    """What every program does before its ranks meet: patches, and on rank 0 what there is to say."""
    die_with_the_launcher()
    quiet_dependencies()
    report = megatron_patches.apply()
    if rank == 0:
        for text in cautions:
            print(f"warning: {text}", flush=True)
        for text in config.notes:
            print(f"note: {text}", flush=True)
        if config.debug.print_megatron_patches:
            print(report, flush=True)


def die_with_the_launcher() -> None:
    """Under torchrun on Linux: a rank whose torchrun is killed ends too, rather than train on beside the run that is started next."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def train(config: RunConfig, layout: ParallelLayout) -> int:
    """The run, once the ranks have met, under the eyes of the other ranks."""
    activity = Activity()
    leave_address(layout.rank)
    limit_s = config.parallel.heartbeat_timeout_s
    if layout.world_size == 1 or not limit_s:
        return train_watched(config, layout, activity)
    with Watchdog(default_store(), layout.rank, layout.world_size, limit_s, activity):
        return train_watched(config, layout, activity)


def train_watched(config: RunConfig, layout: ParallelLayout, activity: Activity) -> int:
    from slime_like.trainer.trainer import Trainer

    trainer = None
    try:
        output_dir = shared_output_dir(config)
        if layout.rank == 0:
            print(
                f"slime_like: {layout.describe()}, {layout.world_size} process(es), writing {output_dir}",
                flush=True,
            )
        trainer = Trainer(config, layout, output_dir, on_phase=activity.enter)
        status = trainer.run()
        trainer.close()
        activity.enter("end")
        if layout.rank == 0:
            write_report(output_dir)
    except KeyboardInterrupt:
        if is_first_to_fail():
            print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        return fail(error, layout)
    finally:
        if trainer is not None:
            trainer.close()
    return status


def fail(error: Exception, layout: ParallelLayout) -> int:
    """The exit status of a rank that an error ended. One rank tells it, as what it comes of where other ranks are gone."""
    say_failed(layout.rank)
    if is_first_to_fail():
        tell(explain(error, layout.world_size))
    return FAILED


def tell(error: BaseException) -> None:
    """One message where the user has a remedy: a setting, a file, a number that must hold. Anything else is ours, with its traceback.
    SLIME_LIKE_TRACEBACK=1 in the environment shows the traceback of every error."""
    if not isinstance(error, ValueError | OSError | RunError) or os.environ.get(
        "SLIME_LIKE_TRACEBACK"
    ):
        traceback.print_exc()
    else:
        for note in getattr(
            error, "__notes__", ()
        ):  # the traceback of an error of ours on another rank
            print(note, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr, flush=True)


def is_first_to_fail() -> bool:
    """True on one rank only: an error that all ranks meet is told once, and so is one that the others see as a lost connection."""
    try:
        return int(default_store().add("slime_like/errors", 1)) == 1
    except RuntimeError:  # the process that holds the store has failed and told why
        return False


def shared_output_dir(config: RunConfig) -> Path:
    """The same folder on every rank, also when its name is the time."""
    from slime_like.distributed.collectives import from_rank_zero

    return Path(
        from_rank_zero(
            lambda: config.logging.output_dir or f"outputs/{time.strftime('%Y%m%d-%H%M%S')}"
        )
    )


def write_report(output_dir: Path) -> None:
    """The plot and the table of the run."""
    from slime_like.metrics import report

    report.write_report(output_dir / "metrics.jsonl")


def quiet_dependencies() -> None:
    """Libraries announce what is missing on a machine without a GPU; `--print-megatron-patches` says it better."""
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*|transformers\..*")
    for name in ("megatron", "transformers", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
