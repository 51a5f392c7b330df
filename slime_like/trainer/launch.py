"""From a checked configuration to a finished run: patches, process groups, the trainer, and the
report at the end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_patches
from arguments.run_config import RunConfig
from slime_like.checkpoints.lock import hold_folders
from slime_like.distributed.activity import Activity
from slime_like.distributed.failure_report import (
    LINGER_S,
    WAIT_S,
    job,
    leave_address,
    linger,
    looks_lost,
    message_of,
)
from slime_like.distributed.signals import (
    CTRL_C_STATUS,
    INTERRUPTED_STATUS,
    LAUNCHER_STATUS_FILE,
    STATUS_FILE,
    end_at_once,
    leave_status,
)
from slime_like.distributed.stacks import StackFile
from slime_like.distributed.watchdog import Watchdog, write_stacks_on_request
from slime_like.errors import RunError
from slime_like.import_utils import exit_called
from slime_like.logs import leave_error, log_into, set_up_logging
from slime_like.metrics.logger import FILE_NAME as METRICS_FILE
from slime_like.metrics.startup import Say
from slime_like.text import mask_argv

if TYPE_CHECKING:
    from slime_like.megatron.parallel_layout import ParallelLayout

FAILED, INTERRUPTED = 1, CTRL_C_STATUS
HURRIED_S = 10.0  # for trackers, once a scheduler has asked for the end: it kills soon
logger = logging.getLogger(__name__)


def run(config: RunConfig, rank: int, startup: Say = lambda what: None) -> int:
    """One rank of a run.

    Args:
        startup: called with what begins, up to the first rollout.

    Returns:
        The exit status: 0, 1 for an error, 75 when SIGTERM or SIGHUP ended the run and it may be
        continued, 130 after Ctrl-C. An error that has a user's remedy is shown once, without a
        traceback.
    """
    end_at_once(rank, resumable=config.checkpoint.save is not None)
    status = run_ranks(config, rank, startup)
    leave_status(status, rank)
    return status


def run_ranks(config: RunConfig, rank: int, startup: Say) -> int:
    """The run without what it leaves for a script that started it."""
    write_stacks_on_request()
    cautions = list(config.warnings)
    if os.environ.get(STATUS_FILE) and config.checkpoint.load != config.checkpoint.save:
        cautions.append(
            "this job may be requeued, and would start over: give --load the folder of --save"
        )
    prepare(config, rank, cautions)
    if config.preflight.preflight:
        from slime_like.preflight import run_preflight

        return run_preflight(config)
    # megatron-core reads its globals on import, so this comes after the patches
    from slime_like.megatron.init import process_groups

    if "RANK" in os.environ:
        startup(f"waiting for the {os.environ.get('WORLD_SIZE')} processes to meet")
    try:
        with (
            locked_folders(config, rank),
            process_groups(
                config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed
            ) as layout,
        ):
            return train(config, layout, startup)
    except (RunError, OSError) as error:  # a folder in use; ranks that could not meet
        logger.error("%s", error)
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
    return hold_folders(folders)


def prepare(config: RunConfig, rank: int, cautions: Sequence[str]) -> None:
    """What every program does before its ranks meet: patches, and on rank 0 what there is to say."""
    set_up_logging(rank)
    die_with_the_launcher()
    quiet_dependencies()
    report = megatron_patches.apply()
    keep_freed_memory()
    if rank == 0:
        for text in cautions:
            logger.warning("%s", text)
        for text in config.notes:
            logger.info("note: %s", text)
        if config.debug.print_megatron_patches:
            logger.info("%s", report)


def die_with_the_launcher() -> None:
    """Under torchrun on Linux: a rank whose torchrun is killed ends too, rather than train on
    beside the run that is started next."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Without a GPU, with glibc: activations that a pass frees stay with the process for the next
    pass. Left to itself malloc gives them back to the kernel, which clears every page again: a
    seventh of a short training pass. MALLOC_TRIM_THRESHOLD_ in the environment is obeyed."""
    import torch

    if torch.cuda.is_available() or platform.libc_ver()[0] != "glibc":
        return
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    trim_threshold, mmap_threshold = -1, -3  # names of <malloc.h>; -1 as a value is: never
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 32 << 20)  # the most that glibc takes
    libc.mallopt(trim_threshold, -1)


def train(config: RunConfig, layout: ParallelLayout, startup: Say) -> int:
    """The run, once the ranks have met, watched by the other ranks."""
    activity = Activity()
    leave_address(layout.rank)
    limit_s = config.parallel.heartbeat_timeout_s
    if layout.world_size == 1 or not limit_s:
        return train_watched(config, layout, activity, startup)
    with Watchdog(job().store, layout.rank, layout.world_size, limit_s, activity):
        return train_watched(config, layout, activity, startup)


def train_watched(
    config: RunConfig, layout: ParallelLayout, activity: Activity, startup: Say
) -> int:
    trainer = profiler = stacks = output_dir = None
    try:
        output_dir = shared_output_dir(config)
        if layout.rank == 0:
            log_into(output_dir)
        logger.info(
            "slime_like: %s, %d process(es), writing %s",
            layout.describe(),
            layout.world_size,
            output_dir,
        )
        if layout.rank == 0:
            record(config, layout, output_dir)
        with contextlib.suppress(OSError):
            stacks = StackFile(output_dir, layout.rank)
        startup("importing transformers and the trainer")
        from slime_like.trainer.trainer import Trainer

        startup("loading the model, the prompts and the rollout engine")
        on_phase: Say = activity.enter
        if config.logging.record_timeline:
            on_phase = with_timeline(activity.enter, config, output_dir, layout)
        traced: Callable[[int], AbstractContextManager[object]] = nullcontext
        if config.profiling.profile or config.profiling.record_memory_history:
            from slime_like.trainer.profiling import profiler_of

            profiler = profiler_of(config, output_dir, layout.rank)
            if profiler is not None:
                on_phase, traced = both(on_phase, profiler.enter), profiler.rollout
        trainer = Trainer(config, layout, output_dir, on_phase=on_phase, traced=traced)
        startup("first rollout")
        status = trainer.run()
        activity.enter("end")
        if trainer.logger is not None:
            plot = write_report(output_dir, plot=not config.logging.no_plot)
            if plot is not None:
                trainer.logger.attach(plot)
        interrupted = status in (INTERRUPTED_STATUS, INTERRUPTED)
        trainer.close(finish_s=HURRIED_S if interrupted else None)
        if layout.rank == 0 and interrupted and config.checkpoint.save:
            logger.info("to continue: %s", command_to_continue(config, layout.world_size))
    except SystemExit as error:  # in a class of the user's; with its status 0 nobody would know
        return fail(exit_called(error), layout, output_dir)
    except Exception as error:
        return fail(error, layout, output_dir)
    finally:
        if stacks is not None:
            stacks.close()
        if profiler is not None:
            profiler.close()
        if trainer is not None:
            trainer.close()
    return status


def both(first: Say, second: Say) -> Say:
    """One function that calls two."""

    def call(phase: str) -> None:
        first(phase)
        second(phase)

    return call


def with_timeline(enter: Say, config: RunConfig, output_dir: Path, layout: ParallelLayout) -> Say:
    """`enter`, and --record-timeline."""
    from slime_like.checkpoints.folders import is_checkpoint_root
    from slime_like.metrics.timeline import PhaseTimeline

    flags = config.checkpoint
    resumed = flags.load is not None and not flags.finetune and is_checkpoint_root(flags.load)
    timeline = PhaseTimeline(output_dir, layout.rank, resumed=resumed, world_size=layout.world_size)
    return both(enter, timeline.enter)


def record(config: RunConfig, layout: ParallelLayout, output_dir: Path) -> None:
    """run.json. A run does not end for want of it: what cannot be written is reported by the
    metrics."""
    from slime_like.trainer.run_record import write_run_record

    with contextlib.suppress(OSError):
        write_run_record(
            config,
            output_dir,
            layout=layout.describe(),
            patches=str(megatron_patches.apply()),
        )


def fail(error: Exception, layout: ParallelLayout, output_dir: Path | None = None) -> int:
    """The exit status of a rank that an error ended. One rank shows it, as what it comes of where
    other ranks are gone."""
    shown = message_of(error)
    if shown is not None:
        show(shown)
        if output_dir is not None:
            leave_error(output_dir, str(shown) or type(shown).__name__)
    linger(WAIT_S if looks_lost(error) else LINGER_S)
    return FAILED


def show(error: BaseException) -> None:
    """One message where the user has a remedy: a setting, a file, a number that must hold. Anything
    else is ours, with its traceback. SLIME_LIKE_TRACEBACK=1 in the environment shows the traceback
    of every error."""
    if not isinstance(error, ValueError | OSError | RunError) or os.environ.get(
        "SLIME_LIKE_TRACEBACK"
    ):
        traceback.print_exception(error)
    else:
        for note in getattr(
            error, "__notes__", ()
        ):  # the traceback of an error of ours on another rank
            print(note, file=sys.stderr)
    logger.error("%s", error)


def command_to_continue(config: RunConfig, world_size: int) -> str:
    """As a user types it. Of several nodes only the flags of train.py are known here."""
    argv = mask_argv(config.argv)
    if config.checkpoint.load != config.checkpoint.save:
        argv += ["--load", str(config.checkpoint.save)]
    by_name = sys.argv[0].startswith("slime-like ")
    program = ["slime-like", "train"] if by_name else ["train.py"]
    if world_size > 1:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
        ours = os.environ.get(LAUNCHER_STATUS_FILE)
        launcher = ["python", "-m", "slime_like.torchrun"] if ours else ["torchrun"]
        launcher += ["--nproc-per-node", ranks, *(["--no-python"] if by_name else [])]
    else:
        launcher = [] if by_name else ["python"]
    return shlex.join([*launcher, *program, *argv])


def shared_output_dir(config: RunConfig) -> Path:
    """The same folder on every rank: --output-dir, that of the run that is continued, or one that
    is named by the time."""
    from slime_like.distributed.collectives import from_rank_zero

    return Path(
        from_rank_zero(
            lambda: (
                config.logging.output_dir
                or output_dir_of_the_run(config)
                or f"outputs/{time.strftime('%Y%m%d-%H%M%S')}"
            )
        )
    )


def output_dir_of_the_run(config: RunConfig) -> str | None:
    """Where the run wrote that --save and --load of one folder continue; None for the first start,
    and where another run begins from a checkpoint (--finetune, --ckpt-step, another --save)."""
    from slime_like.checkpoints.folders import checkpoint_folder, is_checkpoint_root, newest_step
    from slime_like.checkpoints.state import read_trainer_state

    flags = config.checkpoint
    if (
        flags.load is None
        or flags.load != flags.save
        or flags.finetune
        or flags.ckpt_step is not None
        or not is_checkpoint_root(flags.load)
    ):
        return None
    try:
        state = read_trainer_state(checkpoint_folder(flags.load, newest_step(flags.load)[0]))
    except ValueError:
        return None  # loading says what is wrong with it
    folder = state.get("output_dir")
    has_metrics = isinstance(folder, str) and Path(folder, METRICS_FILE).is_file()
    return folder if has_metrics else None


def write_report(output_dir: Path, *, plot: bool) -> Path | None:
    """The table of the run, and its plot, with its path. The run is done: what goes wrong here does
    not make it a failed one."""
    from slime_like.metrics import report

    try:
        return report.write_report(output_dir / METRICS_FILE, plot=plot)
    except Exception as error:
        logger.warning("no plot and table of %s: %s: %s", output_dir, type(error).__name__, error)
        return None


def quiet_dependencies() -> None:
    """Libraries announce what is missing on a machine without a GPU; `--print-megatron-patches`
    says it better."""
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*|transformers\..*")
    for name in ("megatron", "transformers", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
