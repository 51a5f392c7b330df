"""Start the workers of the server from a validated configuration: patches, process groups, command
loop."""

from __future__ import annotations

import logging
import os
import signal

from arguments.run_config import RunConfig
from slime_like.distributed.failure_report import join_job
from slime_like.errors import RunError
from slime_like.metrics.startup import Say
from slime_like.trainer.launch import FAILED, INTERRUPTED, fail, prepare

logger = logging.getLogger(__name__)


def run(config: RunConfig, rank: int, startup: Say) -> int:
    """Run one rank of the server; returns the exit status. startup: called with the name of each
    startup phase."""
    prepare(config, rank, config.warnings)
    # megatron-core reads its globals on import, so it must be imported after patching
    from slime_like.megatron.init import process_groups
    from slime_like.tinker.worker import Terminated, serve

    def stop(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    if "RANK" in os.environ:
        startup(f"waiting for all {os.environ.get('WORLD_SIZE')} processes")
    try:
        with process_groups(
            config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed
        ) as layout:
            join_job(layout.rank)
            try:
                serve(config, layout, startup)
            except KeyboardInterrupt:
                return INTERRUPTED
            except Exception as error:
                return fail(error, layout)
    except RunError as error:  # the ranks could not connect: each one prints its own error
        logger.error("%s", error)
        return FAILED
    return 0
