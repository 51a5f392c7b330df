"""Run a training job from a validated configuration: apply patches, create process groups, train,
write the report."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_patches
from arguments.run_config import RunConfig
from slime_like.checkpoints.lock import hold_folders
from slime_like.config import flag_name
from slime_like.distributed.activity import Activity
from slime_like.distributed.failure_report import (
    LINGER_S,
    WAIT_S,
    job,
    join_job,
    linger,
    looks_lost,
    reported_error,
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

FAILED = 1
INTERRUPTED = CTRL_C_STATUS
ONE_THREAD_BELOW = 512  # hidden size
URGENT_S = 10.0  # time for trackers to finish after SIGTERM; schedulers kill soon after it
logger = logging.getLogger(__name__)


def run(config: RunConfig, rank: int, startup: Say = lambda what: None) -> int:
    """Run one rank of a training job.

    Args:
        startup: Called with a description of each startup phase, until the first rollout.

    Returns:
        The exit status: 0 success; 1 an error; 75 ended by SIGTERM or SIGHUP, resumable; 130
        Ctrl-C. Errors that the user can fix are printed once, without a traceback.
    """
    end_at_once(rank, resumable=config.checkpoint.save is not None)
    status = run_ranks(config, rank, startup)
    leave_status(status, rank)
    return status


def run_ranks(config: RunConfig, rank: int, startup: Say) -> int:
    """As `run`, without the files that it leaves for launch scripts."""
    write_stacks_on_request()
    cautions = list(config.warnings)
    flags = config.checkpoint
    may_be_requeued = bool(os.environ.get(STATUS_FILE))
    if may_be_requeued and not flags.load_is_save:
        cautions.append(
            "this job may be requeued and would then start from scratch: set --load to the folder "
            "of --save"
        )
    elif may_be_requeued and (flags.finetune or flags.ckpt_step is not None):
        flag = "--finetune" if flags.finetune else "--ckpt-step"
        cautions.append(
            f"this job may be requeued and would then start with {flag} again; give it another "
            "folder as --load once, and then this one without it"
        )
    prepare(config, rank, cautions)
    if config.preflight.preflight:
        from slime_like.preflight import run_preflight

        return run_preflight(config)
    if "RANK" in os.environ:
        startup(f"waiting for the rendezvous of {os.environ.get('WORLD_SIZE')} processes")
    try:
        with joined_ranks(config, rank) as (layout, activity):
            return train_watched(config, layout, activity, startup)
    except (RunError, OSError) as error:  # a folder in use; a failed rendezvous
        logger.error("%s", error)
        return FAILED


@contextmanager
def joined_ranks(config: RunConfig, rank: int) -> Iterator[tuple[ParallelLayout, Activity]]:
    """The process groups of a run, after `prepare`, with its folders locked and the ranks
    monitoring each other. Raises RunError for a folder in use or a failed rendezvous."""
    # megatron-core reads its globals on import, so this comes after the patches
    from slime_like.megatron.init import process_groups

    with (
        locked_folders(config, rank),
        process_groups(
            config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed
        ) as layout,
    ):
        activity = Activity()
        join_job(layout.rank)
        limit_s = config.parallel.heartbeat_timeout_s
        if layout.world_size == 1 or not limit_s:
            yield layout, activity
            return
        with Watchdog(job().store, layout.rank, layout.world_size, limit_s, activity):
            yield layout, activity


def locked_folders(config: RunConfig, rank: int) -> AbstractContextManager[None]:
    """On rank 0, lock the folders that two concurrent runs would corrupt."""
    if rank != 0:
        return nullcontext()
    folders = {"--save": config.checkpoint.save, "--output-dir": config.logging.output_dir}
    return hold_folders([(flag, path) for flag, path in folders.items() if path is not None])


def prepare(config: RunConfig, rank: int, cautions: Sequence[str]) -> None:
    """Setup of every program before the rendezvous: apply patches; on rank 0 log warnings."""
    set_up_logging(rank)
    die_with_the_launcher()
    quiet_dependencies()
    report = megatron_patches.apply()
    keep_freed_memory()
    use_one_thread_if_small(config.megatron.transformer.hidden_size)
    if rank == 0:
        for text in cautions:
            logger.warning("%s", text)
        for text in config.notes:
            logger.info("note: %s", text)
        if config.debug.print_megatron_patches:
            logger.info("%s", report)


def die_with_the_launcher() -> None:
    """Under torchrun on Linux, end this rank when its torchrun is killed. Otherwise it would keep
    training next to the run that is started in its place."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def use_one_thread_if_small(hidden_size: int) -> None:
    """On the CPU, compute with one thread if the matrices are too small for several, which would
    mostly wait for each other, and actively: next to other programs, a starter of `slime-like new`
    took 7 times the processor time with two threads. OMP_NUM_THREADS takes precedence, which
    torchrun sets to 1 for several processes."""
    import torch

    if torch.cuda.is_available() or "OMP_NUM_THREADS" in os.environ:
        return
    if hidden_size < ONE_THREAD_BELOW:
        torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """On the CPU with glibc, keep freed activations in the process for the next forward pass. By
    default malloc returns them to the kernel, which zeroes every page again: a seventh of the time
    of a short training pass. MALLOC_TRIM_THRESHOLD_ in the environment takes precedence."""
    import torch

    if torch.cuda.is_available() or platform.libc_ver()[0] != "glibc":
        return
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    # M_* of <malloc.h>; a threshold of -1 means never
    trim_threshold = -1
    mmap_threshold = -3
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 32 << 20)  # glibc's maximum
    libc.mallopt(trim_threshold, -1)


def train_watched(
    config: RunConfig, layout: ParallelLayout, activity: Activity, startup: Say
) -> int:
    """As `train_in`, with errors reported once for all ranks."""
    output_dir = None
    try:
        output_dir = shared_output_dir(config)
        return train_in(output_dir, config, layout, activity, startup)
    except SystemExit as error:  # of user code; its status may be 0, which would look like success
        return fail(exit_called(error), layout, output_dir)
    except Exception as error:
        return fail(error, layout, output_dir)


def processes_of(layout: ParallelLayout) -> str:
    """How the processes share the work, for the first line of a run: "TP2 PP1 CP1 DP1, 2
    processes". One process shares nothing; on the CPU it may have several threads."""
    import torch

    if layout.world_size == 1:
        threads = torch.get_num_threads()
        several = threads > 1 and not torch.cuda.is_available()
        return f"1 process of {threads} threads" if several else "1 process"
    return f"{layout.describe()}, {layout.world_size} processes"


def train_in(
    output_dir: Path, config: RunConfig, layout: ParallelLayout, activity: Activity, startup: Say
) -> int:
    """Train, writing to this folder. Returns the exit status of `Trainer.run`."""
    trainer = profiler = stacks = None
    try:
        if layout.rank == 0:
            log_into(output_dir)
        logger.info(
            "slime_like: %s, writing %s",
            processes_of(layout),
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

            profiler = profiler_of(config.profiling, output_dir, layout.rank)
            if profiler is not None:
                on_phase = both(on_phase, profiler.enter)
                traced = profiler.rollout
        trainer = Trainer(config, layout, output_dir, on_phase=on_phase, traced=traced)
        startup("first rollout")
        status = trainer.run()
        activity.enter("end")
        if trainer.logger is not None:
            plot = write_report(output_dir, plot=not config.logging.no_plot)
            if plot is not None:
                trainer.logger.attach(plot)
        interrupted = status in (INTERRUPTED_STATUS, INTERRUPTED)
        trainer.close(finish_s=URGENT_S if interrupted else None)
        if layout.rank == 0 and interrupted and config.checkpoint.save:
            logger.info("to continue: %s", command_to_continue(config, layout.world_size))
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
    """Wrap `enter` to record the timeline too, with --record-timeline."""
    from slime_like.metrics.timeline import PhaseTimeline
    from slime_like.trainer.earlier_run import resumes

    timeline = PhaseTimeline(
        output_dir, layout.rank, resumed=resumes(config.checkpoint), world_size=layout.world_size
    )
    return both(enter, timeline.enter)


def record(config: RunConfig, layout: ParallelLayout, output_dir: Path) -> None:
    """Write run.json. A failure does not end the run; the metrics logger reports unwritable
    folders."""
    from slime_like.trainer.run_record import write_run_record

    with contextlib.suppress(OSError):
        write_run_record(
            config, output_dir, layout=layout.describe(), patches=str(megatron_patches.apply())
        )


def fail(error: Exception, layout: ParallelLayout, output_dir: Path | None = None) -> int:
    """Report an error that ended this rank, and return its exit status. Only one rank prints it,
    with the root cause if other ranks were lost."""
    reported = reported_error(error)
    if reported is not None:
        show(reported)
        if output_dir is not None:
            leave_error(output_dir, str(reported) or type(reported).__name__)
    linger(WAIT_S if looks_lost(error) else LINGER_S)
    return FAILED


def show(error: BaseException) -> None:
    """Print one message if the user can fix the error (a setting, a file, a guard); print the
    traceback of any other. SLIME_LIKE_TRACEBACK=1 prints the traceback of every error."""
    for_users = isinstance(error, ValueError | OSError | RunError)
    if not for_users or os.environ.get("SLIME_LIKE_TRACEBACK"):
        traceback.print_exception(error)
    else:
        # the traceback of an internal error on another rank
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
    logger.error("%s", error)


def command_to_continue(config: RunConfig, world_size: int) -> str:
    """The command that resumes this run. On several nodes, only the flags of train.py."""
    flags = config.checkpoint
    argv = mask_argv(config.argv)
    # later words override earlier ones, and a run file: of another checkpoint, the run may have
    # wanted an old step, or a part
    if not flags.load_is_save:
        argv += ["--load", str(flags.save)]
    if flags.ckpt_step is not None:
        argv += ["--ckpt-step", "null"]
    for name in ("finetune", "no_load_optim", "no_load_rng"):
        if getattr(flags, name):
            argv += [flag_name(name), "false"]
    by_name = sys.argv[0].startswith("slime-like ")
    program = ["slime-like", "train"] if by_name else ["train.py"]
    if world_size > 1:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
        launcher = ["torchrun"]
        if os.environ.get(LAUNCHER_STATUS_FILE):
            launcher = ["python", "-m", "slime_like.torchrun"]
        launcher += ["--nproc-per-node", ranks, *(["--no-python"] if by_name else [])]
    else:
        launcher = [] if by_name else ["python"]
    return shlex.join([*launcher, *program, *argv])


def shared_output_dir(config: RunConfig) -> Path:
    """The output folder, equal on every rank: --output-dir, that of the resumed run, or a new one
    with a timestamp. Rank 0 moves an earlier run in it out of the way of one that does not resume
    it."""
    from slime_like.distributed.collectives import from_rank_zero
    from slime_like.trainer import earlier_run

    def choose() -> str:
        folder = config.logging.output_dir or resumed_output_dir(config)
        folder = folder or f"outputs/{time.strftime('%Y%m%d-%H%M%S')}"
        if earlier_run.resumes(config.checkpoint):
            earlier_run.put_back(Path(folder), config.checkpoint.load)
        else:
            earlier_run.set_aside_earlier_run(config.debug, Path(folder))
        return folder

    return Path(from_rank_zero(choose))


def resumed_output_dir(config: RunConfig) -> str | None:
    """The output folder of the run that is resumed (--save and --load are the same folder). None on
    the first start, and for a new run from a checkpoint (--finetune, --ckpt-step, another
    --save)."""
    from slime_like.checkpoints.folders import checkpoint_folder, is_checkpoint_root, newest_step
    from slime_like.checkpoints.state import read_trainer_state

    flags = config.checkpoint
    if (
        flags.load is None
        or not flags.load_is_save
        or flags.finetune
        or flags.ckpt_step is not None
        or not is_checkpoint_root(flags.load)
    ):
        return None
    try:
        state = read_trainer_state(checkpoint_folder(flags.load, newest_step(flags.load)[0]))
    except ValueError:
        return None  # loading reports the problem
    folder = state.get("output_dir")
    has_metrics = isinstance(folder, str) and Path(folder, METRICS_FILE).is_file()
    return folder if has_metrics else None


def write_report(output_dir: Path, *, plot: bool) -> Path | None:
    """Write the table and plot of the run and return its path. The run has succeeded already, so an
    error here is only a warning."""
    from slime_like.metrics import report

    try:
        return report.write_report(output_dir / METRICS_FILE, plot=plot)
    except Exception as error:
        logger.warning(
            "could not write plot and table of %s: %s: %s", output_dir, type(error).__name__, error
        )
        return None


def quiet_dependencies() -> None:
    """Silence library messages about missing GPU packages; `--print-megatron-patches` lists
    them."""
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*|transformers\..*")
    for name in ("megatron", "transformers", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
